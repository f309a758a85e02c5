"""Executor ranks -> Hugging Face tensors, one after the other, on one rank.

Owners of the pieces send them point to point to the receiving rank, one message per bucket of tensors, so memory
stays bounded by the bucket and small tensors do not cost a message each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from rlmca.layouts import Coord, Form, ModelLayout, Topology
from rlmca.layouts.boxes import Shape, extents, full, volume
from rlmca.transfer.kept import KeptTensors
from rlmca.transfer.load import check_params, index

Index = tuple[slice, ...]


class _Piece(NamedTuple):
    owner: int
    param: str
    at: Index
    to: Index
    shape: Shape
    numel: int


class _Target(NamedTuple):
    """A Hugging Face tensor. `whole`: one piece of one parameter is all of it."""

    name: str
    shape: Shape
    pieces: tuple[_Piece, ...]
    whole: bool
    dtype: torch.dtype


class Weights(Protocol):
    """The live weights of a model on ranks, seen as Hugging Face tensors."""

    @property
    def dtype(self) -> torch.dtype:
        """Type of the tensors that are trained."""
        ...

    @property
    def own_dtypes(self) -> Mapping[str, torch.dtype]:
        """Types of the tensors that are not trained: they are this, whatever the others become."""
        ...

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The ranks that hold them together; None: this process alone."""
        ...

    @property
    def hf_config(self) -> Mapping[str, Any]:
        """The model's config.json."""
        ...

    def in_form(self, form: Form) -> Weights:
        """The same weights with experts held in this form."""
        ...

    def shapes(self) -> Mapping[str, Shape]:
        """Name and shape of every tensor, in the order of `tensors`."""
        ...

    def tensors(self, dst_rank: int = 0) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) on global rank `dst_rank`; collective, the others run to the end and get nothing.

        Tensors carry no gradient and may be views of live parameters: copy one to keep it.
        """
        ...


@dataclass
class LiveWeights:
    """The live parameters of this rank, or tensors shaped like them (gradients), and where the others are.

    `params` holds what `layout.rank_plan(topology, coord)` names, on one device, buffers in float32 and all else in one dtype.
    `rank_of` gives the global rank that answers for a coordinate (one data-parallel replica). `group` spans all ranks that
    iterate; None means this process alone. The plan is made once here; it refers to parameters by name, so they may change
    storage. `kept` are further tensors of the model's folder, which come last. Without `buffers` it is about what is trained
    alone. Raises ValueError for parameters that do not fit, LayoutError for a model that does not fit the topology.
    """

    layout: ModelLayout
    topology: Topology
    coord: Coord
    params: Mapping[str, Tensor]
    rank_of: Callable[[Coord], int] = lambda coord: 0
    group: dist.ProcessGroup | None = None
    bucket_bytes: int = 64 << 20
    readable: Callable[[], None] = lambda: None
    """Raises while the tensors have no memory (an engine that is offloaded): reading them then would end the process."""
    added: Callable[[str, Index], Tensor | None] = lambda param, at: None
    """What is to be added to a box of a parameter, in a wider type; None: nothing (an adapter that is merged on the way out)."""
    kept: KeptTensors | None = None
    buffers: bool = True
    buckets: list[list[_Target]] = field(init=False, repr=False)
    """Tensors of a bucket have one dtype."""
    _forms: dict[Form, LiveWeights] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        if self.group is None and len(self.topology.coords()) > 1:
            raise ValueError(f"{self.topology} has several ranks: LiveWeights needs the process group that spans them")
        plan = self.layout.rank_plan(self.topology, self.coord)
        if not self.buffers:
            plan = {name: param for name, param in plan.items() if not param.buffer}
        check_params(plan, self.params)
        if len(kinds := {(p.dtype, p.device) for name, p in self.params.items() if not plan[name].buffer}) != 1:
            raise ValueError(f"LiveWeights needs one dtype and one device for all parameters, got {sorted(map(str, kinds))}")
        ((self.dtype, self.device),) = kinds
        wrong = [n for n, p in plan.items() if p.buffer and (self.params[n].dtype, self.params[n].device) != (torch.float32, self.device)]
        if wrong:
            raise ValueError(f"LiveWeights needs float32 on {self.device} for {', '.join(wrong)}")
        self.buckets = self._plan()

    def with_params(self, params: Mapping[str, Tensor]) -> LiveWeights:
        """The same plan over other tensors of the same names and shapes for what is trained, such as gradients."""
        return LiveWeights(
            self.layout, self.topology, self.coord, params, self.rank_of, self.group, self.bucket_bytes, self.readable, buffers=False
        )

    def read(self, param: str, at: Index) -> Tensor:
        """A box of a parameter on this rank, a view where nothing is added."""
        part = self.params[param].detach()[at]
        delta = self.added(param, at)
        return part if delta is None else (part.to(delta.dtype) + delta).to(part.dtype)

    def in_form(self, form: Form) -> LiveWeights:
        """See `Weights`. The plan of another form is made once."""
        if form == self.layout.form or self.layout.in_form(form).hf_tensors() == self.shapes():
            return self
        if form not in self._forms:
            self._forms[form] = replace(self, layout=self.layout.in_form(form))
        return self._forms[form]

    @property
    def hf_config(self) -> Mapping[str, Any]:
        """See `Weights`."""
        return self.layout.hf_config

    def shapes(self) -> Mapping[str, Shape]:
        """See `Weights`."""
        left_out = frozenset() if self.buffers else self.layout.hf_buffers()
        own = {name: shape for name, shape in self.layout.hf_tensors().items() if name not in left_out}
        return own | (self.kept.shapes if self.kept else {})

    @property
    def own_dtypes(self) -> Mapping[str, torch.dtype]:
        """See `Weights`."""
        buffers = dict.fromkeys(self.layout.hf_buffers(), torch.float32) if self.buffers else {}
        return buffers | (self.kept.dtypes if self.kept else {})

    def tensors(self, dst_rank: int = 0) -> Iterator[tuple[str, Tensor]]:
        """See `hf_tensors`."""
        return hf_tensors(self, dst_rank)

    def _plan(self) -> list[list[_Target]]:
        buckets: list[list[_Target]] = [[]]
        used = 0
        float32 = self.layout.hf_buffers()
        for name, hf in self.layout.hf_plan(self.topology).items():
            if name in float32 and not self.buffers:
                continue
            dtype = torch.float32 if name in float32 else self.dtype
            pieces = tuple(
                _Piece(self.rank_of(p.coord), p.param, index(p.param_box), index(p.hf_box), extents(p.hf_box), volume(p.hf_box))
                for p in hf.pieces
            )
            size = volume(full(hf.shape)) * dtype.itemsize
            if used and (used + size > self.bucket_bytes or buckets[-1][-1].dtype != dtype):
                buckets.append([])
                used = 0
            buckets[-1].append(_Target(name, hf.shape, pieces, len(pieces) == 1, dtype))
            used += size
        return buckets


def hf_tensors(weights: LiveWeights, dst_rank: int = 0) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, tensor) of the whole model, in the order of the layout, on global rank `dst_rank`; then what is kept.

    Collective: every rank of `weights.group` runs it to its end; the others yield nothing. Tensors carry no gradient.
    Where a tensor is one contiguous part of a live parameter it is yielded as a view: copy it to keep it.
    """
    if weights.group is None:
        return _with_kept(_local(weights), weights.kept)
    rank = dist.get_rank()
    return _with_kept(_receive(weights, rank), weights.kept) if rank == dst_rank else _send(weights, rank, dst_rank)


