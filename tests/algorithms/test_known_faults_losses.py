"""Faults that users of comparable systems reported, restated as small tests: splits, masks, non-finite values, groups, KL, reply ends."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from rlmca.algorithms import (
    PolicyLoss,
    PolicyOptions,
    RolloutCorrection,
    SftLoss,
    TokenOutputs,
    assign_advantages,
    at_last_token,
    discounted_returns,
    finish_of,
    gae,
    group_advantages,
    kl,
    leave_one_out,
    policy_loss,
    reinforce_plus_plus,
    reply_lengths,
    reply_mask,
    whiten,
)
from rlmca.types import Batch, Sample, batch_of_samples


def sft_batch(mask: list[list[int]]) -> Batch:
    live = torch.tensor(mask).bool()
    return Batch(torch.zeros_like(live, dtype=torch.int64), torch.full((len(mask),), live.shape[1]), live)


# --- gradients that depend on the split


@pytest.mark.parametrize("pieces", [[[0, 1]], [[0], [1]], [[1], [0], []], [[], [], [1], [0]]])
def test_d1_token_mean_is_the_same_for_every_split(pieces: list[list[int]]) -> None:
    """Token losses [4] and [1,1,1]: 1.75 however cut; the mean of means would be 2.5."""
    logp = torch.tensor([[-4.0, 0, 0], [-1.0, -1.0, -1.0]], requires_grad=True)
    batch, loss = sft_batch([[1, 0, 0], [1, 1, 1]]), SftLoss()
    counts = {"tokens": sum((loss.counts(batch.rows(rows))["tokens"] for rows in pieces if rows), torch.zeros(()))}
    total = 0.0
    for rows in pieces:
        piece = batch.rows(rows).pad_to(2, 3) if rows else batch.replace(mask_BT=torch.zeros(2, 3, dtype=torch.bool))
        own = torch.cat([logp[rows], torch.zeros(2 - len(rows), 3)])
        term, _ = loss.terms(TokenOutputs(own, None), piece, counts)
        term.backward()
        total += float(term.detach())
    assert total == 1.75
    assert logp.grad is not None and logp.grad.tolist() == [[-0.25, 0, 0], [-0.25] * 3]


# --- numerator and denominator under different masks


@pytest.mark.parametrize("agg", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"])
def test_d2_masked_truncated_replies_do_not_dilute(agg: str) -> None:
    """4 live tokens of loss 1 beside 6 masked: the loss is that of the live reply alone; all masked: 0, with zero gradients."""
    options = {"loss_agg": agg, "loss_agg_constant": 4.0 if agg.endswith("norm") else None}
    logp = torch.zeros(2, 6, requires_grad=True)
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [0] * 6])
    loss, _ = policy_loss(logp, logp.detach(), torch.full((2,), -1.0), mask, **options)  # type: ignore[arg-type]
    assert loss.item() == (4.0 if agg == "seq_mean_token_sum" else 1.0)
    loss, metrics = policy_loss(logp, logp.detach(), torch.full((2,), -1.0), torch.zeros_like(mask), **options)  # type: ignore[arg-type]
    loss.backward()
    assert loss.item() == 0.0 and logp.grad is not None and not logp.grad.any()
    assert all(math.isfinite(float(value)) for value in metrics.values())


def test_d2_all_masked_is_visible_in_the_counts() -> None:
    """An engine can tell a step without live tokens from a step whose gradient happens to be zero."""
    counts = PolicyLoss(PolicyOptions()).counts(sft_batch([[0, 0], [0, 0]]))
    assert {name: float(value) for name, value in counts.items()} == {"tokens": 0.0, "sequences": 0.0}


# --- one masked token turns the gradient into nan


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("logp_masked", "old_masked"), [(0.0, -200.0), (0.0, -1000.0), (math.inf, -math.inf), (math.nan, 0.0), (-math.inf, -math.inf)]
)
def test_d6_masked_overflow_leaves_loss_and_gradient(dtype: torch.dtype, logp_masked: float, old_masked: float) -> None:
    logp = torch.tensor([[-1.0, -1.0, logp_masked]], dtype=dtype, requires_grad=True)
    old = torch.tensor([[-1.0, -1.0, old_masked]], dtype=dtype)
    advantages = torch.tensor([[1.0, -1.0, 0.0]], dtype=dtype)
    loss, _ = policy_loss(logp, old, advantages, torch.tensor([[1, 1, 0]]), loss_agg="token_mean", ref_logp=old, kl_coef=0.5)
    loss.backward()
    assert loss.item() == 0.0
    assert logp.grad is not None and logp.grad.tolist() == [[-0.5, 0.5, 0.0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_d6_live_log_ratio_of_a_thousand_stays_finite(dtype: torch.dtype, advantage: float) -> None:
    logp = torch.tensor([[-1.0, 0.0]], dtype=dtype, requires_grad=True)
    old = torch.tensor([[-1.0, -1000.0]], dtype=dtype)
    loss, metrics = policy_loss(logp, old, torch.tensor([advantage]), torch.ones(1, 2), loss_agg="token_mean")
    loss.backward()
    assert math.isfinite(loss.item()) and logp.grad is not None and logp.grad.isfinite().all()
    assert float(metrics["ratio_max"]) == pytest.approx(math.exp(20))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["icepop", "icepop_sequence"])
@pytest.mark.parametrize("policy", ["grpo", "gspo", "cispo", "reinforce"])
def test_d6_a_rejected_log_ratio_of_a_thousand_is_as_if_it_were_not_there(policy: Any, kind: Any, dtype: torch.dtype) -> None:
    """The rejected row leaves loss and gradient of the others as they are alone, but stays in the denominator (two rows)."""
    logp = torch.tensor([[-1.0, -1.0], [0.0, 0.0]], dtype=dtype, requires_grad=True)
    old = torch.tensor([[-1.0, -1.25], [0.0, 0.0]], dtype=dtype)
    rollout = torch.tensor([[-1.0, -1.25], [-1000.0, -1000.0]], dtype=dtype)
    options: dict[str, Any] = {"kind": policy, "correction": RolloutCorrection(kind), "loss_agg": "seq_mean_token_sum", "clip_high": 0.5}
    advantages = torch.tensor([1.0, -1.0])
    loss, metrics = policy_loss(logp, old, advantages, torch.ones(2, 2), rollout_logp=rollout, **options)
    (grad,) = torch.autograd.grad(loss, logp)
    alone, _ = policy_loss(logp[:1], old[:1], advantages[:1], torch.ones(1, 2), rollout_logp=rollout[:1], **options)
    (grad_alone,) = torch.autograd.grad(alone, logp)
    assert torch.equal(loss, alone / 2) and torch.equal(grad, grad_alone / 2) and grad.isfinite().all() and grad[0].any()
    assert float(metrics["correction_rejected"]) == 0.5 and float(metrics["correction_weight"]) == 0.5


def test_d6_nan_at_a_live_token_is_reported() -> None:
    logp = torch.tensor([[-1.0, math.nan]], requires_grad=True)
    loss, metrics = policy_loss(logp, torch.full((1, 2), -1.0), torch.ones(1), torch.ones(1, 2))
    loss.backward()
    assert math.isnan(loss.item()) and logp.grad is not None and not logp.grad.isfinite().any() and float(metrics["nonfinite"]) == 0.5


# --- groups of unequal size


def test_d4_uneven_groups() -> None:
    assert group_advantages([1.0, 3.0, 5.0], [0, 0, 1], std="none").tolist() == [-1, 1, 0]
    rewards, groups = [1.0, 5, 2, 5, 6, 1, 5, 0, 3, 3, 9], [0, 1, 2, 1, 0, 2, 1, 0, 2, 0, 2]
    got = group_advantages(rewards, groups, std="none").tolist()
    means = {0: 2.5, 1: 5.0, 2: 3.75}
    assert got == [reward - means[group] for reward, group in zip(rewards, groups, strict=True)]
    middle_equal = group_advantages([1.0, 2, 3, 6, 5, 5, 5, 0, 0, 4, 4], [0] * 4 + [1] * 3 + [2] * 4, std="none").tolist()
    assert middle_equal == [-2, -1, 0, 3, 0, 0, 0, -2, -2, 2, 2]


def test_d4_a_rollout_in_pieces_counts_once() -> None:
    """Rollout A (three pieces, reward 1) and B (one piece, 0): baseline .5, not the .75 of four rows."""
    rewards, groups, rollouts = [1.0, 1.0, 1.0, 0.0], [0] * 4, [0, 0, 0, 1]
    assert group_advantages(rewards, groups, std="none", rollout_ids=rollouts).tolist() == [0.5, 0.5, 0.5, -0.5]
    assert leave_one_out(rewards, groups, rollout_ids=rollouts).tolist() == [1, 1, 1, -1]
    scaled = group_advantages([0.0, 1.0, 1.0, 1.0], groups, std="population", eps=0.0, rollout_ids=[9, 4, 4, 4])
    assert scaled.tolist() == [-1, 1, 1, 1]
    # rollout numbers start anew in each group, and a piece that is invalid takes no part
    assert group_advantages([1.0, 0, 5, 7], [0, 0, 1, 1], std="none", rollout_ids=[0, 1, 0, 1]).tolist() == [0.5, -0.5, -1, 1]
    assert group_advantages([1.0, None, 0.0], [0] * 3, std="none", rollout_ids=[0, 0, 1]).tolist() == [0.5, 0, -0.5]
    with pytest.raises(ValueError, match="rollout 3 of group 7 have different rewards"):
        group_advantages([1.0, 0.5], [7, 7], rollout_ids=[3, 3])
    with pytest.raises(ValueError, match="rollout ids"):
        group_advantages([1.0, 0.5], [7, 7], rollout_ids=[3])


# --- the KL term


def test_d8_values_and_sign() -> None:
    logp, ref = torch.tensor(math.log(0.5), dtype=torch.float64), torch.tensor(math.log(0.25), dtype=torch.float64)
    for kind, want in {"k1": 0.693147, "k2": 0.240227, "k3": 0.193147}.items():
        assert float(kl(logp, ref, kind=kind)) == pytest.approx(want, abs=1e-6)  # type: ignore[arg-type]
    one = torch.ones(1, 1)
    args = (logp.view(1, 1), logp.view(1, 1), torch.full((1,), 2.0, dtype=torch.float64), one)
    loss, _ = policy_loss(*args, ref_logp=ref.view(1, 1), kl_coef=0.5)
    assert loss.item() == pytest.approx(-2.0 + 0.5 * 0.193147, abs=1e-6)


@pytest.mark.parametrize("kind", ["k2", "k3"])
def test_d8_descending_the_kl_term_reaches_the_reference(kind: str) -> None:
    """softmax [1.5,0,-1] against uniform, exact expectation over detached sampling weights: .4186 falls below 1e-4, never rising."""
    logits = torch.tensor([1.5, 0.0, -1.0], dtype=torch.float64, requires_grad=True)
    ref = torch.full((3,), -math.log(3), dtype=torch.float64)
    divergences = []
    for _ in range(200):
        logp = logits.log_softmax(0)
        divergences.append((logp.exp() * (logp - ref)).sum().item())
        loss = (logp.exp().detach() * kl(logp, ref, kind=kind)).sum()  # type: ignore[arg-type]
        (grad,) = torch.autograd.grad(loss, logits)
        logits = (logits.detach() - 0.5 * grad).requires_grad_()
    assert divergences[0] == pytest.approx(0.4186, abs=1e-4) and divergences[-1] < 1e-4
    assert all(after <= before + 1e-6 for before, after in zip(divergences, divergences[1:], strict=False))


def test_d8_k1_has_no_gradient_in_expectation_and_is_refused() -> None:
    logits = torch.tensor([1.5, 0.0, -1.0], dtype=torch.float64, requires_grad=True)
    logp = logits.log_softmax(0)
    loss = (logp.exp().detach() * kl(logp, torch.full((3,), -math.log(3), dtype=torch.float64), kind="k1")).sum()
    (grad,) = torch.autograd.grad(loss, logits)
    assert grad.abs().max() < 1e-12
    with pytest.raises(ValueError, match="k1.*write k2 or k3"):
        PolicyOptions(kl_kind="k1", kl_coef=0.1)


# --- where a reply ends


@pytest.mark.parametrize(
    ("ids", "generated", "stop_ids", "mask", "finish"),
    [
        ([7, 8, 9, 0, 0], 3, {2}, [1, 1, 1, 0, 0], "length"),  # no stop token: not the padding
        ([7, 2, 2, 2], None, {2}, [1, 1, 0, 0], "stop"),  # pad id = stop id: the stop token is trained, once
        ([5, 6, 0], None, {2, 6}, [1, 1, 0], "stop"),  # the second stop id counts
        ([2, 2, 2], None, {2}, [1, 0, 0], "stop"),
        ([0, 0, 9], 3, {2}, [1, 1, 1], "length"),  # the pad id as a sampled token
        ([2, 2], 0, {2}, [0, 0], "length"),  # an empty reply: its padding is no stop token
        ([4, 4, 2], 2, {2}, [1, 1, 0], "length"),  # cut off just before padding that looks like a stop
    ],
)
def test_d9_reply_mask(ids: list[int], generated: int | None, stop_ids: set[int], mask: list[int], finish: str) -> None:
    rows = torch.tensor([ids])
    limit = None if generated is None else torch.tensor([generated])
    assert reply_mask(rows, stop_ids, limit).int().tolist() == [mask]
    length, stopped = reply_lengths(rows, stop_ids, limit)
    assert int(length) == sum(mask) and bool(stopped) == (finish == "stop")
    assert finish_of(ids[:generated], stop_ids) == (sum(mask), finish)


def test_d9_rows_of_one_batch_end_apart_and_in_training_masks() -> None:
    ids = torch.tensor([[7, 2, 0, 0], [7, 8, 9, 4], [2, 0, 0, 0]])
    assert reply_mask(ids, (2,)).int().tolist() == [[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]]
    samples = []
    for row in ids.tolist():
        n, finish = finish_of(row, {2})
        samples.append(Sample([1, 1], row[:n], [-0.5] * n, [0] * n, finish, advantage=1.5))
    batch = batch_of_samples(samples)
    assert batch.mask_BT.int().tolist() == [[0, 0, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1], [0, 0, 1, 0, 0, 0]]
    assert batch.advantage_BT is not None and batch.advantage_BT[0].tolist() == [0, 0, 1.5, 1.5, 0, 0]
    assert [s.truncated for s in samples] == [False, True, False]


def test_d9_empty_reply_takes_no_part_in_its_group() -> None:
    """An empty reply scored 10 beside a peer scored 0: nothing is credited, the peer's advantage is 0 and not -.707."""
    samples = [Sample([1], [], [], [], "stop", reward=10.0), Sample([1], [5, 2], [-1.0] * 2, [0, 0], "stop", reward=0.0)]
    assign_advantages(samples, std="sample")
    assert [s.advantage for s in samples] == [0.0, 0.0]
    batch = batch_of_samples(samples)
    assert batch.mask_BT.int().tolist() == [[0, 0, 0], [0, 1, 1]] and batch.advantage_BT is not None and not batch.advantage_BT.any()


