"""Weights, optimizer and random states of the Hugging Face engine as files.

The folder is a Hugging Face model (config.json, float32 safetensors, the tokenizer and what else lay beside the source),
with `optimizer.pt`, `scaler.pt` in float16, and one `rng-R.pt` a rank. Ranks hold the same weights and moments: rank 0 writes them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from rlmca.engines.huggingface_optimizer import moments, restore_moments
from rlmca.engines.loss_scale import LossScaler
from rlmca.parallel import platform
from rlmca.parallel.groups import Parallel
from rlmca.transfer.hf_folder import HFFolderError, open_hf_folder
from rlmca.transfer.hf_writer import HFWriter
from rlmca.transfer.module import ModuleWeights, copy_to_module
from rlmca.transfer.side_files import copy_side_files, settle_config
from rlmca.transfer.stream import agree

OPTIMIZER, SCALER = "optimizer.pt", "scaler.pt"


def save_state(
    path: Path,
    weights: ModuleWeights,
    optimizer: torch.optim.AdamW | None,
    parallel: Parallel,
    source: Path,
    *,
    scaler: LossScaler | None = None,
) -> None:
    """Write the state of all ranks into the folder `path`; collective. Side files come from the Hugging Face folder `source`."""
    group = dist.group.WORLD if parallel.world_size > 1 else None
    error: Exception | None = None
    try:
        if parallel.is_main:
            path.mkdir(parents=True, exist_ok=True)
            with HFWriter(path, weights.shapes(), weights.dtype) as writer:
                for name, tensor in weights.tensors():
                    writer.write(name, tensor)
            copy_side_files(source, path)
            settle_config(path, weights.hf_config, weights.dtype)
            if optimizer is not None:
                torch.save(moments(optimizer, weights.module), path / OPTIMIZER)
            if scaler is not None:
                torch.save(scaler.state_dict(), path / SCALER)
    except Exception as caught:
        error = caught
    agree(group, error)
    torch.save({"layout": list(parallel.sizes), **_random_states()}, path / f"rng-{parallel.rank}.pt")
    parallel.barrier()


def load_state(
    path: Path, module: PreTrainedModel, optimizer: torch.optim.AdamW | None, parallel: Parallel, *, scaler: LossScaler | None = None
) -> None:
    """Fill module and optimizer from a folder that `save_state` wrote; collective.

    A folder of weights alone makes the optimizer begin anew. Random states are restored when ranks in the same layout
    wrote them. HFFolderError for a folder of another kind.
    """
    if not (path / "config.json").is_file():
        hint = ": the Megatron engine wrote it, set USE_MCA=1" if (path / "weights").is_dir() else ""
        raise HFFolderError(f"{path} is no checkpoint of the Hugging Face engine{hint}")
    with open_hf_folder(path) as files:
        copy_to_module(((name, files.read(name)) for name in files.shapes), module)
    if optimizer is not None:
        stored = path / OPTIMIZER
        state = torch.load(stored, weights_only=True, map_location="cpu", mmap=True) if stored.exists() else {}
        restore_moments(optimizer, module, state)
    if scaler is not None and (path / SCALER).exists():
        scaler.load_state_dict(torch.load(path / SCALER, weights_only=True))
    own = path / f"rng-{parallel.rank}.pt"
    rng = torch.load(own, weights_only=True) if own.exists() else {}
    if rng.get("layout") == list(parallel.sizes):
        _restore_random_states(rng)


def _random_states() -> dict[str, Any]:
    states: dict[str, Any] = {"torch": torch.get_rng_state()}
    if platform.is_cuda():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _restore_random_states(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    if "cuda" in states and platform.is_cuda():
        torch.cuda.set_rng_state(states["cuda"])
