"""The adapters of a Megatron engine: attach them, fill them, merge them on the way out, and which weights a run trains."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor
from torch import Tensor, nn

from rlmca.engines.adapter_start import AdapterStart
from rlmca.engines.base import AdapterUse
from rlmca.engines.freeze import trained_of
from rlmca.layouts import Coord, ModelLayout, ParamPlan, Topology
from rlmca.layouts.adapters import BRANCHES, AdapterLayout
from rlmca.layouts.boxes import Box
from rlmca.layouts.plan import in_chunk
from rlmca.models.lora import Adapters, attach, without
from rlmca.models.options import FreezeOptions, LoraOptions
from rlmca.parallel.groups import Parallel
from rlmca.transfer.load import check_params, fill
from rlmca.transfer.peft import AdapterFolder, initial_matrix, save_adapter
from rlmca.transfer.stream import Index, LiveWeights


class EngineAdapters:
    """Adapters beside the linear layers of this rank's chunks, the only parameters that need a gradient."""

    def __init__(
        self, base: ModelLayout, topology: Topology, coord: Coord, chunks: Sequence[Any], options: LoraOptions, parallel: Parallel
    ) -> None:
        self.layout, self.options = AdapterLayout(base, options.targets, options.rank), options
        self.topology, self.coord, self._parallel = topology, coord, parallel
        self._attached: dict[str, Adapters] = {}
        weights, plan = base.in_form("single").rank_plan(topology, coord), self.layout.rank_plan(topology, coord)
        for number, chunk in enumerate(chunks):
            chunk.requires_grad_(False)
            position = coord.pp + topology.pp * number
            found = attach(chunk, _inside(weights, position, topology), _inside(plan, position, topology), options)
            self._attached |= {in_chunk(name, position, topology): adapters for name, adapters in found.items()}
        self.parameters = {
            name.removesuffix(".weight") + f"{BRANCHES}{own}": parameter
            for name, adapters in self._attached.items()
            for own, parameter in adapters.named_parameters()
        }
        check_params(plan, self.parameters)
        self._mark(plan)
        self._plan = plan
        self._fill()
        self.start = AdapterStart(self.parameters, options)

    @contextlib.contextmanager
    def used(self, use: AdapterUse) -> Iterator[None]:
        """The model as its base inside the block (False), or as it was when the run started ("start"); True: as it is."""
        if not use or (use == "start" and self.start.is_base):
            with without(list(self._attached.values())):
                yield
        else:
            with self.start.restored() if use == "start" else contextlib.nullcontext():
                yield

    def delta(self, param: str, at: Index) -> Tensor | None:
        """What merging adds to a box of a base parameter; None for one without adapters."""
        adapters = self._attached.get(param)
        return None if adapters is None else adapters.delta(at)

    def weights(self, rank_of: Callable[[Coord], int], params: Mapping[str, Tensor] | None = None) -> LiveWeights:
        """The adapters of all ranks under PEFT's names (or `params`, such as their gradients, in place of their values)."""
        return LiveWeights(
            layout=self.layout,
            topology=self.topology,
            coord=self.coord,
            params=self.parameters if params is None else params,
            rank_of=rank_of,
            group=dist.group.WORLD if self._parallel.world_size > 1 else None,
        )

    def export(self, path: Path, rank_of: Callable[[Coord], int], base: str) -> None:
        """Write the adapters as PEFT does, into the existing folder `path`; collective.

        PEFT joins the matrices of an expert's gate and up when it reads them, which doubles their rank, and scales by the
        new rank: right for alpha / rank only, so that rank-stabilised adapters of experts are written with an equal alpha.
        """
        options = self.options
        if options.rslora and any(row.expert for row in self.layout.rows):
            options = replace(options, rslora=False, alpha=options.alpha * math.sqrt(options.rank))
        save_adapter(self.weights(rank_of), path, options, self.layout.target_modules, base)

    def sharded_state(self, rank_of: Callable[[Coord], int]) -> dict[str, ShardedTensor]:
        """Every matrix as a part of one whole tensor, named as in PEFT, for Megatron's distributed checkpoints.

        Copies of a part have one main owner: the first coordinate that holds it, in the first data-parallel replica.
        """
        mains = {(piece.param, piece.coord) for hf in self.layout.hf_plan(self.topology).values() for piece in hf.pieces}
        shapes, own = self.layout.hf_tensors(), rank_of(self.coord) == self._parallel.rank
        state: dict[str, ShardedTensor] = {}
        for name, parameter in self.parameters.items():
            plan = self._plan[name]
            key, place = plan.copies[0].hf, self.topology.expert_place(self.coord)[0] if plan.expert else self.coord.tp
            offset = tuple(place * n if axis == plan.axis else 0 for axis, n in enumerate(plan.shape))
            main = own and (name, self.coord) in mains
            state[name] = _sharded(key, offset, parameter, shapes[key], 0 if main else 1 + self._parallel.rank)
        return state

    def _mark(self, plan: Mapping[str, ParamPlan]) -> None:
        """Tell Megatron which matrices are parts, which are copies, and over which ranks gradients are reduced.

        A copy counts once in the norm of the gradients: on the first tensor-parallel rank, which is not the first rank
        of a group that splits an expert when that group has another size. There the copies are marked `shared`.
        """
        topology = self.topology
        place, _, _ = topology.expert_place(self.coord)
        for name, parameter in self.parameters.items():
            own, tensor = plan[name], parameter
            first: Any = tensor
            if own.axis is not None:
                first.tensor_model_parallel, first.partition_dim, first.partition_stride = True, own.axis, 1
            elif own.expert:
                first.tensor_model_parallel, first.partition_dim, first.partition_stride = True, 0, 1
                first.shared = place > 0
            if own.expert:
                first.allreduce = topology.ep == 1 and topology.expert_tp == topology.tp

    def _fill(self) -> None:
        if self.options.start is None:
            shapes, seed = self.layout.hf_tensors(), self.options.seed
            fill(self._plan, self.parameters, lambda name, box: initial_matrix(name, shapes[name], seed)[_slices(box)])
            return
        with AdapterFolder(self.options.start) as folder:
            folder.check(self.layout)
            fill(self._plan, self.parameters, folder.read)


def _sharded(key: str, offset: Sequence[int], parameter: nn.Parameter, whole: Sequence[int], replica: int) -> ShardedTensor:
    local = tuple(parameter.shape)
    return ShardedTensor(
        key=key,
        data=parameter,
        dtype=parameter.dtype,
        local_shape=local,
        global_shape=tuple(whole),
        global_offset=tuple(offset),
        axis_fragmentations=tuple(n // own for n, own in zip(whole, local, strict=True)),
        replica_id=replica,
    )


def _slices(box: Box) -> Index:
    return tuple(slice(a, b) for a, b in box)


def _inside(plan: Mapping[str, ParamPlan], position: int, topology: Topology) -> dict[str, ParamPlan]:
    """The entries of one chunk, under the names that its own module has."""
    if topology.vpp == 1:
        return dict(plan)
    prefix = in_chunk("", position, topology)
    return {name.removeprefix(prefix): own for name, own in plan.items() if name.startswith(prefix)}


def freeze(
    parameters: Iterable[tuple[str, nn.Parameter]], layout: ModelLayout, place: tuple[Topology, Coord], options: FreezeOptions
) -> None:
    """Leave a gradient only to the parameters that partial training trains, of the rank at `place`."""
    wanted, plan = trained_of(layout, options), layout.in_form("single").rank_plan(*place)
    for name, parameter in parameters:
        parameter.requires_grad_(all(copy.hf in wanted for copy in plan[name].copies))
