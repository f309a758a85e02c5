"""Weights, optimizer and random states as a Megatron distributed checkpoint.

The folder holds `weights/` (torch_dist, readable by plain megatron-core under any layout) and one `rng-R.pt` a rank.
"""

from __future__ import annotations

import queue
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, tensor_parallel
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.validation import StrictHandling

from rlmca.models.policy import PolicyModel
from rlmca.parallel.groups import Parallel
from rlmca.transfer.hf_folder import HFFolderError


def save_state(path: Path, chunks: Sequence[PolicyModel], optimizer: Any | None, parallel: Parallel) -> None:
    """Write the state of all ranks below `path`; collective."""
    weights = path / "weights"
    if parallel.is_main:
        weights.mkdir(parents=True, exist_ok=True)
    parallel.barrier()
    if filesystem_async._results_queue is None:
        # Megatron would spawn a manager process to carry results out of an asynchronous save. This save is synchronous
        # and reports inside this process; a manager would outlive a killed run and need a guarded __main__.
        filesystem_async._results_queue = queue.Queue()
    dist_checkpointing.save(_sharded(chunks, optimizer, is_loading=False), str(weights))
    rng = {
        "layout": _layout(parallel),
        "torch": torch.get_rng_state(),
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    torch.save(rng, path / f"rng-{parallel.rank}.pt")
    parallel.barrier()


def load_state(path: Path, chunks: Sequence[PolicyModel], optimizer: Any | None, parallel: Parallel) -> None:
    """Fill the model and optimizer from a folder that `save_state` wrote; collective.

    A folder of weights alone makes the optimizer begin anew from them: no moments, fp32 masters equal to the weights. Random
    states are restored when ranks in the same layout wrote them; in another layout ranks that must draw differently might
    get equal states, so they go on from the run's seed. HFFolderError for a folder of another kind.
    """
    if not (path / "weights").is_dir():
        hint = ": the Hugging Face engine wrote it, unset USE_MCA" if (path / "config.json").is_file() else ""
        raise HFFolderError(f"{path} is no checkpoint of the Megatron engine{hint}")
    stored = optimizer if "optimizer" in dist_checkpointing.load_common_state_dict(str(path / "weights")) else None
    state = dist_checkpointing.load(_sharded(chunks, stored, is_loading=True), str(path / "weights"), strict=StrictHandling.RAISE_ALL)
    for key, chunk in zip(_keys(chunks), chunks, strict=True):
        chunk.load_state_dict(state[key])
    if stored is not None:
        _forget_constant_scale(state["optimizer"])
        stored.load_state_dict(state["optimizer"])
        _keep_above_minimum(stored)
    elif optimizer is not None:
        _begin_anew(optimizer)
    own = path / f"rng-{parallel.rank}.pt"
    rng = torch.load(own, weights_only=True) if own.exists() else {}
    if rng.get("layout") == _layout(parallel):
        torch.set_rng_state(rng["torch"])
        tensor_parallel.get_cuda_rng_tracker().set_states(rng["tracker"])


def _forget_constant_scale(state: Any) -> None:
    """A constant loss scale saves nothing, and a dynamic one cannot begin from that: it starts as in a new run."""
    for part in state.values() if isinstance(state, dict) and "grad_scaler" not in state else [state]:
        if isinstance(part, dict) and not part.get("grad_scaler", True):
            del part["grad_scaler"]


def _keep_above_minimum(optimizer: Any) -> None:
    """The run's own least loss scale holds for a stored one too."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        scaler: Any = getattr(part, "grad_scaler", None)
        if hasattr(scaler, "min_scale"):
            scaler._scale = scaler._scale.clamp(min=float(scaler.min_scale))


def _make_moments(optimizer: Any) -> None:
    """Before its first step an optimizer has no moments and no count, and Megatron cannot save what is not there."""
    if getattr(optimizer, "is_stub_optimizer", False):
        return  # this rank holds no parameter of it
    optimizer.init_state_fn(optimizer.optimizer, optimizer.config)
    for group in optimizer.optimizer.param_groups:
        group.setdefault("step", 0)


def _begin_anew(optimizer: Any) -> None:
    optimizer.reload_model_params()
    for group in optimizer.param_groups:
        if "step" in group:
            group["step"] = 0
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        for moments in part.optimizer.state.values() if part.optimizer is not None else ():
            for moment in moments.values():
                moment.zero_()


def _layout(parallel: Parallel) -> list[int]:
    return list(parallel.sizes)


def _keys(chunks: Sequence[PolicyModel]) -> list[str]:
    """Megatron-LM's names of a model, or of the chunks of one."""
    return ["model"] if len(chunks) == 1 else [f"model{number}" for number in range(len(chunks))]


def _sharded(chunks: Sequence[PolicyModel], optimizer: Any | None, *, is_loading: bool) -> dict[str, Any]:
    # a new dict each time: Megatron writes the current process groups into it
    metadata = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
    state: dict[str, Any] = {key: chunk.sharded_state_dict(metadata=metadata) for key, chunk in zip(_keys(chunks), chunks, strict=True)}
    if optimizer is not None:
        for part in getattr(optimizer, "chained_optimizers", [optimizer]):
            _index_by_buffer(part)
            if not is_loading:
                _make_moments(part)
        state["optimizer"] = optimizer.sharded_state_dict(state, is_loading=is_loading, metadata=metadata)
    return state


def _index_by_buffer(optimizer: Any) -> None:
    """Make a distributed optimizer's gathered state agree with the positions that it is then cut by.

    megatron-core 0.16 gathers master weights and moments without the padding between buckets, and cuts parameters out of
    them by positions that count the padding: with several buckets (a tied embedding under pipeline parallelism has one of
    its own) the checkpoint holds shifted numbers, and Megatron only warns of "data corruption". Here the padding is put
    back before the cut.
    """
    if not hasattr(optimizer, "get_parameter_state_dp_zero") or hasattr(optimizer, "_rlmca_indexed"):
        return
    gather = optimizer.get_parameter_state_dp_zero

    def gather_padded(*args: Any, **kwargs: Any) -> Any:
        state = gather(*args, **kwargs)
        for number, buffer in enumerate(optimizer.buffers if state is not None else []):
            for tensors in state[number].values():
                for key in [key for key, value in tensors.items() if torch.is_tensor(value)]:
                    padded = tensors[key].new_zeros(buffer.numel)
                    start = 0
                    for bucket in buffer.buckets:
                        size = bucket.numel_unpadded
                        padded[bucket.offset : bucket.offset + size] = tensors[key][start : start + size]
                        start += size
                    tensors[key] = padded
        return state

    optimizer.get_parameter_state_dp_zero, optimizer._rlmca_indexed = gather_padded, True
