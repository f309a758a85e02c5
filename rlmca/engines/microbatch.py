"""Cutting a rank's share of a batch into micro-batches that every schedule accepts.

Shape legend: B rows, T tokens of the padded row.
"""

from __future__ import annotations

import math

import torch

from rlmca.parallel.groups import Parallel
from rlmca.types import Batch


def micro_batches(batch: Batch, rows: int, parallel: Parallel, *, sequence_parallel: bool) -> list[Batch]:
    """`batch` in consecutive pieces of at most `rows` rows, as many on every data-parallel rank.

    A rank with fewer rows than another gets pieces of zero weight, so that collectives match; they change neither
    loss nor gradient. Pipeline stages exchange tensors of one fixed shape: with several stages every piece is padded
    to the same [B, T], otherwise each is as wide as its own longest row. T is a multiple of 2 CP under context
    parallelism, times TP under sequence parallelism.
    """
    own = math.ceil(len(batch) / rows)
    number = int(parallel.dp_max(torch.tensor([own], device=parallel.device)).item())
    if parallel.vpp_size > 1:  # an interleaved schedule goes through its chunks with as many micro-batches as stages at a time
        number = math.ceil(number / parallel.pp_size) * parallel.pp_size
    multiple = (parallel.tp_size if sequence_parallel else 1) * (2 * parallel.cp_size if parallel.cp_size > 1 else 1)
    pieces = [batch.rows(slice(i * rows, (i + 1) * rows)) for i in range(number)]
    widest = max(_width(piece, multiple) for piece in pieces)
    fixed = parallel.pp_size > 1
    tallest = max(len(piece) for piece in pieces)
    return [
        piece.pad_to(tallest if fixed else max(1, len(piece)), widest if fixed else _width(piece, multiple)).to(parallel.device)
        for piece in pieces
    ]


def _width(batch: Batch, multiple: int) -> int:
    longest = int(batch.length_B.max()) if len(batch) else 1
    return math.ceil(longest / multiple) * multiple
