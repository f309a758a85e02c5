"""Kinds of policy loss and rollout corrections, by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from rlmca.algorithms import PolicyOptions, RolloutCorrection, policy_loss

OLD = torch.full((1, 4), -2.0, dtype=torch.float64)
LOGS = torch.tensor([[0.2, 0.2, 0.1, 0.1]], dtype=torch.float64)
ONES = torch.ones(1, 4)


def value_and_grad(logs: torch.Tensor, advantages: torch.Tensor, **options: Any) -> tuple[float, list[float], dict[str, torch.Tensor]]:
    leaf = (OLD + logs).requires_grad_()
    loss, metrics = policy_loss(leaf, OLD, advantages, ONES, **options)
    (grad,) = torch.autograd.grad(loss, leaf)
    return loss.item(), grad[0].tolist(), metrics


def test_gspo_ratio_of_the_sequence() -> None:
    """Log ratios .2, .2, .1, .1: every token has e^.15, and a quarter of its gradient."""
    s = math.exp(0.15)
    loss, grad, metrics = value_and_grad(LOGS, torch.ones(1), kind="gspo", clip_low=0.2, clip_high=0.2)
    assert loss == pytest.approx(-s) and grad == pytest.approx([-s / 4] * 4) and float(metrics["ratio"]) == pytest.approx(s)
    assert float(metrics["approx_kl"]) == pytest.approx((0.04 + 0.04 + 0.01 + 0.01) / 8)
    loss, grad, metrics = value_and_grad(LOGS, torch.ones(1), kind="gspo")
    assert loss == pytest.approx(-(1 + 4e-4)) and grad == [0.0] * 4 and float(metrics["clip_fraction_high"]) == 1.0
    loss, _, metrics = value_and_grad(-LOGS, -torch.ones(1), kind="gspo")
    assert loss == pytest.approx(1 - 3e-4) and float(metrics["clip_fraction_low"]) == 1.0


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_gspo_token_is_gspo_for_an_advantage_of_the_sequence_and_not_for_tokens_apart(sign: float) -> None:
    wide = {"clip_low": 0.5, "clip_high": 0.5}
    a, b = (value_and_grad(LOGS, torch.full((1,), sign), kind=kind, **wide) for kind in ("gspo", "gspo_token"))
    assert a[0] == pytest.approx(b[0], abs=1e-12) and a[1] == pytest.approx(b[1], abs=1e-12)
    apart = torch.tensor([[3.0, 0.0, 0.0, 1.0]]) * sign
    a, b = (value_and_grad(LOGS, apart, kind=kind, **wide) for kind in ("gspo", "gspo_token"))
    s = math.exp(0.15)
    assert a[0] == pytest.approx(b[0], abs=1e-12)
    assert a[1] == pytest.approx([-sign * s / 4] * 4) and b[1] == pytest.approx([-sign * s * x / 4 for x in (3, 0, 0, 1)])


def test_gspo_is_of_the_live_tokens_alone() -> None:
    leaf = OLD + torch.tensor([[0.3, 9.0, 0.1, -9.0]], dtype=torch.float64)
    _, metrics = policy_loss(leaf, OLD, torch.ones(1), torch.tensor([[1, 0, 1, 0]]), kind="gspo")
    assert float(metrics["ratio"]) == pytest.approx(math.exp(0.2))


def test_cispo_cap_and_floor() -> None:
    logs = torch.tensor([[math.log(8.0), math.log(0.25), 0.0, math.log(2.0)]], dtype=torch.float64)
    advantages = torch.tensor([[1.0, 1.0, -2.0, 1.0]])
    _, grad, metrics = value_and_grad(logs, advantages, kind="cispo", cispo_cap=5.0)
    assert grad == pytest.approx([-5 / 4, -0.25 / 4, 2 / 4, -2 / 4])
    assert [float(metrics[f"clip_fraction{side}"]) for side in ("", "_low", "_high")] == [0.25, 0.0, 0.25]
    _, grad, metrics = value_and_grad(logs, advantages, kind="cispo", clip_low=0.9, clip_high=0.5)
    assert grad == pytest.approx([-1.5 / 4, -0.25 / 4, 2 / 4, -1.5 / 4])
    _, grad, metrics = value_and_grad(logs, advantages, kind="cispo", cispo_cap=5.0, cispo_floor=0.5)
    assert grad == pytest.approx([-5 / 4, -0.5 / 4, 2 / 4, -2 / 4]) and float(metrics["clip_fraction_low"]) == 0.25


def test_reinforce_reads_no_baseline() -> None:
    loss, grad, metrics = value_and_grad(LOGS, torch.tensor([2.0]), kind="reinforce", loss_agg="token_mean")
    assert loss == pytest.approx(2 * 1.85) and grad == [-0.5] * 4 and float(metrics["clip_fraction"]) == 0.0


def test_default_bounds() -> None:
    bounds = {kind: PolicyOptions(kind=kind).bounds for kind in ("ppo", "grpo", "gspo", "gspo_token", "cispo", "reinforce")}  # type: ignore[arg-type]
    assert bounds["ppo"] == bounds["grpo"] == (0.8, 1.2) and bounds["gspo"] == bounds["gspo_token"] == (1 - 3e-4, 1 + 4e-4)
    assert bounds["cispo"] == (0.0, 1.2) and bounds["reinforce"] == (0.0, math.inf)
    assert PolicyOptions(kind="gspo", clip_low=0.0, clip_high=0.0).bounds == (1.0, 1.0)


RATIOS = [[3.0, 0.25, 1.0, 1.0], [1.5, 1.5, 1.0, 9.0]]


@pytest.mark.parametrize(
    ("kind", "want"),
    [
        ("tis", [[2.0, 0.25, 1.0, 1.0], [1.5, 1.5, 1.0, 0.0]]),
        ("icepop", [[0.0, 0.0, 1.0, 1.0], [1.5, 1.5, 1.0, 0.0]]),
        ("tis_sequence", [[0.75] * 4, [2.0, 2.0, 2.0, 0.0]]),
        ("icepop_sequence", [[0.75] * 4, [0.0] * 4]),
    ],
)
def test_corrections_weigh_the_policy_term_and_keep_the_denominators(kind: Any, want: list[list[float]]) -> None:
    """Products of the rows: .75 and, the last token being masked, 2.25. The KL term is not weighed."""
    old, mask = torch.full((2, 4), -2.0, dtype=torch.float64), torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])
    rollout = old - torch.tensor(RATIOS, dtype=torch.float64).log()
    leaf = old.clone().requires_grad_()
    loss, metrics = policy_loss(
        leaf, old, torch.ones(2), mask, kind="reinforce", rollout_logp=rollout, correction=RolloutCorrection(kind), loss_agg="token_mean"
    )
    (grad,) = torch.autograd.grad(loss, leaf)
    torch.testing.assert_close(grad, -torch.tensor(want, dtype=torch.float64) / 7)
    assert float(metrics["correction_weight"]) == pytest.approx(sum(map(sum, want)) / 7)
    weighed, _ = policy_loss(
        leaf, old, torch.zeros(2), mask, rollout_logp=rollout, correction=RolloutCorrection(kind), ref_logp=old - 0.5, kl_coef=1.0
    )
    plain, _ = policy_loss(leaf, old, torch.zeros(2), mask, ref_logp=old - 0.5, kl_coef=1.0)
    assert torch.equal(weighed, plain) and weighed > 0


def test_correction_metrics_are_there_without_a_correction_too() -> None:
    rollout = OLD - torch.tensor([[3.0, 0.25, 1.0, 1.0]], dtype=torch.float64).log()
    _, metrics = policy_loss(OLD, OLD, torch.ones(1), ONES, rollout_logp=rollout)
    want = {"correction_ratio": 5.25 / 4, "correction_ratio_max": 3.0, "correction_capped": 0.25, "correction_rejected": 0.5}
    assert {name: float(metrics[name]) for name in want} == pytest.approx(want) and "correction_weight" not in metrics


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "is"}, "'is' is unknown; write one of tis, icepop, tis_sequence, icepop_sequence"),
        ({"cap": 0.0}, "must be positive"),
        ({"range": (2.0, 0.5)}, "low < high"),
    ],
)
def test_corrections_refuse_what_means_nothing(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RolloutCorrection(**options)


def test_a_correction_by_its_name_has_the_default_bounds() -> None:
    rollout = OLD - 1.0  # ratio e, beyond both caps
    named, spelt = (
        policy_loss(OLD, OLD, torch.ones(1), ONES, rollout_logp=rollout, correction=correction)[0].item()
        for correction in ("tis", RolloutCorrection("tis", cap=2.0))
    )
    assert named == spelt == -2.0
    assert policy_loss(OLD, OLD, torch.ones(1), ONES, rollout_logp=rollout, correction="icepop")[0].item() == 0.0
