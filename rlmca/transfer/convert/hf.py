"""Hugging Face folders as a source and as a target."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from rlmca.layouts import ModelLayout
from rlmca.layouts.boxes import Box, Shape, Tile, full
from rlmca.transfer.convert.base import DTYPES, ConvertError, Format, Item, Part, Slot, Stored
from rlmca.transfer.convert.computed import BlockScaled
from rlmca.transfer.convert.execute import whole
from rlmca.transfer.convert.headers import read_headers
from rlmca.transfer.convert.storage import Files, same_bytes, size_of
from rlmca.transfer.hf_folder import INDEX, check_tensors, locate, read_config
from rlmca.transfer.hf_writer import header_bytes, index_text, shard_name, shards_of
from rlmca.transfer.kept import kept_names

QUANTIZATION = "quantization_config"


class HFTensors:
    """The tensors of a folder's safetensors files by name, without a word about the model that they make up."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.slots = read_headers(path, locate(path))

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """Shape of every tensor."""
        return {name: slot.shape for name, slot in self.slots.items()}

    def same_bits(self, one: str, two: str) -> bool:
        """Whether two tensors are equal bit for bit."""
        files = Files()
        try:
            return same_bytes(files, self.slots[one], self.slots[two])
        finally:
            files.close()


class HFSource:
    """A folder with a whole model of a supported family, also one whose weights are FP8 with scales of blocks.

    Raises HFFolderError or ConvertError for a folder that is none, UnsupportedField for a config that the family has no place for.
    """

    format: Format = "hf"

    def __init__(self, path: Path) -> None:
        self.path = path
        held, config = HFTensors(path), read_config(path)
        quantization = config.pop(QUANTIZATION, None)
        self._scaled = BlockScaled(path, quantization, held.slots) if quantization else None
        if self._scaled:
            held.slots = {name: slot for name, slot in held.slots.items() if not self._scaled.is_scale(name)}
        self.layout = ModelLayout(config).as_stored(held.slots)
        check_tensors(held, self.layout.hf_tensors(), self.layout.megatron.tied, self.layout.megatron.kept)
        kept = sorted(kept_names(held.shapes, self.layout.megatron.kept))
        self._slots = {name: held.slots[name] for name in (*self.layout.hf_tensors(), *kept)}
        self.tensors = {name: Stored(slot.shape, self._type(name, slot)) for name, slot in self._slots.items()}

    def parts(self, name: str) -> Sequence[Part] | None:
        """See `Source`."""
        return None if self._scaled and name in self._scaled else whole(self._slots[name])

    def read(self, name: str, box: Box) -> Tensor:
        """See `Source`."""
        if self._scaled is None:
            raise ConvertError(f"{name} of {self.path} is stored as it is")
        return self._scaled.read(name, box)

    def close(self) -> None:
        """See `Source`."""
        if self._scaled:
            self._scaled.close()

    def _type(self, name: str, slot: Slot) -> str:
        return "BF16" if self._scaled and name in self._scaled else slot.dtype


class HFTarget:
    """A folder as Transformers writes it: safetensors shards of at most `shard_gb` (10^9 bytes) and an index.

    `tensors` has shape and type of every tensor, in the order in which they are written. `single` names one file for all of them.
    """

    archives = False

    def __init__(self, tensors: Mapping[str, Stored], shard_gb: float = 5.0, single: str | None = None) -> None:
        if not 0 < shard_gb < math.inf:
            raise ConvertError(f"shard_gb is {shard_gb:g}; write a positive number of 10^9 bytes")
        if unknown := sorted({stored.dtype for stored in tensors.values()} - set(DTYPES)):
            raise ConvertError(f"cannot write {', '.join(unknown)}")
        sizes = {name: size_of(Slot(Path(), 0, *stored)) for name, stored in tensors.items()}
        shards = [list(sizes)] if single else shards_of(sizes, int(shard_gb * 10**9))
        self._tensors, self._sizes = tensors, sizes
        self._files = {single or shard_name(number, len(shards)): shard for number, shard in enumerate(shards)}
        self._headers: dict[str, bytes] = {}
        self.items: list[Item] = []
        for file, names in self._files.items():
            own = {name: (tensors[name].dtype, tensors[name].shape, sizes[name]) for name in names}
            self._headers[file] = header_bytes(own, {"format": "pt"})
            at = len(self._headers[file])
            for name in names:
                shape, dtype = tensors[name]
                tile = Tile(name, full(shape), full(shape))
                self.items.append(Item(name, Slot(Path(file), at, shape, dtype), (tile,)))
                at += sizes[name]

    def begin(self, folder: Path) -> None:
        """See `Target`."""
        for file, names in self._files.items():
            with (folder / file).open("xb") as out:
                out.write(self._headers[file])
                out.truncate(len(self._headers[file]) + sum(self._sizes[name] for name in names))

    def finish(self, folder: Path, crc32: Mapping[str, int] | None) -> None:
        """The index. The format has no checksums."""
        if len(self._files) > 1:
            shapes = {name: stored.shape for name, stored in self._tensors.items()}
            place = {name: file for file, names in self._files.items() for name in names}
            (folder / INDEX).write_text(index_text(shapes, sum(self._sizes.values()), place), encoding="utf-8")
