"""Writing a Hugging Face folder: safetensors shards as Transformers names them, streamed tensor by tensor."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO

import torch
from torch import Tensor

from rlmca.layouts.boxes import Shape
from rlmca.transfer.hf_folder import DTYPES, INDEX, SINGLE
from rlmca.transfer.narrow import check_fits

CODES = {dtype: code for code, dtype in DTYPES.items()}


class HFWriter:
    """Writes the weights of one model into an existing folder.

    `tensors` names every tensor with its shape in the order in which `write` will get them: sizes are known beforehand, so
    headers come first and no shard is held in memory. `shard_gb` is the most bytes (10^9) of a file; a larger tensor gets
    a file of its own. With several files there is an index, as Transformers writes it. `single` names one file for all of them,
    which replaces what is there once it is complete. `own_dtypes` has the types of tensors that are not cast to `dtype`.
    Raises ValueError for a tensor out of order or misshapen, or a type that is not in DTYPES.
    """

    def __init__(
        self,
        path: Path,
        tensors: Mapping[str, Shape],
        dtype: torch.dtype,
        shard_gb: float = 5.0,
        metadata: Mapping[str, str] | None = None,
        single: str | None = None,
        own_dtypes: Mapping[str, torch.dtype] | None = None,
    ) -> None:
        self._dtypes = {name: (own_dtypes or {}).get(name, dtype) for name in tensors}
        if unknown := {dtype, *self._dtypes.values()} - set(CODES):
            raise ValueError(f"cannot write {', '.join(map(str, unknown))}; {', '.join(map(str, CODES))} are written")
        if shard_gb <= 0:
            raise ValueError(f"the size of a shard is {shard_gb} GB; write a positive number")
        self.path = path
        self.metadata = {"format": "pt", **(metadata or {})}
        self._shapes, self._single = dict(tensors), single
        sizes = {name: self._bytes(name) for name in self._shapes}
        self._shards = [list(sizes)] if single else shards_of(sizes, int(shard_gb * 10**9))
        self._queue = [(number, name) for number, shard in enumerate(self._shards) for name in shard]
        self._at = 0
        self._file: IO[bytes] | None = None

    def write(self, name: str, tensor: Tensor) -> None:
        """Append a tensor, cast to its type in the folder."""
        if self._at == len(self._queue) or self._queue[self._at][1] != name:
            expected = self._queue[self._at][1] if self._at < len(self._queue) else "nothing more"
            raise ValueError(f"got {name} to write, expected {expected}")
        if tuple(tensor.shape) != self._shapes[name]:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {self._shapes[name]}")
        dtype = self._dtypes[name]
        check_fits(name, tensor, dtype)
        number = self._queue[self._at][0]
        if self._file is None or (self._at and self._queue[self._at - 1][0] != number):
            self._close_file()
            self._file = self._start(number)
        flat = tensor.detach().to(device="cpu", dtype=dtype).contiguous().reshape(-1).view(torch.uint8)
        self._file.write(flat.numpy().data)
        self._at += 1

    def close(self) -> None:
        """Finish: the last file and the index. Raises ValueError when a tensor is missing."""
        self._close_file()
        if self._at < len(self._queue):
            raise ValueError(f"{len(self._queue) - self._at} tensors were not written, the first is {self._queue[self._at][1]}")
        if self._single:
            (self.path / self._name(0)).replace(self.path / self._single)
        if len(self._shards) > 1:
            place = {name: self._name(number) for number, name in self._queue}
            (self.path / INDEX).write_text(index_text(self._shapes, sum(map(self._bytes, self._shapes)), place), encoding="utf-8")

    def __enter__(self) -> HFWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.close()
        else:
            self._close_file()

    def _bytes(self, name: str) -> int:
        return math.prod(self._shapes[name]) * self._dtypes[name].itemsize

    def _name(self, number: int) -> str:
        return f".{self._single}.partial" if self._single else shard_name(number, len(self._shards))

    def _start(self, number: int) -> IO[bytes]:
        own = {name: (CODES[self._dtypes[name]], self._shapes[name], self._bytes(name)) for name in self._shards[number]}
        file = (self.path / self._name(number)).open("wb" if self._single else "xb")
        file.write(header_bytes(own, self.metadata))
        return file

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())  # a renamed folder must not hold files that a power cut empties
            self._file.close()
            self._file = None


def shards_of(sizes: Mapping[str, int], most: int) -> list[list[str]]:
    """The tensors, given with their bytes, dealt out in order to files of at most `most` bytes, or of one tensor."""
    shards: list[list[str]] = [[]]
    used = 0
    for name, size in sizes.items():
        if used and used + size > most:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += size
    return shards


def shard_name(number: int, total: int) -> str:
    """Name of the `number`-th of `total` files, as Transformers names them."""
    return SINGLE if total == 1 else f"model-{number + 1:05d}-of-{total:05d}.safetensors"


def header_bytes(tensors: Mapping[str, tuple[str, Shape, int]], metadata: Mapping[str, str]) -> bytes:
    """What stands in a safetensors file before the bytes of its tensors (code of the type, shape, bytes), which follow in order."""
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    at = 0
    for name, (code, shape, size) in tensors.items():
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)  # the format aligns the data to 8 bytes
    return struct.pack("<Q", len(raw)) + raw


def index_text(shapes: Mapping[str, Shape], total_size: int, file_of: Mapping[str, str]) -> str:
    """The index of several files, as Transformers writes it."""
    elements = sum(math.prod(shape) for shape in shapes.values())
    metadata = {"total_parameters": elements, "total_size": total_size}
    return json.dumps({"metadata": metadata, "weight_map": dict(sorted(file_of.items()))}, indent=2, sort_keys=True) + "\n"


@contextlib.contextmanager
def new_folder(out: Path, overwrite: bool = False) -> Iterator[Path]:
    """A temporary folder beside `out` that takes its name when the block ends without an error and vanishes otherwise.

    Raises FileExistsError when `out` exists and is not empty; with `overwrite` it is replaced as a whole, and until the new
    one is complete it stays as it was. What a killed process left behind is cleared, or put back, by the next one.
    """
    fresh, old = out.with_name(f".{out.name}.partial"), out.with_name(f".{out.name}.old")
    if old.exists() and not out.exists():
        old.rename(out)
    check_target(out, overwrite)
    out.parent.mkdir(parents=True, exist_ok=True)
    for left in (fresh, old):
        shutil.rmtree(left, ignore_errors=True)
    fresh.mkdir()
    try:
        yield fresh
        if out.exists():
            out.rename(old)
        fresh.rename(out)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        if old.exists() and not out.exists():
            old.rename(out)
        raise
    shutil.rmtree(old, ignore_errors=True)


def check_target(out: Path, overwrite: bool) -> None:
    """Raises when `out` cannot become a new folder."""
    if out.exists() and not out.is_dir():
        raise FileExistsError(f"{out} is a file; name a folder")
    if out.is_dir() and any(out.iterdir()) and not overwrite:
        raise FileExistsError(f"{out} exists and is not empty; name another folder or remove it")
