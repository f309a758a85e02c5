"""Process groups of a run: start them, know where a rank sits, talk to the others.

Ranks are numbered as Megatron does (order tp, dp, pp): rank = tp + TP * (dp + DP * pp).
"""

from __future__ import annotations

import datetime
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from megatron.core import parallel_state, tensor_parallel

from rlmca.parallel import platform


@dataclass(frozen=True)
class Parallel:
    """Where this process sits in the run. Make one with `start`, end it with `close`."""

    tp_size: int
    pp_size: int
    rank: int
    world_size: int
    device: torch.device

    @property
    def tp_rank(self) -> int:
        """Which shard of every layer this rank holds."""
        return parallel_state.get_tensor_model_parallel_rank()

    @property
    def pp_rank(self) -> int:
        """Which pipeline stage this rank holds."""
        return parallel_state.get_pipeline_model_parallel_rank()

    @property
    def dp_rank(self) -> int:
        """Which share of the batch this rank computes."""
        return parallel_state.get_data_parallel_rank()

    @property
    def dp_size(self) -> int:
        """Number of shares of the batch."""
        return self.world_size // (self.tp_size * self.pp_size)

    @property
    def is_main(self) -> bool:
        """Rank 0 writes logs and files."""
        return self.rank == 0

    def rank_of(self, tp_rank: int, pp_rank: int) -> int:
        """Global rank that holds this part of the model in the first data-parallel replica."""
        return tp_rank + self.tp_size * self.dp_size * pp_rank

    def dp_sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over data-parallel ranks, in place."""
        if self.dp_size > 1:
            dist.all_reduce(values, group=parallel_state.get_data_parallel_group())
        return values

    def dp_max(self, values: torch.Tensor) -> torch.Tensor:
        """Maximum over data-parallel ranks, in place."""
        if self.dp_size > 1:
            dist.all_reduce(values, op=dist.ReduceOp.MAX, group=parallel_state.get_data_parallel_group())
        return values

    def from_last_stage(self, values: torch.Tensor) -> torch.Tensor:
        """Every pipeline stage gets what the last stage holds, in place (all stages pass the same shape)."""
        if self.pp_size > 1:
            group = parallel_state.get_pipeline_model_parallel_group()
            dist.broadcast(values, src=parallel_state.get_pipeline_model_parallel_last_rank(), group=group)
        return values

    def barrier(self) -> None:
        """Wait for every rank."""
        if self.world_size > 1:
            dist.barrier()

    def broadcast_object(self, value: Any) -> Any:
        """Rank 0's object on every rank."""
        if self.world_size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def any_rank(self, flag: bool) -> bool:
        """True on every rank when it is true on one."""
        if self.world_size == 1:
            return flag
        box = torch.tensor([int(flag)], device=self.device)
        dist.all_reduce(box, op=dist.ReduceOp.MAX)
        return bool(box.item())


def start(
    *, tp: int = 1, pp: int = 1, rank: int = 0, world_size: int = 1, local_rank: int = 0, seed: int = 42, timeout_s: float = 1800
) -> Parallel:
    """Create the process groups of a layout and seed the random states; in a world of one no launcher is needed.

    Under torchrun the rendezvous comes from its environment. Dropout differs between ranks that hold different
    parts of the model or of the batch, and agrees where tensor-parallel ranks hold copies (Megatron's rng tracker).
    """
    if world_size % (tp * pp):
        raise ValueError(f"world size {world_size} is not a multiple of tensor {tp} x pipeline {pp} = {tp * pp}")
    if platform.is_cuda():
        torch.cuda.set_device(local_rank)
    if not dist.is_initialized():
        timeout = datetime.timedelta(seconds=timeout_s)
        if world_size == 1:
            alone = torch.distributed.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group(platform.backend(), store=alone, rank=0, world_size=1, timeout=timeout)
        else:
            dist.init_process_group(platform.backend(), rank=rank, world_size=world_size, timeout=timeout)
    if not _same_layout(tp, pp):
        if parallel_state.model_parallel_is_initialized():
            _end_subgroups()
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            distributed_timeout_minutes=max(1, round(timeout_s / 60)),
            create_gloo_process_groups=False,
        )
    parallel = Parallel(tp_size=tp, pp_size=pp, rank=rank, world_size=world_size, device=platform.device())
    seed_everything(seed, parallel)
    return parallel


def _same_layout(tp: int, pp: int) -> bool:
    """True when the groups that exist are those of this layout: new ones would cost sockets and threads each time."""
    if not parallel_state.model_parallel_is_initialized():
        return False
    here = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_pipeline_model_parallel_world_size()
    return here == (tp, pp)


def seed_everything(seed: int, parallel: Parallel) -> None:
    """Seed Python, numpy, torch and Megatron's tracker from one number, differently for every pipeline and data rank.

    The offsets are Megatron-LM's: 100 per pipeline stage, 10 per data-parallel rank.
    """
    own = seed + 100 * parallel.pp_rank + 10 * parallel.dp_rank
    random.seed(own)
    numpy.random.seed(own % 2**32)
    torch.manual_seed(own)
    tensor_parallel.model_parallel_cuda_manual_seed(own, force_reset_rng=True)


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
    if dist.is_initialized():
        dist.destroy_process_group()


def share(rows: Sequence[int], dp_rank: int, dp_size: int) -> list[int]:
    """The rows of a global batch that one data-parallel rank computes; sizes differ by one at most.

    Raises ValueError when a rank would get none: fewer rows than ranks cannot be a batch.
    """
    if len(rows) < dp_size:
        raise ValueError(f"a batch of {len(rows)} rows cannot be shared by {dp_size} data-parallel ranks")
    return list(rows[dp_rank::dp_size])