def _with_kept(stream: Iterator[tuple[str, Tensor]], kept: KeptTensors | None) -> Iterator[tuple[str, Tensor]]:
    yield from stream
    if kept is not None:
        yield from kept.tensors()


def _local(weights: LiveWeights) -> Iterator[tuple[str, Tensor]]:
    for bucket in weights.buckets:
        for target in bucket:
            weights.readable()
            yield target.name, _assemble(weights, target, lambda piece: _own(weights, piece))


def _own(weights: LiveWeights, piece: _Piece) -> Tensor:
    """This rank's part, with the axes that it has in the Hugging Face tensor; a view where nothing is added."""
    return weights.read(piece.param, piece.at).reshape(piece.shape)


def _assemble(weights: LiveWeights, target: _Target, part: Callable[[_Piece], Tensor]) -> Tensor:
    if target.whole and (only := part(target.pieces[0])).is_contiguous():
        return only
    out = torch.empty(target.shape, dtype=target.dtype, device=weights.device)
    for piece in target.pieces:
        out[piece.to].copy_(part(piece))
    return out


def _send(weights: LiveWeights, rank: int, dst_rank: int) -> Iterator[tuple[str, Tensor]]:
    for bucket in weights.buckets:
        weights.readable()
        mine = [_own(weights, p).reshape(-1) for target in bucket for p in target.pieces if p.owner == rank]
        if mine:
            dist.send(torch.cat(mine), dst_rank, group=weights.group)
    yield from ()


def _receive(weights: LiveWeights, rank: int) -> Iterator[tuple[str, Tensor]]:
    for bucket in weights.buckets:
        weights.readable()  # before it waits: ranks that cannot read send nothing
        sizes: dict[int, int] = {}
        for target in bucket:
            for piece in target.pieces:
                if piece.owner != rank:
                    sizes[piece.owner] = sizes.get(piece.owner, 0) + piece.numel
        flat = {owner: torch.empty(n, dtype=bucket[0].dtype, device=weights.device) for owner, n in sorted(sizes.items())}
        for request in [dist.irecv(buffer, owner, group=weights.group) for owner, buffer in flat.items()]:
            if request is not None:
                request.wait()
        read = dict.fromkeys(flat, 0)

        def part(piece: _Piece, flat: dict[int, Tensor] = flat, read: dict[int, int] = read) -> Tensor:
            if piece.owner == rank:
                return _own(weights, piece)
            start = read[piece.owner]  # pieces lie in the order of the plan, which sender and receiver share
            read[piece.owner] = start + piece.numel
            return flat[piece.owner][start : start + piece.numel].view(piece.shape)

        for target in bucket:
            weights.readable()
            yield target.name, _assemble(weights, target, part)


def agree(group: dist.ProcessGroup | None, error: BaseException | None) -> None:
    """Raise on every rank of the group when one has an error: its own error there, a RuntimeError quoting it elsewhere."""
    if group is not None:
        texts: list[str | None] = [None] * dist.get_world_size(group)
        dist.all_gather_object(texts, None if error is None else f"{type(error).__name__}: {error}", group=group)
        if error is None and (other := next((t for t in texts if t is not None), None)) is not None:
            raise RuntimeError(f"another rank failed: {other}")
    if error is not None:
        raise error
