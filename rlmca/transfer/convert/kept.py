"""Tensors of a model's folder that Megatron's model has no place for: a file of their own beside a Megatron checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rlmca.transfer.convert.base import Around, ConvertError, Item, Part, Slot, Source, Stored, Target
from rlmca.transfer.convert.execute import whole
from rlmca.transfer.convert.hf import HFTarget

KEPT = "kept.safetensors"
"""Our own file, at which Megatron does not look."""


class WithKept:
    """A target and the kept tensors beside it."""

    def __init__(self, target: Target, kept: Mapping[str, Stored]) -> None:
        self._target, self._kept = target, HFTarget(kept, single=KEPT)
        self.items: Sequence[Item] = [*target.items, *self._kept.items]

    @property
    def archives(self) -> bool:
        """See `Target`."""
        return self._target.archives

    def begin(self, folder: Path) -> None:
        """See `Target`."""
        self._target.begin(folder)
        self._kept.begin(folder)

    def finish(self, folder: Path, crc32: Mapping[str, int] | None) -> None:
        """See `Target`."""
        self._target.finish(folder, crc32)


class KeptSource(Around):
    """A source and the kept tensors beside it, given with their places."""

    def __init__(self, source: Source, kept: Mapping[str, Slot]) -> None:
        if alien := [name for name in kept if not name.startswith(source.layout.megatron.kept or ("\0",))]:
            raise ConvertError(f"{source.path}: no part of the model: {', '.join(alien[:8])} in {KEPT}")
        super().__init__(source)
        self._kept = kept
        self._tensors = {**source.tensors, **{name: Stored(slot.shape, slot.dtype) for name, slot in sorted(kept.items())}}

    @property
    def tensors(self) -> Mapping[str, Stored]:
        """See `Source`."""
        return self._tensors

    def parts(self, name: str) -> Sequence[Part] | None:
        """See `Source`."""
        return whole(self._kept[name]) if name in self._kept else super().parts(name)
