"""Cutting a batch: into the shares of data-parallel ranks, and a share into micro-batches that every schedule accepts.

Nothing here changes a number: rows are only put side by side, or, packed, behind each other with borders between them.

Shape legend: B rows, T tokens of the padded row (of the packed one: of all its sequences), N targets of a micro-batch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlmca.parallel.balance import RowCost, fitting_partition, partition
from rlmca.parallel.groups import Parallel
from rlmca.types import Batch


@dataclass(frozen=True)
class Cutting:
    """What decides the cuts."""

    rows: int
    """Most rows (with `Batch.unit_B`: most units) of a micro-batch; without meaning once `max_tokens` is given."""
    max_tokens: int | None = None
    """Most tokens of a micro-batch, padding included."""
    packed: bool = False
    """Rows behind each other instead of padded to the longest."""
    cost: RowCost = RowCost()
    """What is balanced over ranks and micro-batches."""
    sequence_parallel: bool = False
    uniform: bool = False
    """All micro-batches of all data-parallel ranks have one shape: what some exchanges of tokens between them need."""

    @property
    def balanced(self) -> bool:
        """Whether rows are dealt out by what they cost; otherwise by their number."""
        return self.packed or self.max_tokens is not None


@dataclass(frozen=True)
class MicroBatch:
    """Rows of a share, as losses see them and as a model does."""

    rows: Batch
    """Padded; rows and columns of zero weight may have been added at the end."""
    numbers: list[int]
    """Which rows of the share these are."""
    ids_BT: Tensor
    """What the model reads: the padded rows, or one row with all sequences."""
    mask_BT: Tensor
    """The targets in it; their row-major order is that of `rows.mask_BT`."""
    borders: tuple[int, ...] | None
    """Packed: where each sequence begins in the one row, and where the row ends."""

    def sequence_BT(self) -> Tensor:
        """Shape of `ids_BT`: the number in `rows` of the row that a token belongs to, -1 for padding and rows of zero weight."""
        number = torch.arange(len(self.numbers), device=self.ids_BT.device)
        length = self.rows.length_B[: len(self.numbers)]
        sequence_BT = torch.full_like(self.ids_BT, -1)
        if self.borders is None:
            real_BT = torch.arange(self.ids_BT.shape[1], device=self.ids_BT.device) < length[:, None]
            sequence_BT[: len(number)] = torch.where(real_BT, number[:, None], -1)
            return sequence_BT
        begin = torch.tensor(self.borders[: len(number)], dtype=torch.int64, device=self.ids_BT.device)
        place = torch.arange(int(length.sum()), device=self.ids_BT.device) + (begin - (length.cumsum(0) - length)).repeat_interleave(length)
        sequence_BT[0, place] = number.repeat_interleave(length)
        return sequence_BT


def shares(batch: Batch, cutting: Cutting, parallel: Parallel) -> list[list[int]]:
    """Row numbers of every data-parallel rank's share of a batch, each ascending and none empty.

    ValueError when there are fewer units than ranks: that cannot be a batch.
    """
    units = _units(batch)
    if len(units) < parallel.dp_size:
        raise ValueError(f"a batch of {len(units)} rows cannot be shared by {parallel.dp_size} data-parallel ranks")
    if cutting.balanced:
        parts = partition(_costs(batch, units, cutting.cost), parallel.dp_size)
    else:
        parts = [list(range(rank, len(units), parallel.dp_size)) for rank in range(parallel.dp_size)]
    return [[row for unit in part for row in units[unit]] for part in parts]


def micro_batches(batch: Batch, cutting: Cutting, parallel: Parallel) -> list[MicroBatch]:
    """This rank's share of a batch in pieces, as many on every data-parallel rank.

    A rank that needs fewer than another gets pieces of zero weight, so that collectives match; they change neither
    loss nor gradient. Pipeline stages exchange tensors of one fixed shape: with several stages every piece is as large
    as the largest, otherwise each is as wide as its own rows need (but see `Cutting.uniform`). Context parallelism splits
    a sequence into 2 CP chunks, sequence parallelism what a rank then holds of a row into TP.
    """
    context = 2 * parallel.cp_size if parallel.cp_size > 1 else 1
    multiple = (parallel.tp_size if cutting.sequence_parallel else 1) * context
    lengths = [_round_up(n, context if cutting.packed else multiple) for n in _places(batch)]
    units = _units(batch)
    fixed, agreed = parallel.pp_size > 1 or cutting.uniform, parallel if cutting.uniform else None
    widest = _largest([max(lengths, default=multiple)], agreed) if fixed else 0
    own = _cut(batch, units, lengths, cutting, widest)
    number = int(parallel.dp_max(torch.tensor([len(own)], device=parallel.device)).item())
    if parallel.vpp_size > 1:  # an interleaved schedule goes through its chunks with as many micro-batches as stages at a time
        number = _round_up(number, parallel.pp_size)
    own = _split_further(own, _costs(batch, units, cutting.cost), number)
    rows = [[row for unit in piece for row in units[unit]] for piece in own]
    if cutting.packed:
        width = _largest([_round_up(sum(lengths[r] for r in piece), multiple) for piece in rows], agreed) if fixed else 0
        return [_pack(batch, piece, [lengths[r] for r in piece], multiple, width, parallel) for piece in rows]
    width = _largest([max((lengths[r] for r in piece), default=multiple) for piece in rows], agreed) if fixed else 0
    height = _largest([len(piece) for piece in rows], agreed) if fixed else 1
    return [_pad(batch, piece, max(width, *(lengths[r] for r in piece), multiple), max(height, len(piece)), parallel) for piece in rows]


def _cut(batch: Batch, units: Sequence[list[int]], lengths: Sequence[int], cutting: Cutting, width: int) -> list[list[int]]:
    """Unit numbers of each micro-batch, in the order of their first units; padded rows become at least `width` wide."""
    if cutting.max_tokens is None:
        return [list(range(i, min(i + cutting.rows, len(units)))) for i in range(0, len(units), cutting.rows)]
    if not cutting.packed:
        return sorted(_by_length(units, lengths, cutting.max_tokens, width))
    sizes = [sum(lengths[row] for row in unit) for unit in units]
    return sorted(piece for piece in fitting_partition(_costs(batch, units, cutting.cost), sizes, cutting.max_tokens) if piece)


def _by_length(units: Sequence[list[int]], lengths: Sequence[int], max_tokens: int, width: int) -> list[list[int]]:
    """Units of about equal length together, rows x longest within `max_tokens`; a unit beyond that is by itself."""
    pieces: list[list[int]] = []
    rows = longest = 0
    for unit in sorted(range(len(units)), key=lambda u: (-max(lengths[row] for row in units[u]), u)):
        if not pieces or (rows + len(units[unit])) * longest > max_tokens:
            pieces.append([])
            rows, longest = 0, max(width, *(lengths[row] for row in units[unit]))  # the first of a piece is its longest
        pieces[-1].append(unit)
        rows += len(units[unit])
    return [sorted(piece) for piece in pieces]


def _split_further(pieces: list[list[int]], costs: Sequence[float], number: int) -> list[list[int]]:
    """`number` pieces: the dearest that can be split is, again and again; then empty ones follow. What fitted still fits."""
    pieces = list(pieces)
    while len(pieces) < number and (several := [piece for piece in pieces if len(piece) > 1]):
        dearest = max(several, key=lambda piece: sum(costs[unit] for unit in piece))
        pieces.remove(dearest)
        pieces += [[dearest[i] for i in half] for half in partition([costs[unit] for unit in dearest], 2)]
    return sorted(pieces) + [[] for _ in range(number - len(pieces))]


def _pad(batch: Batch, piece: list[int], width: int, height: int, parallel: Parallel) -> MicroBatch:
    rows = batch.rows(piece).pad_to(height, width).to(parallel.device)
    return MicroBatch(rows, piece, rows.ids_BT, rows.mask_BT, None)


def _pack(batch: Batch, piece: list[int], lengths: list[int], multiple: int, width: int, parallel: Parallel) -> MicroBatch:
    """Each sequence with its padding behind the one before; what is left of the row is a sequence of its own."""
    borders = list(itertools.accumulate(lengths, initial=0))
    end = max(width, _round_up(borders[-1], multiple), multiple)
    rows = batch.rows(piece).pad_to(max(1, len(piece)), max(lengths, default=1)).to(parallel.device)
    ids_1T, mask_1T = rows.ids_BT.new_zeros(1, end), rows.mask_BT.new_zeros(1, end)
    for number, (begin, stop) in enumerate(itertools.pairwise(borders)):
        ids_1T[0, begin:stop] = rows.ids_BT[number, : stop - begin]
        mask_1T[0, begin:stop] = rows.mask_BT[number, : stop - begin]
    if end > borders[-1]:
        borders.append(end)
    return MicroBatch(rows, piece, ids_1T, mask_1T, tuple(borders))


def _units(batch: Batch) -> list[list[int]]:
    """Row numbers that must stay together, in the order of their first rows."""
    if batch.unit_B is None:
        return [[row] for row in range(len(batch))]
    found: dict[int, list[int]] = {}
    for row, unit in enumerate(batch.unit_B.tolist()):
        found.setdefault(unit, []).append(row)
    return list(found.values())


def _places(batch: Batch) -> list[int]:
    """Tokens that each row takes; one where it has none: what fills up ranks must not leave one of them without a row."""
    return batch.length_B.clamp(min=1).tolist()


def _costs(batch: Batch, units: Sequence[list[int]], cost: RowCost) -> list[float]:
    lengths = _places(batch)
    return [sum(cost(lengths[row]) for row in unit) for unit in units]


def _largest(numbers: Sequence[int], over: Parallel | None) -> int:
    """The largest number, of all data-parallel ranks where these are given."""
    top = max(numbers)
    return top if over is None else int(over.dp_max(torch.tensor([top], device=over.device)).item())


def _round_up(number: int, multiple: int) -> int:
    return math.ceil(number / multiple) * multiple
