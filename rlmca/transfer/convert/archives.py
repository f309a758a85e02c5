"""Torch's files (zip archives of records that are stored as they are): where the payload of each tensor lies, and archives
written without their payloads.

Format: PKWARE's APPNOTE 6.3.9, sections 4.3 to 4.5. torch reads an archive without checksums (they are 0 then); `unzip` and
Python's zipfile want them right.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import struct
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rlmca.layouts.boxes import Shape
from rlmca.transfer.convert.base import DTYPES, ConvertError, Slot
from rlmca.transfer.convert.pickles import View, unpickle

LOCAL, CENTRAL, END = struct.Struct("<4s5H3L2H"), struct.Struct("<4s6H3L5H2L"), struct.Struct("<4s4H2LH")
END64, LOCATOR = struct.Struct("<4sQ2H2L4Q"), struct.Struct("<4sLQL")
LOCAL_CRC, CENTRAL_CRC = 14, 16
"""Bytes from the start of a header to its checksum."""
FULL, FULL_SHORT = 0xFFFFFFFF, 0xFFFF
"""What a field holds whose value is in the zip64 extension."""
ALIGNMENT = 64
"""Of payloads, as in torch's own archives; it can map them then."""
NAMES = {str(dtype).removeprefix("torch."): name for name, dtype in DTYPES.items()}


# ------------------------------------------------------------------------------------------------------------ reading


def records(fd: int, start: int, length: int) -> dict[str, tuple[int, int]]:
    """{record: (offset in the file, bytes)} of the archive at [start, start + length) of an open file; payloads are not read.

    Names come without the folder that all records of an archive are in. Raises ConvertError for anything but a whole archive
    of uncompressed records.
    """
    return _records(_Window(fd, start, length))


class _Window:
    """The archive at [start, start + length) of a file. Its ends are read at once: of a small archive they are all that is asked for."""

    def __init__(self, fd: int, start: int, length: int) -> None:
        self._fd, self.start, self.length = fd, start, length
        self._head = os.pread(fd, min(length, 2048), start)
        self._tail_at = max(0, length - 2048)
        self.tail = os.pread(fd, length - self._tail_at, start + self._tail_at)

    def read(self, at: int, size: int) -> bytes:
        """Bytes of the archive. Raises ValueError where there are none."""
        if at >= 0 and at + size <= len(self._head):
            return self._head[at : at + size]
        if at >= self._tail_at and at + size <= self._tail_at + len(self.tail):
            return self.tail[at - self._tail_at : at - self._tail_at + size]
        raw = os.pread(self._fd, size, self.start + at) if 0 <= at <= self.length - size else b""
        if len(raw) != size:
            raise ValueError("the archive ends")
        return raw


def _records(window: _Window) -> dict[str, tuple[int, int]]:
    try:
        at, size = _directory(window)
        found = dict(_entries(window, window.read(at, size)))
    except (struct.error, UnicodeDecodeError, ValueError) as error:
        if isinstance(error, ConvertError):
            raise
        where = f"bytes {window.start} to {window.start + window.length}"
        raise ConvertError(f"{where} are no archive that torch.save wrote; is the file whole?") from error
    if any(offset + size > window.start + window.length for offset, size in found.values()):
        raise ConvertError(f"the archive at byte {window.start} ends before its records do; is the file whole?")
    return found


def _directory(window: _Window) -> tuple[int, int]:
    """(offset in the archive, bytes) of its directory."""
    raw, first = window.tail, window.length - len(window.tail)
    at = raw.rfind(b"PK\x05\x06")
    if at < 0:
        first = max(0, window.length - FULL_SHORT - END.size)
        raw = window.read(first, window.length - first)
        at = raw.rindex(b"PK\x05\x06")
    *_, size, offset, _ = END.unpack_from(raw, at)
    place = first + at - LOCATOR.size
    mark, _, there, _ = LOCATOR.unpack(window.read(place, LOCATOR.size)) if place >= 0 else (b"", 0, 0, 0)
    if mark == b"PK\x06\x07":
        *_, size, offset = END64.unpack(window.read(there, END64.size))
    return offset, size


