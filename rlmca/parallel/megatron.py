"""Megatron's process groups over the processes of a run. Importing this makes megatron-core work on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from megatron.core import parallel_state, tensor_parallel

from rlmca.parallel import groups, platform
from rlmca.parallel.groups import Parallel

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

platform.quiet_megatron()
platform.install_platform()


def start(
    *,
    tp: int = 1,
    pp: int = 1,
    cp: int = 1,
    vpp: int = 1,
    ep: int = 1,
    etp: int | None = None,
    rank: int = 0,
    world_size: int = 1,
    local_rank: int = 0,
    seed: int = 42,
    timeout_s: float = 1800,
    store: Store | None = None,
) -> Parallel:
    """Join the run (see `groups.join`), create the process groups of a layout and seed the random states.

    Dropout differs between ranks that hold different parts of the model or of the batch, and agrees where tensor-parallel
    ranks hold copies (Megatron's rng tracker).
    """
    if world_size % (tp * pp * cp):
        context = f" x context {cp}" if cp > 1 else ""
        raise ValueError(f"world size {world_size} is not a multiple of tensor {tp} x pipeline {pp}{context} = {tp * pp * cp}")
    if world_size % ((tp if etp is None else etp) * ep * pp):
        raise ValueError(f"world size {world_size} is not a multiple of expert tensor {etp or tp} x expert {ep} x pipeline {pp}")
    groups.join(rank=rank, world_size=world_size, local_rank=local_rank, timeout_s=timeout_s, store=store)
    if not _same_layout(tp, pp, cp, vpp, ep, tp if etp is None else etp):
        if parallel_state.model_parallel_is_initialized():
            _end_subgroups()
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
            context_parallel_size=cp,
            expert_model_parallel_size=ep,
            expert_tensor_parallel_size=etp,
            distributed_timeout_minutes=max(1, round(timeout_s / 60)),
            create_gloo_process_groups=False,
        )
    parallel = Parallel(
        rank=rank,
        world_size=world_size,
        device=platform.device(),
        tp_size=tp,
        pp_size=pp,
        cp_size=cp,
        vpp_size=vpp,
        ep_size=ep,
        etp_size=etp,
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        cp_rank=parallel_state.get_context_parallel_rank(),
        dp_rank=parallel_state.get_data_parallel_rank(),
        dp_group=parallel_state.get_data_parallel_group(),
        pp_group=parallel_state.get_pipeline_model_parallel_group(),
        pp_last=parallel_state.get_pipeline_model_parallel_last_rank(),
    )
    tensor_parallel.model_parallel_cuda_manual_seed(groups.seed_everything(seed, parallel), force_reset_rng=True)
    return parallel


def _same_layout(tp: int, pp: int, cp: int, vpp: int, ep: int, etp: int) -> bool:
    """True when the groups that exist are those of this layout: new ones would cost sockets and threads each time."""
    if not parallel_state.model_parallel_is_initialized():
        return False
    if parallel_state.get_tensor_model_parallel_group() not in c10d._world.pg_map:
        return False  # a run of the other engine in this process ended all groups, and Megatron does not know
    here = (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_context_parallel_world_size(),
        parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1,
        parallel_state.get_expert_model_parallel_world_size(),
        parallel_state.get_expert_tensor_parallel_world_size(),
    )
    return here == (tp, pp, cp, vpp, ep, etp)


def _end_subgroups() -> None:
    """End every group but the default one: Megatron only forgets them, and each keeps its threads polling."""
    parallel_state.destroy_model_parallel()
    for group in list(c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


def close() -> None:
    """End the process groups of this process."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    groups.close()
