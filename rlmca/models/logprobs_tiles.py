"""How the head's product is cut into tiles: groups of tokens times blocks of this rank's vocabulary.

Shape legend: H hidden size, V rows of the head's weight on this rank (padding rows included), C of them in a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlmca.models.logprobs_passes import Passes


@dataclass(frozen=True)
class Tiles:
    """How the head's product is cut up: no more than a tile of logits is alive at any time."""

    tokens: int
    """Most tokens of a tile."""
    columns: int
    """Most vocabulary entries of a tile."""
    compile_from: int | None = 2**26
    """Logits (tokens times vocabulary of this rank) of a call from which on the elementwise passes are compiled; None: never.

    Without effect on CUDA where Triton makes kernels: they are taken for every size.
    """

    def __post_init__(self) -> None:
        if self.tokens < 1 or self.columns < 1:
            raise ValueError(f"a tile needs at least one token and one column, got {self.tokens} x {self.columns}")


def default_tiles(device: torch.device) -> Tiles:
    """On a CPU tiles that its caches hold; on an accelerator tiles whose products take longer than starting them."""
    return Tiles(tokens=1024, columns=2048) if device.type == "cpu" else Tiles(tokens=8192, columns=8192)


@dataclass(frozen=True)
class Head:
    """What a call is told besides its tensors, and the cutting of its product into tiles."""

    vocab_size: int
    temperature: float
    group: dist.ProcessGroup | None
    entropy: bool
    tiles: Tiles
    passes: Passes
    compute: torch.dtype

    @property
    def precise(self) -> torch.dtype:
        """The type of statistics, results and sums."""
        return torch.promote_types(self.compute, torch.float32)

    def divisor(self, device: torch.device) -> Tensor | None:
        """The temperature as passes take it."""
        return None if self.temperature == 1.0 else torch.tensor(self.temperature, dtype=self.precise, device=device)

    def first(self, weight_VH: Tensor) -> int:
        """Token id of the first row of this rank's weight."""
        return weight_VH.shape[0] * (dist.get_rank(self.group) if self.group is not None else 0)

    def real(self, weight_VH: Tensor) -> int:
        """How many of this rank's rows are no padding; they come first."""
        return min(max(self.vocab_size - self.first(weight_VH), 0), weight_VH.shape[0])

    def columns(self, weight_VH: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Blocks of these rows, with their weights in the compute type."""
        real = self.real(weight_VH)
        for start in range(0, real, self.tiles.columns):
            block = slice(start, min(start + self.tiles.columns, real))
            yield block, weight_VH[block].to(self.compute)

    def rows(self, count: int) -> list[slice]:
        """Groups of tokens."""
        return [slice(start, min(start + self.tiles.tokens, count)) for start in range(0, count, self.tiles.tokens)]

    def sum_over_group(self, values: Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        if self.group is not None and dist.get_world_size(self.group) > 1:
            dist.all_reduce(values, op=op, group=self.group)
