from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from rlmca.algorithms import PolicyLoss, PolicyOptions, RolloutCorrection, SftLoss, TokenOutputs, policy_loss
from rlmca.types import Batch
from tests.algorithms.pieces import random_batch, run


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_arithmetic_is_at_least_fp32(dtype: torch.dtype) -> None:
    batch, logp, _ = random_batch(4, 5, 0)
    logp = logp.to(dtype).requires_grad_()
    args = (batch.old_logp_BT.to(dtype), batch.advantage_BT.to(dtype), batch.mask_BT)  # type: ignore[union-attr]
    loss, _ = policy_loss(logp, *args, loss_agg="token_mean")
    loss.backward()
    want, _ = policy_loss(logp.detach().double(), args[0].double(), args[1].double(), args[2], loss_agg="token_mean")
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert logp.grad is not None and logp.grad.dtype == dtype and logp.grad.isfinite().all()
    assert loss.item() == pytest.approx(want.item(), abs=1e-6)


def test_first_update_has_ratio_exactly_one() -> None:
    batch, logp, entropy = random_batch(4, 5, 1, torch.float32)
    _, (grad, _), metrics = run(PolicyLoss(PolicyOptions(loss_agg="token_mean")), [(batch.replace(old_logp_BT=None), logp, entropy)])
    assert metrics["ratio"] == metrics["ratio_max"] == 1.0 and metrics["clip_fraction"] == metrics["approx_kl"] == 0.0
    live = batch.mask_BT
    torch.testing.assert_close(grad[live], -batch.advantage_BT[live] / live.sum())  # type: ignore[index]


def test_metrics_by_hand() -> None:
    logs = torch.tensor([[math.log(1.5), math.log(0.5), math.log(0.5), 0.0, 9.0]], dtype=torch.float64)
    old = torch.full((1, 5), -1.0, dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1, 1, 0]])
    entropy = torch.tensor([[1.0, 2.0, 3.0, 4.0, 99.0]], dtype=torch.float64)
    rollout = old + torch.tensor([[0.1, 0.0, -0.3, 0.0, 5.0]], dtype=torch.float64)
    advantages = torch.tensor([[1.0, -1.0, 1.0, 1.0, 1.0]])
    _, m = policy_loss(old + logs, old, advantages, mask, rollout_logp=rollout, entropy=entropy, ref_logp=old, loss_agg="token_mean")
    live = logs[0, :4]
    # gains: 1.2 (clipped high), -0.8 (clipped low), 0.5, 1.0
    want = {
        "loss": -1.9 / 4, "policy_loss": -1.9 / 4, "ratio": 3.5 / 4, "ratio_max": 1.5, "clip_fraction": 0.5, "clip_fraction_low": 0.25,
        "clip_fraction_high": 0.25, "approx_kl": float(live.square().mean()) / 2, "logp_gap": 0.1, "logp_gap_max": 0.3, "entropy": 2.5,
        "kl_k1": float(live.mean()), "kl": float((torch.exp(-live) + live - 1).mean()), "nonfinite": 0.0,
        "correction_ratio": (math.exp(-0.1) + math.exp(0.3) + 2) / 4, "correction_ratio_max": math.exp(0.3), "correction_capped": 0.0,
        "correction_rejected": 0.0,
    }  # fmt: skip
    assert {name: float(value) for name, value in m.items()} == pytest.approx(want)


def test_rollout_baseline_measures_the_gap_against_the_current_policy() -> None:
    batch, logp, entropy = random_batch(4, 5, 5)
    assert batch.rollout_logp_BT is not None
    _, _, m = run(PolicyLoss(PolicyOptions(old_logp="rollout")), [(batch, logp, entropy)])
    gap = (logp - batch.rollout_logp_BT)[batch.mask_BT]
    assert m["logp_gap"] == pytest.approx(float(gap.abs().mean())) and m["ratio"] == pytest.approx(float(gap.exp().mean()))


