"""Bytes of tensors in files: reading a box, joining boxes into rows, moving runs from file to file.

Everything here goes through `pread` and `pwrite`: pages of a mapped file would count as this process's memory.
"""

from __future__ import annotations

import errno
import math
import os
import resource
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rlmca.layouts.boxes import Box, Shape, extents, full, volume
from rlmca.transfer.convert.base import DTYPES, ConvertError, Slot

CARRIERS: Mapping[int, np.dtype] = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}
"""Numbers that carry the bytes of an element; nothing here looks at values."""
SYSCALL_BYTES = 10_000
"""A read of a few bytes costs about as much as reading so many more in one go."""


class Run(NamedTuple):
    """A box that is one stretch of bytes of its tensor."""

    offset: int
    size: int


def itemsize(dtype: str) -> int:
    """Bytes of an element; `dtype` is a key of DTYPES."""
    return DTYPES[dtype].itemsize


def carrier(dtype: str) -> np.dtype:
    """The numpy type whose elements are as large."""
    return CARRIERS[itemsize(dtype)]


def size_of(slot: Slot) -> int:
    """Bytes of the tensor."""
    return math.prod(slot.shape) * itemsize(slot.dtype)


def run_of(shape: Shape, box: Box, item: int) -> Run | None:
    """The stretch of bytes, relative to the tensor's first, that the box is; None when it is several."""
    lead = 0
    while lead < len(shape) and box[lead][1] - box[lead][0] == 1:
        lead += 1
    if any(part != (0, n) for part, n in zip(box[lead + 1 :], shape[lead + 1 :], strict=True)):
        return None
    at = 0
    for (a, _), n in zip(box, shape, strict=True):
        at = at * n + a
    return Run(at * item, volume(box) * item)


def row_axis(shape: Shape) -> int:
    """The first axis longer than 1: cutting along it leaves one stretch of bytes."""
    return next((axis for axis, n in enumerate(shape) if n != 1), 0)


def row_ranges(slot: Slot, most: int) -> Iterator[Box]:
    """Boxes one behind the other that make up the tensor, each one stretch of at most `most` bytes, or one element."""
    if not slot.shape:
        yield ()
        return
    yield from _ranges(slot, most, ())


def _ranges(slot: Slot, most: int, front: Box) -> Iterator[Box]:
    """Those that begin with `front`, one place on each of its axes."""
    axis, item = len(front), itemsize(slot.dtype)
    row = math.prod(slot.shape[axis + 1 :]) * item
    if slot.shape[axis] == 1 or (row > most and axis + 1 < len(slot.shape)):
        if axis + 1 == len(slot.shape):
            yield (*front, (0, 1))
            return
        for place in range(slot.shape[axis]):
            yield from _ranges(slot, most, (*front, (place, place + 1)))
        return
    step = max(1, most // max(row, 1))
    for start in range(0, slot.shape[axis], step):
        yield (*front, (start, min(start + step, slot.shape[axis])), *full(slot.shape[axis + 1 :]))


class Files:
    """Open files by path, each opened once; safe for threads, closed together. Takes as many as the system lets a process have."""

    def __init__(self) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft < hard:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        self._open: dict[tuple[Path, bool], int] = {}
        self._lock = threading.Lock()

    def reader(self, path: Path) -> int:
        """A descriptor to read from."""
        return self._get(path, False)

    def writer(self, path: Path) -> int:
        """A descriptor to write to an existing file."""
        return self._get(path, True)

    def close(self) -> None:
        """Close all."""
        with self._lock:
            for fd in self._open.values():
                os.close(fd)
            self._open.clear()

    def _get(self, path: Path, writes: bool) -> int:
        fd = self._open.get((path, writes))
        if fd is None:
            with self._lock:
                if (path, writes) not in self._open:
                    self._open[path, writes] = os.open(path, os.O_RDWR if writes else os.O_RDONLY)
                fd = self._open[path, writes]
        return fd


def read_exactly(fd: int, into: memoryview, offset: int, path: Path) -> None:
    """Fill the buffer. ConvertError when the file ends before."""
    done = 0
    while done < len(into):
        n = os.preadv(fd, [into[done:]], offset + done)
        if n == 0:
            raise ConvertError(f"{path} ends at byte {offset + done}: it became shorter while it was read, or is cut off")
        done += n


def write_exactly(fd: int, data: memoryview, offset: int) -> None:
    """Write the whole buffer."""
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], offset + done)


def copy_run(source: int, source_offset: int, target: int, target_offset: int, size: int) -> None:
    """Bytes from file to file: in the kernel where it can, else through a buffer."""
    while size:
        try:
            n = os.copy_file_range(source, target, size, source_offset, target_offset)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
                raise
            n = os.pwrite(target, os.pread(source, min(size, 1 << 22), source_offset), target_offset)  # another file system
        if n == 0:
            raise ConvertError("a file ended while it was copied: something else is writing to the source")
        source_offset, target_offset, size = source_offset + n, target_offset + n, size - n


def read_box(files: Files, slot: Slot, box: Box, out: np.ndarray) -> None:
    """The box of the stored tensor into `out`, whose elements carry the same number of bytes and whose extents are the box's."""
    fd, item = files.reader(slot.path), itemsize(slot.dtype)
    run = run_of(slot.shape, box, item)
    if run is not None:
        if out.flags.c_contiguous:
            read_exactly(fd, bytes_in(out), slot.offset + run.offset, slot.path)
        else:
            held = np.empty(extents(box), out.dtype)
            read_exactly(fd, bytes_in(held), slot.offset + run.offset, slot.path)
            out[...] = held
        return
    axis = row_axis(extents(box))
    if axis + 1 < len(box) and _cheaper_whole(slot.shape, box, axis, item):
        band = (*box[: axis + 1], *full(slot.shape[axis + 1 :]))
        held = np.empty(extents(band), out.dtype)
        read_box(files, slot, band, held)
        out[...] = held[(slice(None),) * (axis + 1) + tuple(slice(a, b) for a, b in box[axis + 1 :])]
        return
    for number, place in enumerate(range(*box[axis])):
        inner = (*box[:axis], (place, place + 1), *box[axis + 1 :])
        read_box(files, slot, inner, out[(slice(None),) * axis + (slice(number, number + 1),)])


def _cheaper_whole(shape: Shape, box: Box, axis: int, item: int) -> bool:
    """Whether reading whole rows and leaving out a part of each costs less than reading the parts one by one."""
    wanted = math.prod(extents(box[axis + 1 :])) * item
    whole = math.prod(shape[axis + 1 :]) * item
    return whole - wanted < SYSCALL_BYTES


def bytes_in(array: np.ndarray) -> memoryview:
    """The bytes of a contiguous array, as they are."""
    return array.reshape(-1).data.cast("B")


def same_bytes(files: Files, one: Slot, two: Slot, most: int = 1 << 22) -> bool:
    """Whether two stored tensors of one shape and type are equal bit for bit."""
    if (one.shape, one.dtype) != (two.shape, two.dtype):
        return False
    for start in range(0, size_of(one), most):
        n = min(most, size_of(one) - start)
        a, b = (os.pread(files.reader(slot.path), n, slot.offset + start) for slot in (one, two))
        if a != b:
            return False
    return True


def sync(folder: Path) -> None:
    """Have the disk hold everything in the folder, and the folders' own entries."""
    for path in (*folder.rglob("*"), folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
