"""The arithmetic of routers by itself: what their losses sum up, and which tokens a capacity keeps."""

from __future__ import annotations

import pytest
import torch

from rlmca.engines.microbatch import Cutting, micro_batches
from rlmca.models.router import balance_loss, within_capacity
from rlmca.parallel.groups import Parallel
from tests.helpers.engine import random_batch
from tests.helpers.router_losses import balance


def test_the_loss_of_groups_is_the_sum_of_each_by_itself() -> None:
    """Padding, a token order that mixes groups, and groups without tokens change nothing."""
    draw = torch.Generator().manual_seed(0)
    logits_XE = torch.randn(30, 8, generator=draw, dtype=torch.float64, requires_grad=True)
    group_X = torch.randint(-1, 4, (30,), generator=draw)
    group_X[group_X == 2] = 0
    ours = balance_loss(torch.softmax(logits_XE, -1), group_X, groups=6, topk=3)
    theirs = sum((balance(torch.softmax(logits_XE[group_X == g], -1), 3) for g in (0, 1, 3)), torch.zeros((), dtype=torch.float64))
    torch.testing.assert_close(ours, theirs)
    gradients = [torch.autograd.grad(value, logits_XE)[0] for value in (ours, theirs)]
    torch.testing.assert_close(*gradients)
    assert not gradients[0][group_X == -1].any() and gradients[0][group_X >= 0].abs().sum() > 0


def test_even_use_is_the_least() -> None:
    even, one = torch.full((16, 4), 0.25, dtype=torch.float64), torch.tensor([[0.97, 0.01, 0.01, 0.01]]).double().repeat(16, 1)
    group_X = torch.zeros(16, dtype=torch.int64)
    assert balance_loss(even, group_X, groups=1, topk=1).item() == pytest.approx(1.0)
    assert balance_loss(one, group_X, groups=1, topk=1).item() == pytest.approx(4 * 0.97)


def test_micro_batches_without_rows_are_zero() -> None:
    score_XE = torch.rand(5, 4, requires_grad=True)
    loss = balance_loss(score_XE, torch.full((5,), -1), groups=3, topk=2)
    loss.backward()
    assert loss.item() == 0 and score_XE.grad is not None and not score_XE.grad.any()


WEIGHT = torch.tensor([[0.9, 0.0, 0.0], [0.0, 0.2, 0.0], [0.0, 0.5, 0.4], [0.6, 0.4, 0.0]])


@pytest.mark.parametrize(
    ("by_weight", "fill", "kept"),
    [
        (True, False, [[1, 0, 0], [0, 0, 0], [0, 1, 1], [1, 1, 0]]),
        (False, False, [[1, 0, 0], [0, 1, 0], [0, 1, 1], [1, 0, 0]]),
        (True, True, [[1, 0, 1], [0, 0, 0], [0, 1, 1], [1, 1, 0]]),
        (False, True, [[1, 0, 1], [0, 1, 0], [0, 1, 1], [1, 0, 0]]),
    ],
)
def test_an_expert_keeps_the_heaviest_or_the_first(by_weight: bool, fill: bool, kept: list[list[int]]) -> None:
    weight_XE, chosen_XE = within_capacity(WEIGHT, WEIGHT > 0, 2, by_weight=by_weight, fill=fill)
    assert chosen_XE.int().tolist() == kept
    assert torch.equal(weight_XE, WEIGHT * torch.tensor(kept))


def test_a_capacity_beyond_all_tokens_drops_nothing() -> None:
    weight_XE, chosen_XE = within_capacity(WEIGHT, WEIGHT > 0, 7, by_weight=True, fill=False)
    assert torch.equal(weight_XE, WEIGHT) and torch.equal(chosen_XE, WEIGHT > 0)


@pytest.mark.parametrize("packed", [False, True])
def test_every_token_of_a_micro_batch_has_the_number_of_its_row(packed: bool) -> None:
    batch = random_batch()
    for piece in micro_batches(batch, Cutting(rows=3, packed=packed), Parallel.alone()):
        sequence_BT = piece.sequence_BT()
        assert sequence_BT.shape == piece.ids_BT.shape
        for number, row in enumerate(piece.numbers):
            own = batch.ids_BT[row, : int(batch.length_B[row])]
            assert torch.equal(piece.ids_BT[sequence_BT == number], own)
        assert int((sequence_BT >= 0).sum()) == int(batch.length_B[piece.numbers].sum())
    empty = micro_batches(batch.rows([0]), Cutting(rows=3, packed=packed), Parallel.alone())[0]
    assert (empty.sequence_BT() >= 0).sum() == batch.length_B[0]
