"""Executor files -> files: rewrite a Hugging Face folder in another type or shard size, checked against its layout."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from rlmca.layouts import ModelLayout
from rlmca.transfer.hf_folder import HFFolder, HFFolderError, check_tensors, open_hf_folder
from rlmca.transfer.hf_writer import HFWriter, new_folder
from rlmca.transfer.merged import MergedFolder
from rlmca.transfer.side_files import copy_side_files, settle_config

MEGATRON_MARKS = ("latest_checkpointed_iteration.txt", ".metadata", "metadata.json", "mca_config.json", "mp_rank_*", "iter_*")


def is_megatron_checkpoint(path: Path) -> bool:
    """Whether the folder looks like a Megatron checkpoint (distributed or one file per rank)."""
    return any(True for mark in MEGATRON_MARKS for _ in path.glob(mark))


def rewrite_hf(
    source: str | Path, out: str | Path, dtype: torch.dtype | None = None, shard_gb: float = 5.0, adapters: Sequence[Path] = ()
) -> int:
    """Copy the model one tensor at a time, adapters merged into it, then read it back; returns the number of tensors.

    `dtype` None keeps the stored type. Raises UnsupportedField or HFFolderError for a folder that is not a whole model of
    a supported family, FileExistsError when `out` exists, HFFolderError when the copy does not read back bit for bit.
    """
    source, out = Path(source), Path(out)
    with MergedFolder(source, adapters) if adapters else open_hf_folder(source) as folder:
        layout = ModelLayout(folder.config).as_stored(folder.shapes)
        check_tensors(folder, layout.hf_tensors(), layout.megatron.tied)
        if dtype is None:
            kinds = {folder.dtypes[name] for name in layout.hf_tensors()}
            if len(kinds) > 1:
                raise HFFolderError(f"{source} mixes {sorted(map(str, kinds))}; choose one type")
            (dtype,) = kinds
        with new_folder(out) as fresh:
            with HFWriter(fresh, layout.hf_tensors(), dtype, shard_gb) as writer:
                for name in layout.hf_tensors():
                    writer.write(name, folder.read(name))
            copy_side_files(source, fresh)
            settle_config(fresh, layout.hf_config, dtype)
            _verify(folder, fresh, layout, dtype)
    return len(layout.hf_tensors())


def _verify(folder: HFFolder, copy: Path, layout: ModelLayout, dtype: torch.dtype) -> None:
    with open_hf_folder(copy) as written:
        check_tensors(written, layout.hf_tensors(), layout.megatron.tied)
        for name in layout.hf_tensors():
            want, have = folder.read(name).to(dtype), written.read(name)
            if not torch.equal(want.view(torch.uint8), have.view(torch.uint8)):
                raise HFFolderError(f"{name} does not read back as it was written; is the disk sound?")
