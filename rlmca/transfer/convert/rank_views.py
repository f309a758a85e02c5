"""Tensors in torch's files that need not be whole: a state dict may hold columns of a wider tensor, whose storage is stored.

mcore_adapter cuts its row-parallel weights so, and saves what it cut.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rlmca.layouts.boxes import Box, Shape, extents, full, volume
from rlmca.transfer.convert.archives import NAMES, leaves, records
from rlmca.transfer.convert.base import DTYPES, ConvertError, Slot
from rlmca.transfer.convert.pickles import View, unpickle

BLOCK = 1 << 22
"""Bytes that are read at once."""


class Held(NamedTuple):
    """A tensor that a file holds: the part `box` of what lies there row-major."""

    slot: Slot
    box: Box

    @property
    def shape(self) -> Shape:
        """Its own."""
        return extents(self.box)

    def blocks(self, rows: int) -> Iterator[bytes]:
        """The bytes of its first `rows` rows, a few at a time; as many for every tensor of its shape and type."""
        item = DTYPES[self.slot.dtype].itemsize
        inner = self.slot.shape[1:]
        wide = volume(full(inner)) * item
        step = max(1, BLOCK // max(1, volume(self.box[1:]) * item))
        descriptor = os.open(self.slot.path, os.O_RDONLY)
        try:
            for at in range(0, rows, step):
                count = min(step, rows - at)
                raw = os.pread(descriptor, count * wide, self.slot.offset + at * wide)
                band = np.frombuffer(raw, np.uint8).reshape(count, *inner, item)
                yield band[(slice(None), *(slice(a, b) for a, b in self.box[1:]))].tobytes()
        finally:
            os.close(descriptor)


OLDEST = 2.0
"""Of Megatron-LM's `checkpoint_version`s: see fix_query_key_value_ordering in its megatron/training/checkpointing.py."""


def held_tensors(path: Path, keep: Callable[[tuple[Any, ...]], bool]) -> dict[tuple[Any, ...], Held]:
    """{keys that lead to it: tensor} of what torch.save wrote to `path`, as far as `keep` is true of the keys.

    Nothing in the file is run and no tensor is read. Raises ConvertError for a file that is not whole, and with all tensors that
    are no box of what is stored, or of an unknown type.
    """
    with open(path, "rb") as file:
        try:
            found = records(file.fileno(), 0, os.fstat(file.fileno()).st_size)
        except ConvertError as error:
            raise ConvertError(f"{path}: {error}") from error
        raw = {name: os.pread(file.fileno(), found[name][1], found[name][0]) for name in ("data.pkl", "byteorder") if name in found}
    if "data.pkl" not in raw or raw.get("byteorder", b"little") != b"little":
        raise ConvertError(f"{path} is no file that torch.save wrote on a machine with this order of bytes")
    held: dict[tuple[Any, ...], Held] = {}
    problems = []
    tree = unpickle(raw["data.pkl"], str(path))
    version = tree.get("checkpoint_version", 3.0) if isinstance(tree, dict) else 3.0
    if not isinstance(version, int | float) or version < OLDEST:
        raise ConvertError(f"{path} has checkpoint_version {version}: before {OLDEST:g} Megatron-LM ordered queries and keys otherwise")
    for keys, view in leaves(tree):
        if isinstance(view, View) and keys and keep(keys):
            found_at = _held(view, path, found.get(f"data/{view.storage.key}", (0, -1)))
            if isinstance(found_at, Held):
                held[keys] = found_at
            else:
                problems.append(f"{'/'.join(map(str, keys))}: {found_at}")
    if problems:
        raise ConvertError("\n".join([f"tensors in {path} cannot be read:", *problems[:8]]))
    return held


def _held(view: View, path: Path, record: tuple[int, int]) -> Held | str:
    """The tensor, or why it is none that can be read."""
    dtype = NAMES.get(view.dtype)
    if dtype is None:
        return f"its type is {view.dtype}; {', '.join(NAMES)} are read"
    if not view.shape:
        return "it is a single number"
    item, strides = DTYPES[dtype].itemsize, _strides(view)
    cut = f"it is stored with strides {view.stride}; save it after .contiguous()"
    short = f"its storage, record data/{view.storage.key}, is not there or too short"
    if strides is None:
        return cut
    if strides[0] * view.shape[0] == volume(full(view.shape)):  # whole, wherever in a buffer of many it begins
        if (view.offset + strides[0] * view.shape[0]) * item > record[1]:
            return short
        return Held(Slot(path, record[0] + view.offset * item, view.shape, dtype), full(view.shape))
    outer = (view.shape[0], *(big // small for big, small in zip(strides[:-1], strides[1:], strict=True)))
    first, rest = divmod(view.offset, strides[0])
    box = [(0, view.shape[0])]
    for n, stride, length in zip(outer[1:], strides[1:], view.shape[1:], strict=True):
        at, rest = divmod(rest, stride)
        if at + length > n:
            return cut
        box.append((at, at + length))
    if (first + view.shape[0]) * strides[0] * item > record[1]:
        return short
    return Held(Slot(path, record[0] + first * strides[0] * item, outer, dtype), tuple(box))


def _strides(view: View) -> tuple[int, ...] | None:
    """Those of a row-major tensor that the view is a box of; axes of length 1 can have any. None: there is no such tensor."""
    found: list[int] = []
    for n, stride in zip(reversed(view.shape), reversed(view.stride), strict=True):
        inner, length = (found[0], view.shape[len(view.shape) - len(found)]) if found else (1, 1)
        if n == 1:
            stride = max(inner * length, 1)
        if stride < inner * length or stride % inner or (not found and stride != 1):
            return None
        found.insert(0, stride)
    return tuple(found)
