"""Executor ranks -> files: write the live weights as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from rlmca.transfer.hf_writer import HFWriter, check_target, new_folder
from rlmca.transfer.side_files import Tokenizer, copy_side_files, has_tokenizer, settle_config
from rlmca.transfer.stream import Weights, agree


def export_hf(
    weights: Weights,
    out_dir: str | Path,
    source_dir: str | Path | None = None,
    tokenizer: Tokenizer | None = None,
    dtype: torch.dtype | None = None,
    shard_gb: float = 5.0,
    overwrite: bool = False,
    dst_rank: int = 0,
) -> None:
    """Write the model to `out_dir`, which appears only when it is complete.

    Collective over `weights.group`; `dst_rank` writes. Weights are cast to `dtype` (default: their own), except those that
    have a type of their own (`Weights.own_dtypes`). Config, generation
    defaults, tokenizer, chat template and code come byte for byte from `source_dir`, except that config.json's dtype is
    set to the written one when it differs; `tokenizer` is saved where the source has none. `shard_gb` is in 10^9 bytes.
    An existing `out_dir` that is not empty is an error, with `overwrite` it is replaced as a whole. An error on one
    rank is raised on all of them.
    """
    out, dtype = Path(out_dir), dtype or weights.dtype
    source = Path(source_dir) if source_dir is not None else None
    writes = weights.group is None or dist.get_rank() == dst_rank
    error: Exception | None = None
    if writes:
        try:
            check_target(out, overwrite)
            if source is not None and out.resolve() in (source.resolve(), *source.resolve().parents):
                raise ValueError(f"the export folder {out} holds the model it is made from ({source}); name another folder")
        except Exception as caught:
            error = caught
    agree(weights.group, error)
    stream = weights.tensors(dst_rank)
    if writes:
        try:
            with new_folder(out, overwrite) as folder:
                with HFWriter(folder, weights.shapes(), dtype, shard_gb, own_dtypes=weights.own_dtypes) as writer:
                    for name, tensor in stream:
                        writer.write(name, tensor)
                _write_side_files(folder, source, weights, tokenizer, dtype)
        except Exception as caught:
            error = caught
    for _ in stream:  # on the other ranks this sends; on the writing one it takes in what an error left
        pass
    agree(weights.group, error)


def _write_side_files(folder: Path, source: Path | None, weights: Weights, tokenizer: Tokenizer | None, dtype: torch.dtype) -> None:
    if source is not None:
        copy_side_files(source, folder)
    settle_config(folder, weights.hf_config, dtype)
    if tokenizer is not None and not has_tokenizer(folder):
        tokenizer.save_pretrained(str(folder))