def test_d9_the_reward_sits_on_the_last_live_token() -> None:
    mask = torch.tensor([[0, 1, 1, 0, 0], [1, 1, 0, 1, 0], [0, 0, 0, 0, 0]])
    placed = at_last_token(torch.tensor([2.0, 3.0, 10.0]), mask)
    assert placed.tolist() == [[0, 0, 2, 0, 0], [0, 0, 0, 3, 0], [0] * 5]
    returns, advantages = reinforce_plus_plus([2.0, 3.0, 10.0], mask)
    assert returns.tolist() == [[0, 2, 2, 0, 0], [3, 3, 0, 3, 0], [0] * 5] and not advantages[2].any()


# --- the clamp of a sequence's ratio


@pytest.mark.parametrize("kind", ["gspo", "gspo_token"])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_r9_a_mean_log_ratio_of_a_thousand_is_clamped(kind: Any, advantage: float, dtype: torch.dtype) -> None:
    """Finite loss and gradient; the other row's gradient is what it is beside an ordinary row."""
    logp = torch.tensor([[-1.0, -1.25], [-1.0, -1.0]], dtype=dtype)
    old = torch.tensor([[-1.25, -1.0], [-1001.0, -1001.0]], dtype=dtype)
    advantages = torch.tensor([1.0, advantage])
    grads = []
    for baseline in (old, old.clamp(min=-1.25)):
        leaf = logp.clone().requires_grad_()
        loss, metrics = policy_loss(leaf, baseline, advantages, torch.ones(2, 2), kind=kind)
        loss.backward()
        assert loss.isfinite() and leaf.grad is not None and leaf.grad.isfinite().all()
        grads.append(leaf.grad)
        if baseline is old:
            assert float(metrics["ratio_max"]) == pytest.approx(math.exp(20)) and not leaf.grad[1].any()
    assert torch.equal(grads[0][0], grads[1][0]) and grads[0][0].any()


