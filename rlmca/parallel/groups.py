"""Process groups of a run: join them, know where a rank sits, talk to the others.

Ranks are numbered as Megatron does (order tp, cp, dp, pp): rank = tp + TP * (cp + CP * (dp + DP * pp)). Nothing here knows megatron:
`parallel.megatron` lays a model-parallel layout over the processes, an engine without one has data parallelism alone.
"""

from __future__ import annotations

import datetime
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy
import torch
import torch.distributed as dist

from rlmca.parallel import platform

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


@dataclass(frozen=True)
class Parallel:
    """Where this process sits in the run. Make one with `start` (or `parallel.megatron.start`), end it with `close`.

    Groups are None where there is one rank. `pp_last` is the global rank of this rank's last pipeline stage.
    """

    rank: int
    world_size: int
    device: torch.device
    tp_size: int = 1
    pp_size: int = 1
    cp_size: int = 1
    ep_size: int = 1
    """Groups of ranks that experts are dealt out to."""
    etp_size: int | None = None
    """Ranks over which an expert is split; None: as many as there are tensor-parallel ones."""
    vpp_size: int = 1
    """Chunks of the model on each pipeline stage."""
    tp_rank: int = 0
    """Which shard of every layer this rank holds."""
    pp_rank: int = 0
    """Which pipeline stage this rank holds."""
    cp_rank: int = 0
    """Which chunks of every row this rank holds."""
    dp_rank: int = 0
    """Which share of the batch this rank computes."""
    dp_group: Any = field(default=None, repr=False, compare=False)
    pp_group: Any = field(default=None, repr=False, compare=False)
    pp_last: int = 0

    @classmethod
    def alone(cls) -> Parallel:
        """A process that works by itself, without any group."""
        return cls(rank=0, world_size=1, device=platform.device())

    @property
    def dp_size(self) -> int:
        """Number of shares of the batch."""
        return self.world_size // (self.tp_size * self.cp_size * self.pp_size)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """(tensor, context, pipeline, data) parallel sizes."""
        return self.tp_size, self.cp_size, self.pp_size, self.dp_size

    @property
    def is_main(self) -> bool:
        """Rank 0 writes logs and files."""
        return self.rank == 0

    @property
    def is_last_stage(self) -> bool:
        """True where the loss is computed."""
        return self.pp_rank == self.pp_size - 1

    @property
    def rank_in_stage(self) -> int:
        """Number of this rank among those of its pipeline stage."""
        return self.rank % (self.world_size // self.pp_size)

    def rank_of(self, tp_rank: int, pp_rank: int, block: int = 0) -> int:
        """Global rank `tp_rank` of the stage's tensor-parallel group number `block`."""
        return tp_rank + self.tp_size * block + (self.world_size // self.pp_size) * pp_rank

    def dp_sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over data-parallel ranks, in place."""
        if self.dp_size > 1:
            dist.all_reduce(values, group=self.dp_group)
        return values

    def dp_max(self, values: torch.Tensor) -> torch.Tensor:
        """Maximum over data-parallel ranks, in place."""
        if self.dp_size > 1:
            dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self.dp_group)
        return values

    def from_last_stage(self, values: torch.Tensor) -> torch.Tensor:
        """Every pipeline stage gets what the last stage holds, in place (all stages pass the same shape)."""
        if self.pp_size > 1:
            dist.broadcast(values, src=self.pp_last, group=self.pp_group)
        return values

    def object_from_last_stage(self, value: Any) -> Any:
        """The last stage's object on every pipeline stage."""
        if self.pp_size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=self.pp_last, group=self.pp_group)
        return box[0]

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


def join(*, rank: int, world_size: int, local_rank: int, timeout_s: float, store: Store | None = None) -> None:
    """Join the processes of the run, once; in a world of one no launcher is needed.

    Without a `store` the rendezvous comes from the environment that torchrun made.
    """
    if platform.is_cuda():
        torch.cuda.set_device(local_rank)
    if dist.is_initialized():
        return
    if world_size == 1 and store is None:
        store = torch.distributed.HashStore()  # type: ignore[attr-defined]
    timeout = datetime.timedelta(seconds=timeout_s)
    dist.init_process_group(platform.backend(), store=store, rank=rank, world_size=world_size, timeout=timeout)


def start(
    *, rank: int = 0, world_size: int = 1, local_rank: int = 0, seed: int = 42, timeout_s: float = 1800, store: Store | None = None
) -> Parallel:
    """Join a run of data parallelism alone and seed the random states: every rank holds the whole model."""
    join(rank=rank, world_size=world_size, local_rank=local_rank, timeout_s=timeout_s, store=store)
    parallel = Parallel(
        rank=rank, world_size=world_size, device=platform.device(), dp_rank=rank, dp_group=dist.group.WORLD if world_size > 1 else None
    )
    seed_everything(seed, parallel)
    return parallel


def seed_everything(seed: int, parallel: Parallel) -> int:
    """Seed Python, numpy and torch from one number, differently for every pipeline, context and data rank; the seed of this rank.

    The offsets are Megatron-LM's: 100 per pipeline stage, 10 per data-parallel rank (here: per context rank in it).
    """
    own = seed + 100 * parallel.pp_rank + 10 * (parallel.cp_rank + parallel.cp_size * parallel.dp_rank)
    random.seed(own)
    numpy.random.seed(own % 2**32)
    torch.manual_seed(own)
    return own


def close() -> None:
    """End the process groups of this process."""
    if dist.is_initialized():
        dist.destroy_process_group()
