"""Megatron's distributed checkpoint (`torch_dist`) as a target: what `megatron.core.dist_checkpointing` loads under any layout.

Every chunk is an archive of torch.save in `__0_N.distcp`; `.metadata` says where each lies. The objects that Megatron keeps
beside tensors hold nothing here and are one and the same archive.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from rlmca.layouts import ModelLayout
from rlmca.layouts.boxes import Shape
from rlmca.layouts.distributed import Chunk, chunks, extra_states
from rlmca.transfer.convert import dcp_metadata
from rlmca.transfer.convert.archives import ALIGNMENT, Empty, Hollow, hollow
from rlmca.transfer.convert.base import DTYPES, ConvertError, Item, Slot
from rlmca.transfer.convert.dcp_metadata import Place, StoredChunk, StoredKey, metadata_bytes

COMMON, FORMAT = "common.pt", "metadata.json"
BACKENDS = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1}


class _Archive(NamedTuple):
    """A chunk's archive in a file, from byte `start` on."""

    file: str
    start: int
    hollow: Hollow


class TorchDistTarget:
    """A checkpoint of the whole model. `dtypes` says for every Hugging Face tensor as what it is written (keys of `base.DTYPES`).

    `max_bytes`: of a file, unless one chunk is larger; None writes
    one. `stacked`: see `layouts.distributed.chunks`. Raises ConvertError for tensors of different types under one key, all of them.
    """

    archives = True

    def __init__(
        self,
        layout: ModelLayout,
        dtypes: Mapping[str, str],
        *,
        max_bytes: int | None = None,
        stacked: bool | None = None,
    ) -> None:
        self._keys: dict[str, StoredKey] = {}
        self._archives: dict[str, _Archive] = {}
        self._sizes: dict[str, int] = {}
        self._items: list[Item] = []
        self._made: dict[tuple[Shape, str], Hollow] = {}
        types = _types(list(chunks(layout, stacked)), dtypes)
        for chunk, dtype in types:
            self._add(chunk, dtype, max_bytes)
        self._object = hollow([None])
        last, at = list(self._sizes.items())[-1]
        self._sizes[last] = _aligned(at) + self._object.size
        self._objects = dict.fromkeys(extra_states(layout, stacked), Place(last, _aligned(at), self._object.size))

    @property
    def items(self) -> Sequence[Item]:
        """Every chunk, file by file."""
        return self._items

    def begin(self, folder: Path) -> None:
        """Make all files."""
        pieces: dict[str, list[tuple[Hollow, int]]] = {file: [] for file in self._sizes}
        for archive in self._archives.values():
            pieces[archive.file].append((archive.hollow, archive.start))
        for place in set(self._objects.values()):
            pieces[place.file].append((self._object, place.start))
        for file, size in self._sizes.items():
            with (folder / file).open("xb", buffering=0) as out:
                out.truncate(size)
                for made, start in pieces[file]:
                    made.write(out.fileno(), start)
        (folder / COMMON).write_bytes(b"".join(raw for _, raw in hollow({}).pieces))
        (folder / FORMAT).write_text(json.dumps(BACKENDS), encoding="utf-8")
        (folder / dcp_metadata.FILE).write_bytes(metadata_bytes(self._keys, self._objects))

    def finish(self, folder: Path, crc32: Mapping[str, int] | None) -> None:
        """Put the checksums into the archives."""
        if crc32 is None:
            return
        for file, archives in itertools.groupby(self._archives.items(), key=lambda entry: entry[1].file):
            with (folder / file).open("r+b", buffering=0) as out:
                for name, archive in archives:
                    archive.hollow.seal(out.fileno(), {"": crc32[name]}, archive.start)

    def _add(self, chunk: Chunk, dtype: str, max_bytes: int | None) -> None:
        if (chunk.size, dtype) not in self._made:
            self._made[chunk.size, dtype] = hollow(Empty("", chunk.size, dtype))
        archive = self._made[chunk.size, dtype]
        number = max(0, len(self._sizes) - 1)
        file = f"__0_{number}.distcp"
        start = _aligned(self._sizes.get(file, 0))
        if max_bytes is not None and start and start + archive.size > max_bytes:
            file, start = f"__0_{number + 1}.distcp", 0
        self._sizes[file] = start + archive.size
        name = f"{file}:{chunk.key}@{'.'.join(map(str, chunk.offset))}"
        self._archives[name] = _Archive(file, start, archive)
        self._items.append(Item(name, Slot(Path(file), start + archive.payloads[""].offset, chunk.body, dtype), chunk.copies))
        key = self._keys.setdefault(chunk.key, StoredKey(chunk.shape, str(DTYPES[dtype]).removeprefix("torch."), []))
        key.chunks.append(StoredChunk(chunk.offset, chunk.size, Place(file, start, archive.size)))


def _aligned(at: int) -> int:
    return -(-at // ALIGNMENT) * ALIGNMENT


def _types(found: Sequence[Chunk], dtypes: Mapping[str, str]) -> Iterator[tuple[Chunk, str]]:
    """Every chunk with its type. A key has one, whatever layers and experts it is stacked of."""
    kinds: dict[str, dict[str, str]] = {}
    for chunk in found:
        kinds.setdefault(chunk.key, {}).update({dtypes[tile.hf]: tile.hf for tile in chunk.copies})
    if mixed := [
        f"{key}: {' and '.join(f'{name} is {kind}' for kind, name in sorted(held.items()))}" for key, held in kinds.items() if len(held) > 1
    ]:
        raise ConvertError("tensors that share a key of the checkpoint must have one type; choose one with --dtype:\n" + "\n".join(mixed))
    return ((chunk, next(iter(kinds[chunk.key]))) for chunk in found)