# --- a mask that an estimator swallows

ESTIMATORS: dict[str, Any] = {
    "population": lambda r, m: group_advantages(r[:, -1], [0, 0, 0, 0], std="population", valid=m.any(1)),
    "sample": lambda r, m: group_advantages(r[:, -1], [0, 0, 0, 0], std="sample", valid=m.any(1)),
    "dr_grpo": lambda r, m: group_advantages(r[:, -1], [0, 0, 0, 0], std="none", valid=m.any(1)),
    "rloo": lambda r, m: leave_one_out(r[:, -1], [0, 0, 0, 0], valid=m.any(1)),
    "gae": lambda r, m: gae(r, r / 2, m, gamma=0.9, lam=0.9)[0],
    "returns": lambda r, m: discounted_returns(r, m, gamma=0.9),
    "reinforce_plus_plus": lambda r, m: reinforce_plus_plus(r[:, -1], m, kl=r, kl_coef=0.1)[1],
    "reinforce_plus_plus_baseline": lambda r, m: reinforce_plus_plus(r[:, -1], m, group_ids=[0, 0, 0, 0])[1],
    "whiten": lambda r, m: whiten(r, m),
}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_r10_the_reward_of_a_masked_row_changes_no_other_advantage(name: str) -> None:
    rewards = torch.tensor([[0.5, 1.0, 2.0], [0.0, 0.0, 0.0], [0.25, 0.5, -1.0], [1.0, 0.0, 3.0]])
    mask = torch.tensor([[1, 1, 1], [0, 0, 0], [1, 1, 0], [0, 1, 1]]).bool()
    spoilt = rewards.clone()
    spoilt[1] = 1e6
    clean, dirty = (ESTIMATORS[name](r, mask) for r in (rewards, spoilt))
    assert torch.equal(clean, dirty) and clean[0].any() and not clean[1].any()


def test_masked_reward_changes_no_other_advantage() -> None:
    rewards: list[float | None] = [1.0, 2.0, None, 4.0]
    alone = group_advantages(rewards, [0, 0, 0, 0])
    spoilt = group_advantages(torch.tensor([1.0, 2.0, math.nan, 4.0], dtype=torch.float64), [0, 0, 0, 0])
    assert torch.equal(alone, spoilt) and float(alone[2]) == 0.0
    assert alone[[0, 1, 3]].tolist() == group_advantages([1.0, 2.0, 4.0], [0, 0, 0]).tolist()