def test_entropy_bonus_and_sft_by_hand() -> None:
    entropy = torch.tensor([[1.0, 3.0]], requires_grad=True)
    zero = torch.zeros(1, 2)
    loss, _ = policy_loss(zero, zero, zero, torch.ones(1, 2), entropy=entropy, entropy_coef=0.5, loss_agg="token_mean")
    loss.backward()
    assert float(loss) == -1.0 and entropy.grad is not None and entropy.grad.tolist() == [[-0.25, -0.25]]
    batch = Batch(torch.zeros(1, 3, dtype=torch.int64), torch.tensor([3]), torch.tensor([[False, True, True]]))
    total, _, metrics = run(SftLoss(), [(batch, torch.tensor([[-9.0, -1.0, -3.0]]), zero)])
    assert float(total) == 2.0 and metrics == {"loss": 2.0}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kl_kind": "k1", "kl_coef": 0.1}, "gradient is not that of the KL"),
        ({"kl_kind": "abs"}, "write k2 or k3"),
        ({"loss_agg": "seq_mean_token_sum_norm"}, "needs a positive loss_agg_constant"),
        ({"loss_agg": "token_mean", "loss_agg_constant": 5.0}, "no meaning with loss_agg token_mean"),
        ({"loss_agg": "mean"}, "'mean' is unknown"),
        ({"kind": "gpo"}, "'gpo' is unknown; write one of ppo, grpo, cispo, gspo, gspo_token, reinforce"),
        ({"kind": "cispo", "clip_low": 0.2}, "clip_low 0.2 has no meaning with policy loss cispo; write cispo_floor"),
        ({"kind": "cispo", "cispo_cap": 5.0, "clip_high": 0.2}, "two upper bounds of one ratio"),
        ({"kind": "cispo", "cispo_cap": 0.0}, "must be positive"),
        (
            {"kind": "cispo", "cispo_cap": 1.5, "cispo_floor": 2.0},
            "cispo_floor 2.0 must lie between 0 and the upper bound of the ratio, 1.5",
        ),
        ({"kind": "cispo", "dual_clip": 3.0}, "dual_clip 3.0 has no meaning with policy loss cispo"),
        ({"kind": "gspo", "cispo_cap": 5.0}, "cispo_cap 5.0 has no meaning with policy loss gspo"),
        ({"kind": "reinforce", "clip_low": 0.2}, "clip_low 0.2 has no meaning with policy loss reinforce"),
        ({"kind": "reinforce", "clip_high": 0.2}, "clip_high 0.2 has no meaning with policy loss reinforce"),
        ({"kind": "reinforce", "dual_clip": 3.0}, "dual_clip 3.0 has no meaning with policy loss reinforce"),
        ({"kind": "reinforce", "kl_coef": 0.1}, "put the KL into the reward or write 0"),
        ({"old_logp": "rollout", "correction": RolloutCorrection()}, "rollout correction tis needs old_logp: trainer"),
        ({"dual_clip": 1.0}, "must exceed 1"),
        ({"clip_low": 1.5}, r"clip_low 1.5 must lie in \[0, 1\]"),
        ({"clip_high": -0.1}, "clip_high -0.1 must not be negative"),
        ({"clip_high": math.nan}, "clip_high nan"),
        ({"kl_coef": -1.0}, "kl_coef -1.0 must not be negative"),
        ({"temperature": 0.0}, "temperature 0.0 must be positive"),
        ({"old_logp": "engine"}, "write trainer or rollout"),
    ],
)
def test_contradictions_are_refused_when_built(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PolicyOptions(**options)


def test_what_the_batch_lacks_is_named() -> None:
    batch, logp, _ = random_batch(3, 4, 0)
    cases = [
        (PolicyOptions(kl_coef=0.1), batch.replace(ref_logp_BT=None), "Batch.ref_logp_BT is missing: kl_coef is 0.1"),
        (PolicyOptions(entropy_coef=0.1), batch, "TokenOutputs.entropy_BT is missing"),
        (PolicyOptions(), batch.replace(advantage_BT=None), "Batch.advantage_BT is missing"),
        (PolicyOptions(correction=RolloutCorrection()), batch.replace(rollout_logp_BT=None), "rollout correction tis compares with it"),
        (PolicyOptions(old_logp="rollout"), batch.replace(rollout_logp_BT=None), "Batch.rollout_logp_BT is missing"),
    ]
    for options, given_batch, message in cases:
        loss = PolicyLoss(options)
        with pytest.raises(ValueError, match=message):
            loss.terms(TokenOutputs(logp, None), given_batch, loss.counts(given_batch))


def test_entropy_is_asked_for_when_used() -> None:
    assert PolicyLoss(PolicyOptions()).needs_entropy
    assert not PolicyLoss(PolicyOptions(log_entropy=False)).needs_entropy
    assert PolicyLoss(PolicyOptions(log_entropy=False, entropy_coef=0.1)).needs_entropy
