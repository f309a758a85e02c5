"""Weights, optimizer and random states of the Hugging Face engine as files.

The folder is a Hugging Face model (config.json, float32 safetensors, the tokenizer and what else lay beside the source), or
in a run that trains an adapter the adapter alone in PEFT's format; with `optimizer.pt`, `scaler.pt` in float16, and one
`rng-R.pt` a rank. Ranks hold the same weights and moments: rank 0 writes them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from rlmca.engines.huggingface_adapters import HuggingFaceAdapters
from rlmca.engines.huggingface_optimizer import moments, restore_moments
from rlmca.engines.loss_scale import LossScaler
from rlmca.parallel import platform
from rlmca.parallel.groups import Parallel
from rlmca.transfer.hf_folder import HFFolderError, open_hf_folder
from rlmca.transfer.hf_writer import HFWriter
from rlmca.transfer.module import ModuleWeights, copy_to_module
from rlmca.transfer.peft import CONFIG as ADAPTER
from rlmca.transfer.side_files import copy_side_files, settle_config
from rlmca.transfer.stream import agree

MODEL, OPTIMIZER, SCALER = "config.json", "optimizer.pt", "scaler.pt"
_OTHERS = {
    MODEL: "holds a whole model, which a run with finetuning_type: full or freeze wrote, and this one trains an adapter",
    ADAPTER: "holds an adapter, which a run with finetuning_type: lora wrote, and this one trains the model's own weights",
    "weights": "is no checkpoint of the Hugging Face engine: the Megatron engine wrote it, set USE_MCA=1",
}
"""What lies in a folder of another kind -> what that says."""


@dataclass(frozen=True)
class ModelState:
    """The model's part of a checkpoint: rank 0 writes it into a folder, every rank reads it; `mark` is a file of such a folder."""

    mark: str
    write: Callable[[Path], None]
    read: Callable[[Path], None]


@dataclass(frozen=True)
class Training:
    """What the optimizer moves, and what must continue with it."""

    trained: dict[str, nn.Parameter]
    optimizer: torch.optim.AdamW | None
    scaler: LossScaler | None


def whole_state(weights: ModuleWeights, module: nn.Module, source: Path) -> ModelState:
    """All weights, and the side files of the Hugging Face folder `source`."""

    def write(path: Path) -> None:
        with HFWriter(path, weights.shapes(), weights.dtype) as writer:
            for name, tensor in weights.tensors():
                writer.write(name, tensor)
        copy_side_files(source, path)
        settle_config(path, weights.hf_config, weights.dtype)

    def read(path: Path) -> None:
        with open_hf_folder(path) as files:
            copy_to_module(((name, files.read(name)) for name in files.shapes), module)

    return ModelState(MODEL, write, read)


def adapter_state(adapters: HuggingFaceAdapters, weights: ModuleWeights, base: str) -> ModelState:
    """The adapter alone: the weights that it stands beside do not change and come from the model's folder."""
    return ModelState(ADAPTER, lambda path: adapters.export(weights, path, base), lambda path: adapters.load(path, same_scaling=True))


def save_state(path: Path, model: ModelState, training: Training, parallel: Parallel) -> None:
    """Write the state of all ranks into the folder `path`; collective."""
    group = dist.group.WORLD if parallel.world_size > 1 else None
    error: Exception | None = None
    try:
        if parallel.is_main:
            path.mkdir(parents=True, exist_ok=True)
            model.write(path)
            if training.optimizer is not None:
                torch.save(moments(training.optimizer, training.trained), path / OPTIMIZER)
            if training.scaler is not None:
                torch.save(training.scaler.state_dict(), path / SCALER)
    except Exception as caught:
        error = caught
    agree(group, error)
    torch.save({"layout": list(parallel.sizes), **_random_states()}, path / f"rng-{parallel.rank}.pt")
    parallel.barrier()


def load_state(path: Path, model: ModelState, training: Training, parallel: Parallel) -> None:
    """Fill the model and optimizer from a folder that `save_state` wrote; collective.

    A folder of weights alone makes the optimizer begin anew. Random states are restored when ranks in the same layout
    wrote them. HFFolderError for a folder of another kind.
    """
    if not (path / model.mark).is_file():
        other = next((text for name, text in _OTHERS.items() if (path / name).exists()), "is no checkpoint of the Hugging Face engine")
        raise HFFolderError(f"{path} {other}")
    model.read(path)
    if training.optimizer is not None:
        stored = path / OPTIMIZER
        state = torch.load(stored, weights_only=True, map_location="cpu", mmap=True) if stored.exists() else {}
        restore_moments(training.optimizer, training.trained, state)
    if training.scaler is not None and (path / SCALER).exists():
        training.scaler.load_state_dict(torch.load(path / SCALER, weights_only=True))
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
