"""Ray ranks: one process executes the loop, every rank of the models is a Ray actor on a placement group.

The loop's process (the driver) holds no model. A call goes to all ranks at once and each runs the same `SpmdGroup` that
a torchrun process would run, so what is computed does not depend on the launcher. Invariants: the first rank that fails
ends the call with that rank's error, nobody waits for ranks that wait for it; ranks end with the driver, however it ends.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import ray
import torch.distributed as dist
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from torch import Tensor

from rlmca.algorithms.contract import Loss, TokenOutputs
from rlmca.config import RunConfig
from rlmca.engines.base import AdapterUse, Limits
from rlmca.engines.setup import build_engine, end_parallel, start_parallel
from rlmca.layouts import Form
from rlmca.parallel.groups import Parallel
from rlmca.transfer.side_files import Tokenizer
from rlmca.types import Batch
from rlmca.workers.base import ExportOptions, WorkerError
from rlmca.workers.cluster import connect, forwarded_environment, rank_resources
from rlmca.workers.spmd import SpmdGroup

_BUCKET_BYTES = 64 << 20
"""Weights travel from rank 0 to the driver in parts of about this size."""
_BUCKETS_AHEAD = 4
"""Buckets that wait in Ray's store at most: a model need not fit there."""
_START_SECONDS = 300
_GRACE_SECONDS = 5
_LOOPBACK = "127.0.0.1"


