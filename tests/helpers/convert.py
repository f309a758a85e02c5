"""A conversion in memory, one whole tensor at a time: what sources and targets say, carried out as plainly as can be."""

from __future__ import annotations

import math
import os
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlmca.layouts import ModelLayout
from rlmca.layouts.boxes import extents
from rlmca.transfer.convert.base import DTYPES, Slot, Stored
from rlmca.transfer.load import index

NAMES = {dtype: name for name, dtype in DTYPES.items()}


class MemorySource:
    """Hugging Face tensors that are in memory."""

    path = Path()

    def __init__(self, layout: ModelLayout, values: dict[str, Tensor]) -> None:
        self.layout, self.values = layout, values
        self.tensors = {name: Stored(tuple(value.shape), NAMES[value.dtype]) for name, value in values.items()}

    def parts(self, name: str) -> None:
        return None

    def read(self, name: str, box: Any) -> Tensor:
        return self.values[name][index(box)]

    def close(self) -> None:
        """Nothing is open."""


def random_tensors(layout: ModelLayout, dtype: torch.dtype, seed: int = 0) -> dict[str, Tensor]:
    """Random bits, as tensors of the model's shapes: NaN among them and all. Buffers are float32."""
    draw, buffers = torch.Generator().manual_seed(seed), layout.hf_buffers()
    values = {}
    for name, shape in layout.hf_tensors().items():
        kind = torch.float32 if name in buffers else dtype
        values[name] = torch.randint(0, 256, (*shape[:-1], shape[-1] * kind.itemsize), dtype=torch.uint8, generator=draw).view(kind)
    return values


def bits(value: Tensor) -> Tensor:
    return value.contiguous().reshape(-1).view(torch.uint8)


def same_bits(have: dict[str, Tensor], want: dict[str, Tensor], what: Any = "") -> None:
    assert have.keys() == want.keys(), (what, sorted(have.keys() ^ want.keys())[:6])
    for name, value in want.items():
        assert have[name].dtype == value.dtype and have[name].shape == value.shape, (what, name)
        assert torch.equal(bits(have[name]), bits(value)), (what, name)


def stored(slot: Slot) -> Tensor:
    """A tensor in a file."""
    kind = DTYPES[slot.dtype]
    with open(slot.path, "rb") as file:
        raw = os.pread(file.fileno(), math.prod(slot.shape) * kind.itemsize, slot.offset)
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(kind).reshape(slot.shape)


def values_of(source: Any) -> dict[str, Tensor]:
    """Every Hugging Face tensor of a source, each element once."""
    found = {}
    for name, (shape, kind) in source.tensors.items():
        parts, times = source.parts(name), torch.zeros(shape, dtype=torch.uint8)
        if parts is None:
            found[name] = source.read(name, tuple((0, n) for n in shape))
            continue
        value = torch.empty(shape, dtype=DTYPES[kind])
        for slot, src, dst in parts:
            assert slot.dtype == kind, name
            value[index(dst)] = stored(slot)[index(src)].reshape(extents(dst))
            times[index(dst)] += 1
        assert bool((times == 1).all()), name
        found[name] = value
    return found


def write(source: Any, target: Any, folder: Path, *, sums: bool = True) -> Path:
    """Make the target's folder from the source."""
    folder.mkdir(parents=True, exist_ok=True)
    values, crc32 = values_of(source), {}
    target.begin(folder)
    for item in target.items:
        value = torch.zeros(item.slot.shape, dtype=DTYPES[item.slot.dtype])
        for hf, src, dst in item.copies:
            value[index(dst)] = values[hf][index(src)].reshape(extents(dst)).to(value.dtype)
        raw = bits(value).numpy().tobytes()
        assert item.name not in crc32
        crc32[item.name] = zlib.crc32(raw)
        with open(folder / item.slot.path, "r+b") as file:
            assert os.pwrite(file.fileno(), raw, item.slot.offset) == len(raw)
    target.finish(folder, crc32 if sums else None)
    return folder
