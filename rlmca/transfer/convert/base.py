"""What a conversion is made of: tensors in files, a source that says where they are, a target that says what goes where.

Between the two stands the Hugging Face side of a `ModelLayout`: a source tells where each Hugging Face tensor lies in its files,
a target which parts of which Hugging Face tensors make up what it writes. Neither knows the other, and `execute` brings the
bytes across.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from rlmca.layouts import ModelLayout
from rlmca.layouts.boxes import Box, Shape, Tile

DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "U8": torch.uint8,
    "I64": torch.int64,
}
"""Types of stored tensors by the names that safetensors has for them."""


class ConvertError(ValueError):
    """A conversion that cannot be made, or that did not succeed; the message says what, where, and what to do."""


class Slot(NamedTuple):
    """A tensor in a file, row-major and without gaps from byte `offset` on. `dtype` is a key of `DTYPES`."""

    path: Path
    offset: int
    shape: Shape
    dtype: str


class Part(NamedTuple):
    """Box `src` of a stored tensor is box `dst` of the tensor asked for. One of them may have more axes, of length 1, in front."""

    slot: Slot
    src: Box
    dst: Box


class Stored(NamedTuple):
    """Shape and type (a key of `DTYPES`) of a Hugging Face tensor as a source gives it."""

    shape: Shape
    dtype: str


Format = Literal["hf", "torch_dist", "ranks"]
"""A Hugging Face folder, Megatron's distributed checkpoint, a file per rank."""


class Source(Protocol):
    """A folder that holds a model. Whoever makes one has checked that all of its tensors are there, with the right shapes."""

    @property
    def format(self) -> Format:
        """What it is read from."""
        ...

    @property
    def path(self) -> Path:
        """The folder; config.json, the tokenizer and the like lie here."""
        ...

    @property
    def layout(self) -> ModelLayout:
        """The model, with its experts in the form in which `tensors` names them."""
        ...

    @property
    def tensors(self) -> Mapping[str, Stored]:
        """Every Hugging Face tensor, in the order of the model; then what its exports carry along (`MegatronModel.kept`)."""
        ...

    def parts(self, name: str) -> Sequence[Part] | None:
        """Where the tensor's elements are, each once (`dst` is in the tensor); None when they must be computed by `read`."""
        ...

    def read(self, name: str, box: Box) -> Tensor:
        """The values in `box`, in the type that `tensors` says or one of more bits. For tensors without `parts`."""
        ...

    def close(self) -> None:
        """Close what is open."""
        ...


class Around:
    """A source that is another one but for what a subclass changes."""

    def __init__(self, source: Source) -> None:
        self._source = source

    @property
    def format(self) -> Format:
        """See `Source`."""
        return self._source.format

    @property
    def path(self) -> Path:
        """See `Source`."""
        return self._source.path

    @property
    def layout(self) -> ModelLayout:
        """See `Source`."""
        return self._source.layout

    @property
    def tensors(self) -> Mapping[str, Stored]:
        """See `Source`."""
        return self._source.tensors

    def parts(self, name: str) -> Sequence[Part] | None:
        """See `Source`."""
        return self._source.parts(name)

    def read(self, name: str, box: Box) -> Tensor:
        """See `Source`."""
        return self._source.read(name, box)

    def close(self) -> None:
        """See `Source`."""
        self._source.close()


class Item(NamedTuple):
    """A tensor to write: `copies` fill it from Hugging Face tensors, and what they do not cover is zero (padding).

    `name` is its own among the items of a target. `slot.path` is relative to the new folder.
    """

    name: str
    slot: Slot
    copies: tuple[Tile, ...]


class Target(Protocol):
    """A folder to write."""

    @property
    def archives(self) -> bool:
        """Whether its files carry a CRC-32 for every item."""
        ...

    @property
    def items(self) -> Sequence[Item]:
        """Everything that bytes are to be brought to, by file and offset."""
        ...

    def begin(self, folder: Path) -> None:
        """Make the files in an empty folder, at their full size, with all but the bytes of the items."""
        ...

    def finish(self, folder: Path, crc32: Mapping[str, int] | None) -> None:
        """Write what depends on the bytes: their checksums by item (without `archives` they are 0), None when nobody counted."""
        ...


def moved(inner: Box, outer: Box, to: Box) -> Box:
    """Box `inner`, which lies in `outer`, where `outer` is moved onto `to`. Either of these may have more axes of length 1 in front.

    `inner` has the axes of `outer`.
    """
    extra = len(outer) - len(to)
    rest, base, onto = inner[max(extra, 0) :], outer[max(extra, 0) :], to[max(-extra, 0) :]
    shifted = tuple((a + t - o, b + t - o) for (a, b), (o, _), (t, _) in zip(rest, base, onto, strict=True))
    return (*to[: max(-extra, 0)], *shifted)
