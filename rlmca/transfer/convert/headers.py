"""Where the tensors of safetensors files lie, from their headers alone.

The format: eight bytes with the length of a JSON object, that object ({name: dtype, shape, data_offsets}), then the tensors' bytes,
row-major and little-endian, without gaps.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlmca.transfer.convert.base import DTYPES, ConvertError, Slot
from rlmca.transfer.convert.storage import size_of

LONGEST = 100_000_000
"""Bytes of a header that safetensors itself accepts."""


def read_headers(folder: Path, file_of: Mapping[str, str]) -> dict[str, Slot]:
    """{name: slot} of the tensors that `file_of` places in files. ConvertError for a damaged file, or a tensor that is elsewhere."""
    if outside := sorted({file for file in file_of.values() if Path(file).is_absolute() or ".." in Path(file).parts}):
        raise ConvertError(f"{folder}: the index names files outside of the folder: {', '.join(outside[:8])}")
    held = {file: read_header(folder / file) for file in sorted(set(file_of.values()))}
    if lost := [f"{name} in {file}" for name, file in file_of.items() if name not in held[file]]:
        raise ConvertError(f"{folder}: the index places tensors where they are not: {', '.join(lost[:8])}")
    if more := [f"{name} in {file}" for file, slots in held.items() for name in slots if file_of.get(name) != file]:
        raise ConvertError(f"{folder}: the index does not name tensors that are there: {', '.join(more[:8])}")
    return {name: held[file][name] for name, file in file_of.items()}


def read_header(path: Path) -> dict[str, Slot]:
    """{name: slot} of everything in a file. ConvertError when it is damaged or cut off, or holds types that DTYPES does not know."""
    size = path.stat().st_size
    with path.open("rb") as file:
        raw = file.read(8)
        length = struct.unpack("<Q", raw)[0] if len(raw) == 8 else LONGEST + 1
        if length > min(LONGEST, size - 8):
            raise ConvertError(f"{path} is no safetensors file, or is cut off in its header")
        try:
            header = json.loads(file.read(length))
            if not isinstance(header, dict):
                raise TypeError
            slots = {name: _slot(path, 8 + length, size, name, entry) for name, entry in header.items() if name != "__metadata__"}
        except (ValueError, KeyError, TypeError) as error:
            if isinstance(error, ConvertError):
                raise
            raise ConvertError(f"{path} has no readable header: {error}") from error
    _check_apart(path, slots)
    return slots


def _check_apart(path: Path, slots: Mapping[str, Slot]) -> None:
    end = 0
    for name, slot in sorted(slots.items(), key=lambda entry: (entry[1].offset, size_of(entry[1]))):
        if slot.offset < end and size_of(slot):
            raise ConvertError(f"{path}: {name} begins inside of another tensor; the file is damaged")
        end = max(end, slot.offset + size_of(slot))


def _slot(path: Path, data: int, size: int, name: str, entry: Mapping[str, Any]) -> Slot:
    dtype, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    if dtype not in DTYPES:
        raise ConvertError(f"{name} in {path} has type {dtype}; {', '.join(DTYPES)} are read")
    if end - start != math.prod(shape) * DTYPES[dtype].itemsize or start < 0:
        raise ConvertError(f"{name} in {path}: {end - start} bytes are not {dtype} of shape {list(shape)}")
    if data + end > size:
        raise ConvertError(f"{path} is cut off: {name} ends at byte {data + end}, the file at {size}; fetch it again")
    return Slot(path, data + start, shape, dtype)
