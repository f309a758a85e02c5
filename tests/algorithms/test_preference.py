"""Preference losses and Bradley-Terry: formulas written out plainly, gradients, pairs, refusals (reference values: test_vectors)."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from rlmca.algorithms import PreferenceLoss, PreferenceOptions, bradley_terry, preference_loss
from rlmca.types import Batch
from tests.algorithms.pieces import PREFERENCES, random_batch, run


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x))


def plain(kind: str, c: float, r: float, rc: float, rr: float, nc: int, nr: int, o: PreferenceOptions) -> float:
    """One pair in plain Python: summed log-probabilities of chosen, rejected, their references, and lengths."""
    mc, mr, d = c / nc, r / nr, (c - r) - (rc - rr)
    if kind == "sigmoid":
        value = -(1 - o.label_smoothing) * log_sigmoid(o.beta * d) - o.label_smoothing * log_sigmoid(-o.beta * d)
    elif kind == "hinge":
        value = max(0.0, 1 - o.beta * d)
    elif kind == "ipo":
        value = ((mc - mr) - (rc / nc - rr / nr) - 1 / (2 * o.beta)) ** 2
    elif kind == "simpo":
        value = -log_sigmoid(o.beta * (mc - mr) - (o.simpo_gamma or 0.0))
    else:
        odds = [math.exp(m) / (1 - math.exp(m)) for m in (mc, mr)]
        value = -mc - o.beta * log_sigmoid(math.log(odds[0] / odds[1]))
    return value - o.ftx * mc


def mean_over_pairs(batch: Batch, logp: Tensor, o: PreferenceOptions) -> float:
    found = []
    for c in range(0, len(batch), 2):
        m, n = batch.mask_BT[c], batch.mask_BT[c + 1]
        if m.any() and n.any():
            assert batch.ref_logp_BT is not None
            ref = batch.ref_logp_BT
            sums = [float(x.sum()) for x in (logp[c][m], logp[c + 1][n], ref[c][m], ref[c + 1][n])]
            found.append(plain(o.kind, *sums, int(m.sum()), int(n.sum()), o))
    return sum(found) / len(found)


@pytest.mark.parametrize("kind", PREFERENCES)
def test_from_tokens_as_the_formula_says_with_its_gradient(kind: Any) -> None:
    o = PreferenceOptions(kind=kind, **PREFERENCES[kind])
    batch, logp, entropy = random_batch(8, 5, 11)
    total, (grad, _), metrics = run(PreferenceLoss(o), [(batch, logp, entropy)])
    assert float(total) == pytest.approx(mean_over_pairs(batch, logp, o), abs=1e-12) and metrics["loss"] == pytest.approx(float(total))
    for at in batch.mask_BT.nonzero().tolist():
        step = torch.zeros_like(logp)
        step[at[0], at[1]] = 1e-6
        slope = (mean_over_pairs(batch, logp + step, o) - mean_over_pairs(batch, logp - step, o)) / 2e-6
        assert float(grad[at[0], at[1]]) == pytest.approx(slope, abs=1e-8)
    assert not grad[~batch.mask_BT].any()


def test_rows_of_a_pair_are_found_by_their_unit_wherever_they_stand() -> None:
    batch, logp, entropy = random_batch(6, 5, 12)
    loss = PreferenceLoss(PreferenceOptions())
    want = run(loss, [(batch, logp, entropy)])
    rows = torch.tensor([4, 0, 2, 1, 5, 3])  # the chosen one still before its partner
    got = run(loss, [(batch.rows(rows), logp[rows], entropy[rows])])
    torch.testing.assert_close(got[0], want[0])
    torch.testing.assert_close(got[1][0], want[1][0][rows])


def test_metrics_by_hand() -> None:
    """Three pairs: right, wrong, tied; with beta .5 and a reference of -1 a token."""
    mask = torch.tensor([[1, 1], [1, 0]] * 3).bool()
    logp = torch.tensor([[-0.5, -0.5], [-3.0, 0.0], [-2.0, -2.0], [-0.5, 0.0], [-1.0, -1.0], [-1.0, 0.0]], dtype=torch.float64)
    batch = Batch(torch.zeros(6, 2, dtype=torch.int64), mask.sum(1), mask, torch.arange(6) // 2, ref_logp_BT=torch.full((6, 2), -1.0))
    _, _, m = run(PreferenceLoss(PreferenceOptions(beta=0.5, ftx=1.0)), [(batch, logp, logp)])
    want = {
        "rewards/chosen": (0.5 - 1.0 + 0.0) / 3, "rewards/rejected": (-1.0 + 0.25 + 0.0) / 3, "rewards/margins": (1.5 - 1.25) / 3,
        "rewards/accuracies": 1 / 3, "logps/chosen": -7 / 3, "logps/rejected": -4.5 / 3, "sft_loss": 3.5 / 3,
    }  # fmt: skip
    assert {name: m[name] for name in want} == pytest.approx(want) and "odds_ratio_loss" not in m
    _, _, m = run(PreferenceLoss(PreferenceOptions(kind="orpo", beta=0.5)), [(batch.replace(ref_logp_BT=None), logp, logp)])
    assert m["loss"] == pytest.approx(m["sft_loss"] + 0.5 * m["odds_ratio_loss"]) and m["rewards/chosen"] == pytest.approx(-3.5 / 6)


def test_rows_that_do_not_pair_up_are_refused() -> None:
    batch, logp, entropy = random_batch(4, 5, 2)  # row 2 is dead
    loss = PreferenceLoss(PreferenceOptions())
    with pytest.raises(ValueError, match="Batch.unit_B is missing"):
        loss.counts(batch.replace(unit_B=None))
    with pytest.raises(ValueError, match="unit 0 has 1 rows in a micro-batch"):
        loss.counts(batch.rows([1, 2, 3]).replace(mask_BT=torch.ones(3, 5, dtype=torch.bool)))
    with pytest.raises(ValueError, match="unit 3 has 3 rows"):
        loss.counts(batch.rows([0, 1, 3]).replace(unit_B=torch.tensor([3, 3, 3])))
    with pytest.raises(ValueError, match="Batch.ref_logp_BT is missing: pref_loss sigmoid"):
        run(loss, [(batch.replace(ref_logp_BT=None), logp, entropy)])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_arithmetic_is_at_least_fp32_and_orpo_survives_certainty(dtype: torch.dtype) -> None:
    zero = torch.zeros(2, dtype=dtype, requires_grad=True)
    loss, _ = preference_loss(zero, zero - 4, kind="orpo", chosen_len=torch.ones(2), rejected_len=torch.ones(2))
    (grad,) = torch.autograd.grad(loss, zero)
    assert loss.dtype == torch.float32 and loss.isfinite() and grad.isfinite().all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "kto_pair"}, "'kto_pair' is unknown; write one of sigmoid, hinge, ipo, orpo, simpo"),
        ({"beta": 0.0}, "pref_beta 0.0 must be positive"),
        ({"kind": "ipo", "label_smoothing": 0.1}, "dpo_label_smoothing has no meaning with pref_loss ipo"),
        ({"label_smoothing": 0.5}, r"must lie in \[0, 0.5\)"),
        ({"simpo_gamma": 0.5}, "simpo_gamma has no meaning with pref_loss sigmoid"),
        ({"kind": "simpo", "simpo_gamma": -1.0}, "must not be negative"),
        ({"ftx": -0.1}, "pref_ftx -0.1"),
    ],
)
def test_contradictions_are_refused_when_built(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PreferenceOptions(**options)


def test_what_is_missing_is_named() -> None:
    two = torch.zeros(2)
    with pytest.raises(ValueError, match="hinge needs ref_chosen"):
        preference_loss(two, two, kind="hinge")
    with pytest.raises(ValueError, match="simpo needs chosen_len"):
        preference_loss(two, two, kind="simpo")
    with pytest.raises(ValueError, match="pref_ftx needs chosen_len"):
        preference_loss(two, two, two, two, ftx=0.1)
    with pytest.raises(ValueError, match="do not pair up"):
        preference_loss(two, torch.zeros(3), two, two)
    with pytest.raises(ValueError, match="do not pair up"):
        bradley_terry(two, torch.zeros(3))


def test_bradley_terry_figures() -> None:
    for gap, want in ((1.0, 0.313), (4.0, 0.018), (-1.0, 1.313)):
        loss, accuracy = bradley_terry(torch.tensor([gap]), torch.tensor([0.0]))
        assert float(loss) == pytest.approx(want, abs=5e-4) and float(accuracy) == float(gap > 0)
    chosen, rejected = torch.tensor([1.0, 2.0, 0.0, 5.0, 1.0]), torch.tensor([0.0, 3.0, -1.0, 4.0, 2.0])
    assert float(bradley_terry(chosen, rejected)[1]) == pytest.approx(1 - float(bradley_terry(rejected, chosen)[1]))
    assert float(bradley_terry(chosen, chosen)[1]) == 0.0  # ties are not ranked right
    assert [float(x) for x in bradley_terry(chosen[:0], chosen[:0])] == [0.0, 0.0]
    loss, _ = bradley_terry(torch.tensor([-300.0], dtype=torch.float16), torch.tensor([300.0], dtype=torch.float16))
    assert float(loss) == pytest.approx(600.0)
