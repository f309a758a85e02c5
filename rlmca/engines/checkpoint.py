"""Weights, optimizer and random states as a Megatron distributed checkpoint.

The folder holds `weights/` (torch_dist, readable by plain megatron-core under any layout) and one `rng-R.pt` a rank.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, tensor_parallel
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.validation import StrictHandling

from rlmca.models.policy import PolicyModel
from rlmca.parallel.groups import Parallel
from rlmca.transfer.hf_folder import HFFolderError

if TYPE_CHECKING:
    from rlmca.engines.adapters import EngineAdapters
    from rlmca.layouts import Coord


@dataclass(frozen=True)
class ModelState:
    """The model's part of a checkpoint: `sharded()` describes it anew each time, `take` fills the model from what was read."""

    sharded: Callable[[], dict[str, Any]]
    take: Callable[[dict[str, Any]], None]


def chunks_state(chunks: Sequence[PolicyModel]) -> ModelState:
    """All weights, as Megatron-LM stores them."""
    keys = ["model"] if len(chunks) == 1 else [f"model{number}" for number in range(len(chunks))]  # Megatron-LM's names

    # Megatron describes a weight of all layers as one tensor; an optimizer of some layers has only parts of it
    partial = not all(parameter.requires_grad for chunk in chunks for parameter in chunk.parameters())

    def sharded() -> dict[str, Any]:
        metadata = {**_metadata(), "non_homogeneous_layers": partial}
        return {key: chunk.sharded_state_dict(metadata=metadata.copy()) for key, chunk in zip(keys, chunks, strict=True)}

    def take(state: dict[str, Any]) -> None:
        for key, chunk in zip(keys, chunks, strict=True):
            chunk.load_state_dict(state[key])

    return ModelState(sharded, take)


def adapters_state(adapters: EngineAdapters, rank_of: Callable[[Coord], int]) -> ModelState:
    """The adapters alone: the weights that they stand beside do not change and come from the model's folder."""

    def take(state: dict[str, Any]) -> None:
        with torch.no_grad():
            for name, parameter in adapters.parameters.items():
                parameter.copy_(state["adapters"][name])

    return ModelState(lambda: {"adapters": adapters.sharded_state(rank_of)}, take)


def save_state(path: Path, model: ModelState, optimizer: Any | None, parallel: Parallel) -> None:
    """Write the state of all ranks below `path`; collective."""
    weights = path / "weights"
    if parallel.is_main:
        weights.mkdir(parents=True, exist_ok=True)
    parallel.barrier()
    if filesystem_async._results_queue is None:
        # Megatron would spawn a manager process to carry results out of an asynchronous save. This save is synchronous
        # and reports inside this process; a manager would outlive a killed run and need a guarded __main__.
        filesystem_async._results_queue = queue.Queue()
    dist_checkpointing.save(_sharded(model, optimizer, saving=parallel), str(weights))
    rng = {
        "layout": _layout(parallel),
        "torch": torch.get_rng_state(),
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    torch.save(rng, path / f"rng-{parallel.rank}.pt")
    parallel.barrier()


def load_state(path: Path, model: ModelState, optimizer: Any | None, parallel: Parallel) -> None:
    """Fill the model and optimizer from a folder that `save_state` wrote; collective.

    A folder of weights alone makes the optimizer begin anew from them: no moments, fp32 masters equal to the weights. Random
    states are restored when ranks in the same layout wrote them; in another layout ranks that must draw differently might
    get equal states, so they go on from the run's seed. HFFolderError for a folder of another kind.
    """
    if not (path / "weights").is_dir():
        theirs = [name for name in ("config.json", "adapter_config.json") if (path / name).is_file()]
        hint = ": the Hugging Face engine wrote it, unset USE_MCA" if theirs else ""
        raise HFFolderError(f"{path} is no checkpoint of the Megatron engine{hint}")
    stored = optimizer if "optimizer" in dist_checkpointing.load_common_state_dict(str(path / "weights")) else None
    state = dist_checkpointing.load(_sharded(model, stored, saving=None), str(path / "weights"), strict=StrictHandling.RAISE_ALL)
    model.take(state)
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


def _agree_on_steps(optimizer: Any, parallel: Parallel) -> None:
    """Rank 0 writes the counts of all ranks, and has not counted groups of which it holds nothing: its stage has no experts, or
    is not trained."""
    parts = [part for part in getattr(optimizer, "chained_optimizers", [optimizer]) if part.optimizer is not None]
    groups = [group for part in parts for group in part.optimizer.param_groups]
    most = torch.tensor([max((int(group["step"]) for group in groups if "step" in group), default=0)], device=parallel.device)
    if parallel.world_size > 1:
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
    for group in groups:
        group["step"] = int(most)


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


def _metadata() -> dict[str, Any]:
    # a new dict each time: Megatron writes the current process groups into it
    return {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}


def _sharded(model: ModelState, optimizer: Any | None, *, saving: Parallel | None) -> dict[str, Any]:
    state = model.sharded()
    if optimizer is not None:
        for part in getattr(optimizer, "chained_optimizers", [optimizer]):
            _index_by_buffer(part)
            if saving is not None:
                _make_moments(part)
        if saving is not None:
            _agree_on_steps(optimizer, saving)
        state["optimizer"] = optimizer.sharded_state_dict(state, is_loading=saving is None, metadata=_metadata())
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
