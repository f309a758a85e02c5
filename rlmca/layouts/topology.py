"""Where a rank sits in the model: tensor-, expert- and pipeline-parallel coordinates, and which layers a stage holds."""

from __future__ import annotations

import math
from dataclasses import dataclass


class LayoutError(ValueError):
    """A model that does not fit a topology; the message carries the numbers and what would fit."""


@dataclass(frozen=True, order=True)
class Coord:
    """Tensor-parallel and pipeline-parallel rank, both from 0, and which of the stage's tensor-parallel groups it is in, as far
    as these hold different experts. Ranks that hold the same weights share a coordinate.
    """

    tp: int = 0
    pp: int = 0
    block: int = 0


@dataclass(frozen=True)
class Topology:
    """How a model is split: `tp` tensor-parallel ranks, `pp` pipeline stages; experts are dealt out to `ep` groups of ranks
    and each is split over the `etp` ranks of its group (None: `tp`).

    `chunks` are the layers of each chunk of the pipeline in the order of the model (see `layouts.pipeline`), a multiple of
    `pp` of them: chunk k lies on stage k mod pp. None: one chunk a stage, all equal. The vocabulary is padded to a multiple of
    `vocab_multiple * tp` rows.
    """

    tp: int = 1
    pp: int = 1
    vocab_multiple: int = 1
    chunks: tuple[int, ...] | None = None
    ep: int = 1
    etp: int | None = None

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "vocab_multiple", "ep", "expert_tp"):
            if getattr(self, name) < 1:
                raise LayoutError(f"Topology.{name} is {getattr(self, name)}; it must be 1 or more")
        if self.chunks is not None and (not self.chunks or len(self.chunks) % self.pp or min(self.chunks) < 0):
            raise LayoutError(f"Topology.chunks is {self.chunks}: write a multiple of {self.pp} numbers of layers")

    @property
    def vpp(self) -> int:
        """Chunks of a stage."""
        return 1 if self.chunks is None else len(self.chunks) // self.pp

    @property
    def expert_tp(self) -> int:
        """Ranks over which an expert is split."""
        return self.tp if self.etp is None else self.etp

    @property
    def blocks(self) -> int:
        """Tensor-parallel groups of a stage that hold different experts.

        Megatron numbers the ranks of a stage once as tensor-parallel groups and once as groups of `etp` x `ep`; after so
        many of the former both begin anew together.
        """
        return math.lcm(self.tp, self.expert_tp * self.ep) // self.tp

    def coords(self) -> list[Coord]:
        """Every coordinate, stages outermost."""
        return [Coord(tp, pp, block) for pp in range(self.pp) for block in range(self.blocks) for tp in range(self.tp)]

    def expert_place(self, coord: Coord) -> tuple[int, int, bool]:
        """(rank among those that split an expert, which group of experts, whether it is the first of the stage with both)."""
        slot = coord.tp + self.tp * coord.block
        return slot % self.expert_tp, slot // self.expert_tp % self.ep, slot < self.expert_tp * self.ep

    def layers_of(self, pp: int, num_layers: int, chunk: int = 0) -> range:
        """The layers (numbered in the whole model) of a chunk of stage `pp`. Raises LayoutError when they do not add up."""
        return self.chunk_layers(num_layers)[pp + self.pp * chunk]

    def chunk_layers(self, num_layers: int) -> list[range]:
        """The layers of every chunk in the order of the model."""
        if self.chunks is None and num_layers % self.pp:
            even = [n for n in range(1, num_layers + 1) if num_layers % n == 0]
            raise LayoutError(
                f"pipeline_model_parallel_size is {self.pp}, but {num_layers} layers do not split evenly over {self.pp} stages: "
                f"use one of {even}, or write pipeline_model_parallel_layout"
            )
        sizes = self.chunks or (num_layers // self.pp,) * self.pp
        if sum(sizes) != num_layers:
            raise LayoutError(f"the chunks {sizes} of the pipeline hold {sum(sizes)} layers, the model has {num_layers}")
        ends = [sum(sizes[: k + 1]) for k in range(len(sizes))]
        return [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]
