"""Cuts of a batch: nothing lost or doubled, shapes that schedules accept, pairs kept together."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlmca.engines.microbatch import Cutting, micro_batches, shares
from rlmca.engines.step import gathered_outputs
from rlmca.parallel.balance import RowCost
from rlmca.parallel.groups import Parallel
from rlmca.types import Batch, batch_of_examples
from tests.helpers.engine import random_batch

ALONE = Parallel(rank=0, world_size=1, device=torch.device("cpu"))


@dataclass(frozen=True)
class Place(Parallel):
    """A rank of a larger world, one of whose peers needs `peer` micro-batches; these tests have one process."""

    peer: int = 0

    def dp_max(self, values: torch.Tensor) -> torch.Tensor:
        return values.clamp(min=self.peer)


def place(**sizes: int) -> Parallel:
    world = sizes.get("tp_size", 1) * sizes.get("cp_size", 1) * sizes.get("pp_size", 1) * sizes.pop("dp_size", 1)
    return Place(rank=0, world_size=world, device=torch.device("cpu"), **sizes)


def with_pairs(batch: Batch) -> Batch:
    """Rows i and i + half belong together."""
    return batch.replace(unit_B=torch.arange(len(batch)) % (len(batch) // 2))


@settings(deadline=None)
@given(st.integers(0, 10**6))
def test_any_cut_holds_every_token_once(seed: int) -> None:
    draw = random.Random(seed)
    batch = random_batch(rows=draw.randint(1, 9), seed=seed)
    if len(batch) % 2 == 0 and draw.random() < 0.5:
        batch = with_pairs(batch)
    tokens = draw.choice([None, draw.randint(1, 60)])
    cutting = Cutting(
        rows=draw.randint(1, 4),
        max_tokens=tokens,
        packed=draw.random() < 0.6,
        cost=RowCost(draw.random()),
        sequence_parallel=draw.random() < 0.5,
    )
    sizes = {"tp_size": draw.choice([1, 2]), "cp_size": draw.choice([1, 2, 3]), "pp_size": draw.choice([1, 2])}
    parallel = place(peer=draw.randint(0, 8), vpp_size=draw.choice([1, 2]), **sizes)
    if parallel.pp_size == 1:
        parallel = replace(parallel, vpp_size=1)
    pieces = micro_batches(batch, cutting, parallel)
    assert sorted(sum((piece.numbers for piece in pieces), [])) == list(range(len(batch)))
    context = 2 * parallel.cp_size if parallel.cp_size > 1 else 1
    multiple = context * (parallel.tp_size if cutting.sequence_parallel else 1)
    alone = len(micro_batches(batch, cutting, replace(parallel, peer=0, vpp_size=1)))
    expected = max(alone, parallel.peer)
    assert len(pieces) == (math.ceil(expected / parallel.pp_size) * parallel.pp_size if parallel.vpp_size > 1 else expected)
    if parallel.pp_size > 1:
        assert len({piece.ids_BT.shape for piece in pieces}) == 1
    targets = []
    for piece in pieces:
        assert piece.ids_BT.shape == piece.mask_BT.shape and piece.ids_BT.shape[1] % multiple == 0
        assert (piece.borders is not None) == cutting.packed
        assert torch.equal(piece.ids_BT[piece.mask_BT], piece.rows.ids_BT[piece.rows.mask_BT]), "same targets in the same order"
        if piece.borders is not None:
            assert piece.borders[0] == 0 and piece.borders[-1] == piece.ids_BT.shape[1]
            for number, (row, begin, end) in enumerate(zip(piece.numbers, piece.borders, piece.borders[1:], strict=False)):
                real = int(batch.length_B[row])
                assert (end - begin) % context == 0 and end - begin >= real
                assert torch.equal(piece.ids_BT[0, begin : begin + real], batch.ids_BT[row, :real]), number
                assert torch.equal(piece.mask_BT[0, begin : begin + real], batch.mask_BT[row, :real])
        elif tokens is not None and len(piece.numbers) > 1 and batch.unit_B is None:
            assert piece.ids_BT.numel() <= tokens
        if batch.unit_B is not None:
            for row in piece.numbers:
                assert (row + len(batch) // 2) % len(batch) in piece.numbers, "pairs stay together"
        targets.append(torch.stack([piece.rows.ids_BT[piece.rows.mask_BT].double()] * 2))
    back_2BT = gathered_outputs(targets, pieces, batch.ids_BT.shape, torch.float64)
    assert torch.equal(back_2BT[0], torch.where(batch.mask_BT, batch.ids_BT, 0).double()), "results come back in the batch's own order"


@pytest.mark.parametrize("balanced", [False, True])
@pytest.mark.parametrize("pairs", [False, True])
def test_shares_hold_every_row_once_and_pairs_together(pairs: bool, balanced: bool) -> None:
    batch = random_batch(rows=10)
    batch = with_pairs(batch) if pairs else batch
    parts = shares(batch, Cutting(rows=1, packed=balanced), place(dp_size=3))
    assert sorted(sum(parts, [])) == list(range(10)) and all(parts)
    for part in parts if pairs else []:
        assert all((row + 5) % 10 in part for row in part)
    if balanced and not pairs:
        loads = [int(batch.length_B[part].sum()) for part in parts]
        assert max(loads) - min(loads) <= int(batch.length_B.max())
    with pytest.raises(ValueError, match="2 rows cannot be shared by 3 data-parallel ranks"):
        shares(random_batch(rows=2), Cutting(rows=1), place(dp_size=3))


@settings(deadline=None)
@given(st.integers(0, 10**6))
def test_rows_without_a_token_fill_every_rank_and_no_sequence(seed: int) -> None:
    """A batch grown to the number of ranks: each has a row, packs keep their borders, routers see no token of what was added."""
    draw = random.Random(seed)
    rows, ranks = draw.randint(1, 3), draw.choice([2, 4, 7])
    batch = random_batch(rows=rows, seed=seed)
    grown = batch.pad_to(max(rows, ranks), batch.ids_BT.shape[1])
    cutting = Cutting(
        rows=draw.randint(1, 4), max_tokens=draw.choice([None, 20]), packed=draw.random() < 0.5, cost=RowCost(draw.choice([0.0, 0.1]))
    )
    parallel = place(dp_size=ranks, cp_size=draw.choice([1, 2]))
    parts = shares(grown, cutting, parallel)
    assert sorted(sum(parts, [])) == list(range(len(grown))) and all(parts)
    seen = 0
    for part in parts:
        for piece in micro_batches(grown.rows(part), cutting, parallel):
            sequence_BT = piece.sequence_BT()
            for number, row in enumerate(part[r] for r in piece.numbers):
                assert torch.equal(piece.ids_BT[sequence_BT == number], grown.ids_BT[row, : int(grown.length_B[row])])
            seen += int((sequence_BT >= 0).sum())
            if piece.borders is not None:
                assert all(a < b for a, b in itertools.pairwise(piece.borders)), "kernels take no empty sequence"
    assert seen == batch.num_tokens


def test_a_short_sequence_is_padded_to_what_ranks_can_split() -> None:
    """CP8, TP2 with sequence parallelism: three tokens become 32, of which 29 are no targets and are never counted."""
    batch = random_batch(rows=1)
    batch = Batch(ids_BT=batch.ids_BT[:, :3], length_B=torch.tensor([3]), mask_BT=torch.tensor([[False, True, True]]))
    for packed in (False, True):
        (piece,) = micro_batches(batch, Cutting(rows=1, packed=packed, sequence_parallel=True), place(tp_size=2, cp_size=8))
        assert piece.ids_BT.shape == (1, 32) and int(piece.mask_BT.sum()) == 2
        assert int(piece.rows.length_B.sum()) == 3, "token counts leave pads out"


def test_one_long_row_does_not_make_every_padded_piece_of_a_pipeline_large() -> None:
    """Stages exchange pieces of one shape: as wide as the longest row, and then only as high as the budget allows."""
    lengths = [512, 400] + [16] * 32 + [60] * 8
    batch = batch_of_examples([[1] * n for n in lengths], [[True] * n for n in lengths])
    pieces = micro_batches(batch, Cutting(rows=1, max_tokens=1024), place(pp_size=2))
    assert {piece.ids_BT.shape for piece in pieces} == {(2, 512)} and len(pieces) == 21


def test_a_second_cut_never_makes_more_pieces_than_were_agreed() -> None:
    """Bins of equal cost do not always fit where fewer did: rows for which a new partition into one more bin overflows."""
    for seed in range(300):
        draw = random.Random(seed)
        capacity = draw.choice([128, 256, 512])
        lengths = [max(2, min(capacity, int(draw.lognormvariate(draw.uniform(2, 5), 1.2)))) for _ in range(draw.randint(8, 30))]
        batch = batch_of_examples([[1] * n for n in lengths], [[True] * n for n in lengths])
        cutting = Cutting(rows=1, max_tokens=capacity, packed=True, cost=RowCost(0.05))
        own = len(micro_batches(batch, cutting, ALONE))
        for more in range(3):
            pieces = micro_batches(batch, cutting, place(peer=own + more))
            assert len(pieces) == own + more, seed
            assert all(piece.ids_BT.numel() <= capacity for piece in pieces)


def test_a_unit_that_exceeds_the_budget_is_by_itself() -> None:
    batch = random_batch(rows=6)
    for packed in (False, True):
        pieces = micro_batches(batch, Cutting(rows=1, max_tokens=1, packed=packed), ALONE)
        assert [len(piece.numbers) for piece in pieces] == [1] * 6
