"""A Hugging Face folder written again: another type, other shards, adapters merged into it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from rlmca.transfer.convert.base import DTYPES
from rlmca.transfer.convert.run import DTYPE_NAMES, ConvertOptions, convert


def rewrite_hf(
    source: str | Path, out: str | Path, dtype: torch.dtype | None = None, shard_gb: float = 5.0, adapters: Sequence[Path] = ()
) -> int:
    """Write the folder, then read it back; returns the number of tensors.

    `dtype` None keeps the stored types; tensors that are not trained keep theirs in any case. Raises UnsupportedField,
    HFFolderError or ConvertError for a folder that is not a whole model of a supported family, FileExistsError when `out` exists.
    """
    names = {DTYPES[code]: name for name, code in DTYPE_NAMES.items()}
    wanted = None if dtype is None else names[dtype]
    options = ConvertOptions(
        Path(source), Path(out), to="hf", dtype=wanted, shard_gb=shard_gb, adapters=tuple(map(Path, adapters)), verify=True
    )
    return convert(options).tensors