class _Rank:
    """The actor: one rank of every model of the run."""

    def __init__(self, cfg: RunConfig, rank: int, world_size: int) -> None:
        self._cfg, self._rank, self._world_size = cfg, rank, world_size
        self._groups: dict[str, SpmdGroup] = {}
        self._store: Any = None
        self._parallel = Parallel.alone()

    def __repr__(self) -> str:
        return f"rank {self._rank}"  # Ray puts it in front of every line that this process prints

    def pid(self) -> int:
        """This process, for those who watch over processes."""
        return os.getpid()

    def open_store(self, host: str) -> tuple[str, int]:
        """Rank 0: where the others find it. The port is bound here, not looked for first and bound later."""
        self._store = dist.TCPStore(host, 0, self._world_size, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        return host, self._store.port

    def address(self) -> str:
        """This node, as the other nodes call it."""
        return ray.util.get_node_ip_address()

    def join(self, host: str, port: int) -> tuple[int, int, int, int]:
        """Join the process groups; (tensor, context, pipeline, data) parallel sizes."""
        if self._store is None:
            self._store = dist.TCPStore(host, port, self._world_size, is_master=False)  # type: ignore[attr-defined]
        # Ray shows each rank its own device alone, so the local rank is always 0
        self._parallel = start_parallel(self._cfg, rank=self._rank, world_size=self._world_size, local_rank=0, store=self._store)
        return self._parallel.sizes

    def build(self, role: str, folder: Path, trainable: bool) -> None:
        """Put a model on this rank."""
        self._groups[role] = SpmdGroup(build_engine(self._cfg, folder, self._parallel, trainable=trainable), self._parallel)

    def call(self, role: str, method: str, *args: Any, **kwargs: Any) -> Any:
        """A method of the role's group; results are the same on all ranks, so rank 0 answers."""
        result = getattr(self._groups[role], method)(*args, **kwargs)
        return result if self._rank == 0 else None

    def stream(self, role: str, form: Form | None) -> Iterator[list[tuple[str, Tensor]]]:
        """The role's weights in buckets; ranks other than 0 take part and give nothing."""
        bucket: list[tuple[str, Tensor]] = []
        size = 0
        for name, tensor in self._groups[role].hf_tensors(form):
            bucket.append((name, tensor.detach().cpu().clone()))
            size += tensor.numel() * tensor.element_size()
            if size >= _BUCKET_BYTES:
                yield bucket
                bucket, size = [], 0
        if bucket:
            yield bucket

    def end(self) -> None:
        """Leave the process groups."""
        end_parallel(self._cfg)


class RayGroup:
    """A role on all ranks. See `WorkerGroup`. Paths go out whole: ranks need not work in the folder of this process."""

    def __init__(self, role: str, ranks: RayRanks) -> None:
        self.role, self._ranks = role, ranks

    def train_batch(self, batch: Batch, loss: Loss, learning_rate: float, limits: Limits | None = None) -> dict[str, float]:
        """See `WorkerGroup`."""
        return self._call("train_batch", ray.put(batch), loss, learning_rate, limits)

    def log_probs(self, batch: Batch, *, temperature: float = 1.0, entropy: bool = False, adapter: AdapterUse = True) -> TokenOutputs:
        """See `WorkerGroup`."""
        return self._call("log_probs", ray.put(batch), temperature=temperature, entropy=entropy, adapter=adapter)

    def hf_tensors(self, form: Form | None = None) -> Iterator[tuple[str, Tensor]]:
        """See `WorkerGroup`."""
        for bucket in self._ranks.stream(self.role, form):
            yield from bucket

    def export(self, options: ExportOptions, tokenizer: Tokenizer | None) -> None:
        """See `WorkerGroup`. Rank 0 writes: with several nodes the folder must be on a file system that they share."""
        whole = replace(options, out_dir=options.out_dir.absolute(), source_dir=options.source_dir.absolute())
        self._call("export", whole, tokenizer)

    def export_adapter(self, path: Path, base: str) -> None:
        """See `WorkerGroup`; on a file system that all nodes share."""
        self._call("export_adapter", path.absolute(), base)

    def save(self, path: Path) -> None:
        """See `WorkerGroup`; on a file system that all nodes share."""
        self._call("save", path.absolute())

    def load(self, path: Path) -> None:
        """See `WorkerGroup`; from a file system that all nodes share."""
        self._call("load", path.absolute())

    def close(self) -> None:
        """See `WorkerGroup`."""
        self._call("close")

    def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self._ranks.everywhere("call", self.role, method, *args, **kwargs)[0]


class RayRanks:
    """`world_size` actors, one a device, consecutive ranks on the same node where it has room. See `Ranks`."""

    def __init__(self, cfg: RunConfig, world_size: int) -> None:
        self.loop = Parallel.alone()
        self._stack = contextlib.ExitStack()
        try:
            local = connect(self._stack, cfg, world_size)
            self._actors = self._start_actors(cfg, world_size)
            host = _LOOPBACK if local else self._wait([self._actors[0].address.remote()])[0]
            host, port = self._wait([self._actors[0].open_store.remote(host)])[0]
            self.sizes: tuple[int, int, int, int] = self.everywhere("join", host, port)[0]
        except BaseException:
            self.close()
            raise

    def build(self, role: str, folder: Path, *, trainable: bool = True) -> RayGroup:
        """See `Ranks`. The folder must be found under this path on every node."""
        self.everywhere("build", role, Path(folder).resolve(), trainable)
        return RayGroup(role, self)

    def close(self) -> None:
        """See `Ranks`."""
        self._stack.close()

    def everywhere(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call all ranks at once; their results by rank, or the error of the first one that failed."""
        return self._wait([getattr(actor, method).remote(*args, **kwargs) for actor in self._actors])

    def stream(self, role: str, form: Form | None = None) -> Iterator[list[tuple[str, Tensor]]]:
        """What `_Rank.stream` of rank 0 yields, while the others send it their parts."""
        ahead = {"num_returns": "streaming", "_generator_backpressure_num_objects": _BUCKETS_AHEAD}
        streams = [actor.stream.options(**ahead).remote(role, form) for actor in self._actors]
        others = {stream.completed(): rank for rank, stream in enumerate(streams) if rank}
        while True:
            try:
                for reference in ray.wait([streams[0], *others], num_returns=1)[0]:
                    if reference is not streams[0]:
                        with _unwrapped(others.pop(reference)):
                            ray.get(reference)
                        continue
                    with _unwrapped(0):
                        try:
                            bucket = ray.get(next(reference))
                        except StopIteration:
                            self._wait(list(others))
                            return
                    yield bucket
            except RuntimeError as error:
                _raise_the_cause(error, others)

    def _start_actors(self, cfg: RunConfig, world_size: int) -> list[Any]:
        resources = rank_resources(cfg, world_size)
        group = placement_group([resources] * world_size, strategy="PACK")
        self._stack.callback(remove_placement_group, group)
        if not group.wait(_START_SECONDS):
            raise WorkerError(
                f"Ray found no room for {world_size} ranks of {resources} within {_START_SECONDS} s: other jobs hold the cluster"
            )
        nodes = placement_group_table(group)["bundles_to_node_id"]
        bundles = sorted(range(world_size), key=lambda bundle: (nodes[bundle], bundle))
        options = {
            "num_cpus": resources["CPU"],
            "num_gpus": resources.get("GPU", 0),
            "max_restarts": 0,
            "runtime_env": {"env_vars": forwarded_environment(cfg)},
        }
        remote = ray.remote(_Rank)
        actors = []
        for rank, bundle in enumerate(bundles):
            place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
            actors.append(remote.options(scheduling_strategy=place, **options).remote(cfg, rank, world_size))
            self._stack.callback(ray.kill, actors[-1])
        return actors

    @staticmethod
    def _wait(references: Sequence[Any]) -> list[Any]:
        pending = {reference: rank for rank, reference in enumerate(references)}
        results: dict[int, Any] = {}
        while pending:
            for reference in ray.wait(list(pending), num_returns=1)[0]:
                rank = pending.pop(reference)
                try:
                    with _unwrapped(rank):
                        results[rank] = ray.get(reference)
                except RuntimeError as error:
                    _raise_the_cause(error, pending)
        return [results[rank] for rank in range(len(references))]


def _raise_the_cause(first: RuntimeError, pending: Mapping[Any, int]) -> NoReturn:
    """Raise what ended a call. A rank whose neighbour died reports a broken connection, often before the death is known."""
    ended = [] if isinstance(first, WorkerError) else ray.wait(list(pending), num_returns=len(pending), timeout=_GRACE_SECONDS)[0]
    for reference in ended:
        try:
            with _unwrapped(pending[reference]):
                ray.get(reference)
        except WorkerError as death:
            raise death from first
        except Exception:  # another rank's share of the same trouble
            continue
    raise first


@contextlib.contextmanager
def _unwrapped(rank: int) -> Iterator[None]:
    """A rank's own exception instead of Ray's, whose text is a traceback of processes that the reader does not know."""
    try:
        yield
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        cause.add_note(f"on rank {rank}:\n{error}")
        raise cause from None
    except ray.exceptions.RayActorError as error:
        raise WorkerError(f"rank {rank} ended in the middle of a call: {_reason(str(error))}") from None


def _reason(text: str) -> str:
    """What Ray says of a dead actor, without the table of its numbers."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if missing := [line for line in lines if "No module named" in line]:
        return f"{missing[-1]} (the package must be installed on every node)"
    why = [line for line in lines if "is dead because" in line or "Error" in line]
    return " ".join(dict.fromkeys([*lines[:1], *why[-1:]])) or "no reason is known"
