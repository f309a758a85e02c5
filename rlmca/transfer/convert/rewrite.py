"""Executor files -> files: rewrite a Hugging Face folder in another type or shard size, checked against its layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from rlmca.layouts import ModelLayout
from rlmca.transfer.hf_folder import HFFolder, HFFolderError, check_tensors, open_hf_folder
from rlmca.transfer.hf_writer import HFWriter, new_folder
from rlmca.transfer.kept import kept_names
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

    `dtype` None keeps the stored type; tensors that are not trained keep theirs in any case. Raises UnsupportedField or
    HFFolderError for a folder that is not a whole model of a supported family, FileExistsError when `out` exists,
    HFFolderError when the copy does not read back bit for bit.
    """
    source, out = Path(source), Path(out)
    with MergedFolder(source, adapters) if adapters else open_hf_folder(source) as folder:
        layout = ModelLayout(folder.config).as_stored(folder.shapes)
        check_tensors(folder, layout.hf_tensors(), layout.megatron.tied, layout.megatron.kept)
        shapes = layout.hf_tensors() | {name: folder.shapes[name] for name in sorted(kept_names(folder.shapes, layout.megatron.kept))}
        own = {name: folder.dtypes[name] for name in shapes if name in layout.hf_buffers() or name not in layout.hf_tensors()}
        if dtype is None:
            kinds = {folder.dtypes[name] for name in shapes if name not in own}
            if len(kinds) > 1:
                raise HFFolderError(f"{source} mixes {sorted(map(str, kinds))}; choose one type")
            (dtype,) = kinds
        with new_folder(out) as fresh:
            with HFWriter(fresh, shapes, dtype, shard_gb, own_dtypes=own) as writer:
                for name in shapes:
                    writer.write(name, folder.read(name))
            copy_side_files(source, fresh)
            settle_config(fresh, layout.hf_config, dtype)
            _verify(folder, fresh, layout, {name: own.get(name, dtype) for name in shapes})
    return len(shapes)


def _verify(folder: HFFolder, copy: Path, layout: ModelLayout, dtypes: Mapping[str, torch.dtype]) -> None:
    with open_hf_folder(copy) as written:
        check_tensors(written, layout.hf_tensors(), layout.megatron.tied, layout.megatron.kept)
        for name, dtype in dtypes.items():
            want, have = folder.read(name).to(dtype), written.read(name)
            if not torch.equal(want.view(torch.uint8), have.view(torch.uint8)):
                raise HFFolderError(f"{name} does not read back as it was written; is the disk sound?")
