"""The executor files -> files: brings the bytes of every item of a target from where a source has them.

An item is written in row ranges, each joined in a buffer of bounded size from whatever stretches of the source lie in it; on its
way out it is counted into a checksum (CRC-32, which archives carry) and a digest (XXH3, for the manifest). Without these, what is
one stretch on both sides goes from file to file and never enters this process.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor

from rlmca.layouts.boxes import Box, cut_box, extents, volume
from rlmca.transfer.convert.base import DTYPES, ConvertError, Item, Part, Slot, Source, moved
from rlmca.transfer.convert.storage import (
    Files,
    bytes_in,
    carrier,
    copy_run,
    itemsize,
    read_box,
    row_ranges,
    run_of,
    size_of,
    write_exactly,
)  # fmt: skip
from rlmca.transfer.narrow import check_fits

BUFFER = 1 << 20
"""Bytes of an item that are in memory at once, for each thread. They go through several hands: small enough for a core's cache."""


class Sums(NamedTuple):
    """What an item's bytes come to: CRC-32, and XXH3 of 128 bits in hexadecimal."""

    crc32: int
    digest: str


class Move(NamedTuple):
    """Box `src` of a stored tensor, or of the computed tensor `name` (then there is no slot), is box `dst` of an item."""

    name: str
    slot: Slot | None
    src: Box
    dst: Box


@dataclass
class Execution:
    """One run over items. `fast`: no checksums and digests. `done` is called in the caller's thread after every item."""

    source: Source
    folder: Path
    threads: int = 2
    fast: bool = False
    archives: bool = True
    """Whether the files carry CRC-32."""
    done: Callable[[Item, Sums | None], None] = lambda item, sums: None
    advance: Callable[[int], None] = lambda size: None
    """Called with bytes as they are written, from any thread."""
    _stop: threading.Event = field(default_factory=threading.Event)

    def run(self, items: Sequence[Item], files: Files) -> None:
        """Write all items. The first error stops the others and is raised."""
        with ThreadPoolExecutor(self.threads) as pool:
            waiting: dict[Future[Sums | None], Item] = {}
            rest = iter(items)
            try:
                for item in rest:
                    waiting[pool.submit(self.write, item, files)] = item
                    if len(waiting) >= 4 * self.threads:
                        self._collect(waiting)
                while waiting:
                    self._collect(waiting)
            except BaseException:
                self._stop.set()
                raise

    def write(self, item: Item, files: Files) -> Sums | None:
        """Bring an item's bytes into its file."""
        slot = item.slot._replace(path=self.folder / item.slot.path)
        moves = moves_of(item, self.source)
        out = files.writer(slot.path)
        if self.fast and self._in_the_kernel(moves, slot, files, out):
            return None
        crc, digest = 0, xxhash.xxh3_128()
        at = slot.offset
        for data in assembled(moves, slot, self.source, files):
            if self._stop.is_set():
                raise Stopped
            if not self.fast:
                crc = zlib.crc32(data, crc) if self.archives else 0
                digest.update(data)
            write_exactly(out, data, at)
            at += len(data)
            self.advance(len(data))
        return None if self.fast else Sums(crc, digest.hexdigest())

    def _collect(self, waiting: dict[Future[Sums | None], Item]) -> None:
        finished, _ = wait(waiting, return_when=FIRST_COMPLETED)
        for future in finished:
            self.done(waiting.pop(future), future.result())

    def _in_the_kernel(self, moves: Sequence[Move], slot: Slot, files: Files, out: int) -> bool:
        """Copy stretch by stretch; False, with nothing done, when an item is not made of stretches as they are."""
        item, runs = itemsize(slot.dtype), []
        for move in moves:
            if move.slot is None or move.slot.dtype != slot.dtype:
                return False
            source, target = run_of(move.slot.shape, move.src, item), run_of(slot.shape, move.dst, item)
            if source is None or target is None:
                return False
            runs.append((move.slot, source, target))
        for stored, source, target in runs:  # padding between them stays what it is: a hole, which reads as zeros
            if self._stop.is_set():
                raise Stopped
            copy_run(files.reader(stored.path), stored.offset + source.offset, out, slot.offset + target.offset, source.size)
            self.advance(source.size)
        return True


class Stopped(Exception):
    """Another item failed."""


