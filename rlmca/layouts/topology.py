"""Where a rank sits in the model: tensor- and pipeline-parallel coordinates, and which layers a stage holds."""

from __future__ import annotations

from dataclasses import dataclass


class LayoutError(ValueError):
    """A model that does not fit a topology; the message carries the numbers and what would fit."""


@dataclass(frozen=True, order=True)
class Coord:
    """Tensor-parallel and pipeline-parallel rank, both from 0. Data-parallel replicas share a coordinate."""

    tp: int = 0
    pp: int = 0


@dataclass(frozen=True)
class Topology:
    """How a model is split: `tp` tensor-parallel ranks, `pp` pipeline stages.

    The vocabulary is padded to a multiple of `vocab_multiple * tp` rows.
    """

    tp: int = 1
    pp: int = 1
    vocab_multiple: int = 1

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "vocab_multiple"):
            if getattr(self, name) < 1:
                raise LayoutError(f"Topology.{name} is {getattr(self, name)}; it must be 1 or more")

    def coords(self) -> list[Coord]:
        """Every coordinate, stages outermost."""
        return [Coord(tp, pp) for pp in range(self.pp) for tp in range(self.tp)]

    def layers_of(self, pp: int, num_layers: int) -> range:
        """The layers (numbered in the whole model) of stage `pp`. Raises LayoutError when they do not split evenly."""
        if num_layers % self.pp:
            even = [n for n in range(1, num_layers + 1) if num_layers % n == 0]
            raise LayoutError(
                f"pipeline_model_parallel_size is {self.pp}, but {num_layers} layers do not split evenly over {self.pp} stages "
                f"(uneven stages: not in this version); use one of {even}"
            )
        size = num_layers // self.pp
        return range(pp * size, (pp + 1) * size)
