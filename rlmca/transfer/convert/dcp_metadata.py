"""`.metadata` of torch's distributed checkpoints (DCP), which says which box of which key lies in which bytes of which file.

It is a pickle of the dataclasses in torch.distributed.checkpoint.metadata. It is written here opcode by opcode, since importing
that package takes a second and 50 MB, and read with stand-ins for its classes.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rlmca.layouts.boxes import Shape
from rlmca.transfer.convert.base import ConvertError
from rlmca.transfer.convert.pickles import unpickle

FILE = ".metadata"
VERSION = "1.0.0"


class Place(NamedTuple):
    """Bytes of a file beside `.metadata`."""

    file: str
    start: int
    length: int


class StoredChunk(NamedTuple):
    """A box of a key: a tensor of shape `size`, in an archive of its own."""

    offset: Shape
    size: Shape
    place: Place


class StoredKey(NamedTuple):
    """A tensor of a checkpoint. `dtype` is the name of a torch type."""

    shape: Shape
    dtype: str
    chunks: list[StoredChunk]


def read_metadata(folder: Path) -> dict[str, StoredKey]:
    """Every tensor of a checkpoint; other objects are left out. ConvertError for a file that is none of DCP's, or damaged."""
    path = folder / FILE
    found = unpickle(path.read_bytes(), str(path))
    try:
        places: dict[tuple[str, Shape | None], Any]
        places = {(index.fqn, getattr(index, "offset", None)): info for index, info in found.storage_data.items()}
        tensors = {key: value for key, value in found.state_dict_metadata.items() if hasattr(value, "chunks")}
        return {key: _stored(path, key, value, places) for key, value in tensors.items()}
    except (AttributeError, TypeError, ValueError, IndexError) as error:
        raise ConvertError(f"{path} is no metadata of a distributed checkpoint: {error}") from error


def _stored(path: Path, key: str, value: Any, places: Mapping[tuple[str, Shape | None], Any]) -> StoredKey:
    chunks = []
    for chunk in value.chunks:
        info = places.get((key, chunk.offsets))
        if info is None:
            raise ConvertError(f"{path} does not say where {key} at {chunk.offsets} lies")
        if getattr(info, "transform_descriptors", None):
            raise ConvertError(f"{key} in {path.parent} is stored {'+'.join(info.transform_descriptors)}; save it without transforms")
        chunks.append(StoredChunk(chunk.offsets, chunk.sizes, Place(info.relative_path, info.offset, info.length)))
    return StoredKey(value.size, value.properties.state[0].origin.removeprefix("torch."), chunks)


def metadata_bytes(tensors: Mapping[str, StoredKey], objects: Mapping[str, Place]) -> bytes:
    """The file for these tensors, and for objects of one `torch.save` each."""
    out = _Writer()
    out.begin("metadata Metadata")
    out.entry("state_dict_metadata")
    out.raw += b"}("
    for key, stored in tensors.items():
        out.text(key)
        out.tensor(stored)
    for key in objects:
        out.text(key)
        out.begin("metadata BytesStorageMetadata", state=False)
    out.raw += b"u"
    out.entry("planner_data", b"N")
    out.entry("storage_data")
    out.raw += b"}("
    for key, stored in tensors.items():
        for chunk in stored.chunks:
            out.index(key, chunk.offset)
            out.place(chunk.place)
    for key, place in objects.items():
        out.index(key, None)
        out.place(place)
    out.raw += b"u"
    out.entry("storage_meta")
    out.begin("metadata StorageMeta")
    for name in ("checkpoint_id", "save_id", "load_id"):
        out.entry(name, b"N")
    out.entry("modules", b"]")
    out.end()
    out.entry("version")
    out.text(VERSION)
    out.end()
    return bytes(out.raw) + b"."


class _Writer:
    """Opcodes of pickle's protocol 2; strings and classes are written once and referred to afterwards."""

    def __init__(self) -> None:
        self.raw = bytearray(b"\x80\x02")
        self._memo: dict[bytes, bytes] = {}

    def _once(self, code: bytes) -> None:
        if (get := self._memo.get(code)) is not None:
            self.raw += get
            return
        number = struct.pack("<L", len(self._memo))
        self._memo[code] = b"j" + number
        self.raw += code + b"r" + number

    def text(self, value: str) -> None:
        raw = value.encode()
        self._once(b"X" + struct.pack("<L", len(raw)) + raw)

    def number(self, value: int) -> None:
        self.raw += b"J" + struct.pack("<l", value) if value < 1 << 31 else b"\x8a" + bytes([9]) + struct.pack("<Qb", value, 0)

    def name(self, module: str, name: str) -> None:
        self._once(f"c{module}\n{name}\n".encode())

    def begin(self, name: str, state: bool = True) -> None:
        """An object of a dataclass; its attributes follow until `end`."""
        module, _, name = name.partition(" ")
        self.name(f"torch.distributed.checkpoint.{module}", name)
        self.raw += b")\x81" + (b"}(" if state else b"")

    def end(self) -> None:
        self.raw += b"ub"

    def entry(self, name: str, value: bytes = b"") -> None:
        self.text(name)
        self.raw += value

    def size(self, shape: Shape) -> None:
        self.name("torch", "Size")
        self.raw += b"("
        for n in shape:
            self.number(n)
        self.raw += b"t\x85R"

    def tensor(self, stored: StoredKey) -> None:
        self.begin("metadata TensorStorageMetadata")
        self.entry("properties")
        self.begin("metadata TensorProperties", state=False)
        self.raw += b"("
        self.name("torch", stored.dtype)
        self.name("torch.serialization", "_get_layout")
        self.text("torch.strided")
        self.raw += b"\x85R\x89"
        self.name("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING")
        self.raw += b"K\x00\x85R\x89tb"
        self.entry("size")
        self.size(stored.shape)
        self.entry("chunks", b"](")
        for chunk in stored.chunks:
            self.begin("metadata ChunkStorageMetadata")
            self.entry("offsets")
            self.size(chunk.offset)
            self.entry("sizes")
            self.size(chunk.size)
            self.end()
        self.raw += b"e"
        self.end()

    def index(self, key: str, offset: Shape | None) -> None:
        self.begin("metadata MetadataIndex")
        self.entry("fqn")
        self.text(key)
        self.entry("index", b"N")
        self.entry("offset", b"N" if offset is None else b"")
        if offset is not None:
            self.size(offset)
        self.end()

    def place(self, place: Place) -> None:
        self.begin("filesystem _StorageInfo")
        self.entry("relative_path")
        self.text(place.file)
        self.entry("offset")
        self.number(place.start)
        self.entry("length")
        self.number(place.length)
        self.end()