def moves_of(item: Item, source: Source) -> list[Move]:
    """Where everything in the item comes from."""
    found = []
    for name, wanted, place in item.copies:
        parts = source.parts(name)
        if parts is None:
            found.append(Move(name, None, wanted, place))
            continue
        for part in parts:
            if (common := cut_box(wanted, part.dst)) is not None:
                found.append(Move(name, part.slot, moved(common, part.dst, part.src), moved(common, wanted, place)))
    return found


def assembled(moves: Sequence[Move], slot: Slot, source: Source, files: Files, most: int = BUFFER) -> Iterator[memoryview]:
    """The item's bytes in order, a row range at a time; a view is good until the next is asked for."""
    room = np.empty(0, carrier(slot.dtype))
    for rows in row_ranges(slot, most):
        shape, size = extents(rows), volume(rows)
        if len(room) < size:
            room = np.empty(size, room.dtype)
        buffer = room[:size].reshape(shape)
        cuts = [(move, common) for move in moves if (common := cut_box(move.dst, rows)) is not None]
        if sum(volume(common) for _, common in cuts) < size:
            buffer[...] = 0  # padding
        for move, common in cuts:
            inside = buffer[tuple(slice(a - o, b - o) for (a, b), (o, _) in zip(common, rows, strict=True))]
            _fill(move, moved(common, move.dst, move.src), inside, slot, source, files)
        yield bytes_in(buffer)


def _fill(move: Move, box: Box, out: np.ndarray, slot: Slot, source: Source, files: Files) -> None:
    if move.slot is not None and move.slot.dtype == slot.dtype:
        front = len(box) - out.ndim  # axes of length 1
        read_box(files, move.slot, box, out[(None,) * front] if front > 0 else out[(0,) * -front])
        return
    value = source.read(move.name, box) if move.slot is None else read_tensor(files, move.slot, box)
    check_fits(move.name, value, DTYPES[slot.dtype])
    narrowed = value.to(DTYPES[slot.dtype]).contiguous().view(_CARRIED[itemsize(slot.dtype)]).numpy()
    out[...] = narrowed.view(out.dtype).reshape(out.shape)


_CARRIED: Mapping[int, torch.dtype] = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def read_tensor(files: Files, slot: Slot, box: Box) -> Tensor:
    """The box of a stored tensor."""
    held = np.empty(extents(box), carrier(slot.dtype))
    read_box(files, slot, box, held)
    return torch.from_numpy(held.view(_SIGNED[held.dtype.itemsize])).view(DTYPES[slot.dtype])


_SIGNED = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}


def read_hf(files: Files, source: Source, name: str, box: Box) -> Tensor:
    """A box of a Hugging Face tensor of a source, from its parts."""
    parts = source.parts(name)
    if parts is None:
        return source.read(name, box)
    out = torch.empty(extents(box), dtype=DTYPES[source.tensors[name].dtype])
    for part in parts:
        if (common := cut_box(box, part.dst)) is not None:
            value = read_tensor(files, part.slot, moved(common, part.dst, part.src))
            inside = out[tuple(slice(a - o, b - o) for (a, b), (o, _) in zip(common, box, strict=True))]
            inside.copy_(value.reshape(inside.shape))
    return out


def check_plan(items: Sequence[Item], source: Source) -> None:
    """ConvertError when an element of an item comes from nowhere or from several places, or one of the source goes nowhere.

    What no copy of an item covers is padding; whether it should be covered is the business of the layout, whose own tests hold it.
    """
    used: dict[str, int] = {}
    for item in items:
        wanted = sum(volume(tile.src) for tile in item.copies)
        found = sum(volume(move.src) for move in moves_of(item, source))
        if found != wanted:
            raise ConvertError(f"{item.name}: {wanted} elements are to come from {source.path}, which has {found} of them")
        for tile in item.copies:
            used[tile.hf] = used.get(tile.hf, 0) + volume(tile.src)
    if left := [name for name, stored in source.tensors.items() if used.get(name, 0) < volume(tuple((0, n) for n in stored.shape))]:
        raise ConvertError(f"{source.path}: nothing would be made of {', '.join(left[:8])}{' and more' if len(left) > 8 else ''}")


def whole(part: Slot) -> list[Part]:
    """The parts of a tensor that lies in one piece."""
    box = tuple((0, n) for n in part.shape)
    return [Part(part, box, box)]


def bytes_of(items: Sequence[Item]) -> int:
    """Bytes of all items."""
    return sum(size_of(item.slot) for item in items)