def _entries(window: _Window, raw: bytes) -> Iterator[tuple[str, tuple[int, int]]]:
    at = 0
    while at < len(raw):
        mark, _, _, flags, method, _, _, _, packed, size, n, m, k, _, _, _, offset = CENTRAL.unpack_from(raw, at)
        at += CENTRAL.size
        name, extra = raw[at : at + n].decode(), raw[at + n : at + n + m]
        at += n + m + k
        if mark != b"PK\x01\x02" or method or flags & 1:
            raise ConvertError(f"record {name} of the archive at byte {window.start} is compressed or damaged; save it with torch.save")
        if FULL in (size, packed, offset):
            size, packed, offset = _wide(extra, size, packed, offset)
        head = LOCAL.unpack(window.read(offset, LOCAL.size))
        if head[0] != b"PK\x03\x04" or size != packed:
            raise ConvertError(f"record {name} of the archive at byte {window.start} is damaged")
        yield name.partition("/")[2] or name, (window.start + offset + LOCAL.size + head[-2] + head[-1], size)


def _wide(extra: bytes, *fields: int) -> tuple[int, ...]:
    """The fields, those that are full replaced with the values in the zip64 extension, in its order."""
    at, wide = 0, b""
    while at + 4 <= len(extra):
        kind, size = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            wide = extra[at + 4 : at + 4 + size]
        at += 4 + size
    values = iter(struct.unpack(f"<{len(wide) // 8}Q", wide[: len(wide) // 8 * 8]))
    return tuple(next(values) if field == FULL else field for field in fields)


class Unreadable(NamedTuple):
    """A tensor in a file that is no `Slot`, and why."""

    why: str


def load(path: Path, fd: int | None = None, start: int = 0, length: int | None = None) -> Any:
    """What torch.save wrote to `path`, or to a window of it, without loading a tensor and without running anything in it.

    A tensor is its `Slot`, or `Unreadable`; objects of any class are `Inert`, with attributes. `fd`: the file, where it is open.
    """
    if fd is None:
        with open(path, "rb") as file:
            return load(path, file.fileno(), start, length)
    window = _Window(fd, start, os.fstat(fd).st_size - start if length is None else length)
    try:
        found = _records(window)
    except ConvertError as error:
        raise ConvertError(f"{path}: {error}") from error
    if "data.pkl" not in found:
        raise ConvertError(f"{path} has no data.pkl; it was not written by torch.save")

    def content(record: str) -> bytes:
        at, size = found[record]
        return window.read(at - start, size)

    if "byteorder" in found and content("byteorder") != b"little":
        raise ConvertError(f"{path} was written on a machine with another order of bytes; convert it there")
    return _with_slots(_tree(content("data.pkl")), path, found)


@lru_cache(maxsize=512)
def _small(raw: bytes) -> Any:
    return unpickle(raw, "data.pkl")


def _tree(raw: bytes) -> Any:
    """The pickle's object; thousands of chunks of a checkpoint have the same one. Nobody changes it."""
    return _small(raw) if len(raw) < 1024 else unpickle(raw, "data.pkl")


DEEPEST = 40
"""Dicts and lists in each other that a checkpoint may have."""


def _with_slots(value: Any, path: Path, found: Mapping[str, tuple[int, int]], made: dict[int, Any] | None = None, depth: int = 0) -> Any:
    """The tree with slots in the place of views. What is in it twice is made once: files may say much in a few bytes."""
    if isinstance(value, View):
        return _slot(value, path, found)
    if not isinstance(value, dict | list | tuple):
        return value
    made = {} if made is None else made
    if depth > DEEPEST:
        raise ConvertError(f"{path} holds lists nested more than {DEEPEST} deep, as no checkpoint does")
    if id(value) not in made:
        if isinstance(value, dict):
            made[id(value)] = {key: _with_slots(inner, path, found, made, depth + 1) for key, inner in value.items()}
        else:
            made[id(value)] = [_with_slots(inner, path, found, made, depth + 1) for inner in value]
    return made[id(value)]


def _slot(view: View, path: Path, found: Mapping[str, tuple[int, int]]) -> Slot | Unreadable:
    dtype, dense = NAMES.get(view.dtype), 1
    if dtype is None:
        return Unreadable(f"its type is {view.dtype}; {', '.join(NAMES)} are read")
    for n, stride in zip(reversed(view.shape), reversed(view.stride), strict=True):
        if n != 1 and stride != dense and 0 not in view.shape:
            return Unreadable(f"it is stored with strides {view.stride}; save it after .contiguous()")
        dense *= n
    where, item = found.get(f"data/{view.storage.key}"), DTYPES[dtype].itemsize
    if where is None or view.offset < 0 or (view.offset + math.prod(view.shape)) * item > where[1]:
        return Unreadable(f"its storage, record data/{view.storage.key}, is not there or too short")
    return Slot(path, where[0] + view.offset * item, view.shape, dtype)


def tensors_of(path: Path, keep: Callable[[tuple[Any, ...]], bool] = lambda _: True) -> dict[tuple[Any, ...], Slot]:
    """{keys that lead to it: Slot} of the tensors that torch.save wrote to `path`, those for which `keep` is true.

    Raises ConvertError with all tensors among them that are not stored row-major in a known type.
    """
    found = {keys: value for keys, value in leaves(load(path)) if isinstance(value, Slot | Unreadable) and keep(keys)}
    if bad := [f"{'/'.join(map(str, keys))}: {value.why}" for keys, value in found.items() if isinstance(value, Unreadable)]:
        raise ConvertError(f"tensors in {path} cannot be read:\n" + "\n".join(bad))
    return {keys: value for keys, value in found.items() if isinstance(value, Slot)}


def leaves(tree: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """(keys that lead to it, value) of everything in nested dicts and lists, in their order.

    A dict or list that comes again is passed over: files may nest them in each other, and in themselves.
    """
    seen: set[int] = set()
    stack: list[tuple[tuple[Any, ...], Any]] = [((), tree)]
    while stack:
        keys, value = stack.pop()
        if isinstance(value, dict | list):
            if id(value) not in seen:
                seen.add(id(value))
                inner = value.items() if isinstance(value, dict) else enumerate(value)
                stack.extend(reversed([((*keys, key), child) for key, child in inner]))
        else:
            yield keys, value


# ------------------------------------------------------------------------------------------------------------ writing


class Empty(NamedTuple):
    """A tensor to be: `name` is its own in its archive, `dtype` a key of `DTYPES`."""

    name: str
    shape: Shape
    dtype: str


class Payload(NamedTuple):
    """Where the bytes of a tensor belong in an archive, and where its checksum stands (twice, four bytes each)."""

    offset: int
    size: int
    crc_at: tuple[int, int]


class Hollow(NamedTuple):
    """An archive of `size` bytes without its tensors: `pieces` are (offset, bytes) of everything else."""

    pieces: tuple[tuple[int, bytes], ...]
    payloads: Mapping[str, Payload]
    size: int

    def write(self, fd: int, start: int = 0) -> None:
        """Write the pieces at `start` of a file. Who owns the file makes it long enough."""
        for offset, raw in self.pieces:
            os.pwrite(fd, raw, start + offset)

    def seal(self, fd: int, crc32: Mapping[str, int], start: int = 0) -> None:
        """Put in the checksums of the tensors, by their names."""
        for name, value in crc32.items():
            for at in self.payloads[name].crc_at:
                os.pwrite(fd, struct.pack("<L", value), start + at)


def hollow(tree: Any) -> Hollow:
    """The archive that torch.save would write for `tree`, whose tensors are `Empty`; none of their bytes are needed.

    Plain values, dicts, lists, and whatever pickle can write may be in it; what torch.load(weights_only=True) reads is for the
    caller to say.
    """
    out = io.BytesIO()
    pickler = _Pickler(out)
    pickler.dump(tree)
    empties = [(f"data/{key}", empty) for key, empty in enumerate(pickler.empties)]
    parts: list[tuple[str, bytes | int]] = [("data.pkl", out.getvalue()), ("byteorder", b"little")]
    parts += [(name, math.prod(empty.shape) * DTYPES[empty.dtype].itemsize) for name, empty in empties]
    made = _zip([*parts, ("version", b"3\n")])
    return made._replace(payloads={empty.name: made.payloads[name] for name, empty in empties})


class _Storage(NamedTuple):
    key: int
    kind: Any
    numel: int


class _Pickler(pickle.Pickler):
    """As torch.serialization._save pickles: protocol 2, storages by number."""

    def __init__(self, out: io.BytesIO) -> None:
        super().__init__(out, protocol=2)
        self.empties: list[Empty] = []

    def persistent_id(self, obj: Any) -> Any:
        return ("storage", obj.kind, str(obj.key), "cpu", obj.numel) if isinstance(obj, _Storage) else None

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, Empty):
            return NotImplemented
        dtype, numel = DTYPES[obj.dtype], math.prod(obj.shape)
        stride = torch.empty(obj.shape, device="meta").stride()
        kind = torch.storage._dtype_to_storage_type_map().get(dtype)
        storage: Any = _Storage(len(self.empties), getattr(torch, kind) if kind else torch.UntypedStorage, numel)
        self.empties.append(obj)
        if kind is None:
            storage = storage._replace(numel=numel * dtype.itemsize)
            return torch._utils._rebuild_tensor_v3, (storage, 0, tuple(obj.shape), stride, False, OrderedDict(), dtype)
        return torch._utils._rebuild_tensor_v2, (storage, 0, tuple(obj.shape), stride, False, OrderedDict())


def _zip(parts: list[tuple[str, bytes | int]]) -> Hollow:
    """An archive of records with their bytes, or with room for so many."""
    at, pieces, payloads, directory = 0, [], {}, io.BytesIO()
    for name, value in parts:
        path, start = f"archive/{name}".encode(), at
        size, crc = (value, 0) if isinstance(value, int) else (len(value), zlib.crc32(value))
        wide = struct.pack("<HHQQ", 1, 16, size, size) if size >= FULL else b""
        pad = -(at + LOCAL.size + len(path) + len(wide) + 4) % ALIGNMENT
        extra = wide + struct.pack("<2sH", b"FB", pad) + b"Z" * pad
        short = min(size, FULL)
        head = LOCAL.pack(b"PK\x03\x04", 45 if wide else 20, 0, 0, 0, 0x21, crc, short, short, len(path), len(extra)) + path + extra
        at += len(head) + size
        wide = (struct.pack("<QQ", size, size) if wide else b"") + (struct.pack("<Q", start) if start >= FULL else b"")
        wide = struct.pack("<HH", 1, len(wide)) + wide if wide else b""
        payloads[name] = Payload(at - size, size, (start + LOCAL_CRC, directory.tell() + CENTRAL_CRC))
        fields = (crc, short, short, len(path), len(wide), 0, 0, 0, 0, min(start, FULL))
        directory.write(CENTRAL.pack(b"PK\x01\x02", 45, 45 if wide else 20, 0, 0, 0, 0x21, *fields) + path + wide)
        pieces.append((start, head if isinstance(value, int) else head + value))
    raw = directory.getvalue()
    end = END.pack(b"PK\x05\x06", 0, 0, *(min(len(parts), FULL_SHORT),) * 2, min(len(raw), FULL), min(at, FULL), 0)
    if at >= FULL or len(parts) >= FULL_SHORT or len(raw) >= FULL:
        large = END64.pack(b"PK\x06\x06", END64.size - 12, 45, 45, 0, 0, len(parts), len(parts), len(raw), at)
        end = large + LOCATOR.pack(b"PK\x06\x07", 0, at + len(raw), 1) + end
    payloads = {name: Payload(off, n, (local, at + central)) for name, (off, n, (local, central)) in payloads.items()}
    return Hollow(tuple(_joined([*pieces, (at, raw + end)])), payloads, at + len(raw) + len(end))


def _joined(pieces: list[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
    """The pieces, those that follow on each other as one."""
    parts: list[bytes] = []
    start = end = 0
    for offset, raw in pieces:
        if offset != end:
            yield start, b"".join(parts)
            start, parts = offset, []
        parts.append(raw)
        end = offset + len(raw)
    yield start, b"".join(parts)
