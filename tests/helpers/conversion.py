"""Conversions in tests: a source's tensors into a target's files, and a source's tensors into memory."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from rlmca.layouts.boxes import full
from rlmca.transfer.convert.base import DTYPES, Source, Target
from rlmca.transfer.convert.execute import Execution, Sums, check_plan, read_hf
from rlmca.transfer.convert.storage import Files


def convert(source: Source, target: Target, folder: Path, *, fast: bool = False) -> Path:
    """Write the target from the source, checksums included unless `fast`."""
    folder.mkdir(parents=True, exist_ok=True)
    check_plan(target.items, source)
    target.begin(folder)
    crc32: dict[str, int] = {}

    def done(item: object, sums: Sums | None) -> None:
        if sums is not None:
            crc32[item.name] = sums.crc32  # type: ignore[attr-defined]

    files = Files()
    try:
        Execution(source, folder, threads=1, fast=fast, done=done).run(target.items, files)
    finally:
        files.close()
    target.finish(folder, None if fast else crc32)
    return folder


def read_all(source: Source) -> dict[str, Tensor]:
    """Every tensor of a source."""
    files = Files()
    try:
        return {name: read_hf(files, source, name, full(stored.shape)) for name, stored in source.tensors.items()}
    finally:
        files.close()


def same_bits(have: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    """Same names, types, shapes and bytes."""
    assert have.keys() == want.keys()
    for name in want:
        assert have[name].dtype == want[name].dtype and have[name].shape == want[name].shape, name
        assert torch.equal(have[name].contiguous().view(torch.uint8), want[name].contiguous().view(torch.uint8)), name


def types_of(source: Source, dtype: str | None = None) -> dict[str, str]:
    """A type for every tensor: as the source has them, or `dtype`."""
    assert dtype is None or dtype in DTYPES
    return {name: dtype or stored.dtype for name, stored in source.tensors.items()}
