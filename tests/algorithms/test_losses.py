from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rlmca.algorithms import Loss, PolicyLoss, PolicyOptions, SftLoss, TokenOutputs, policy_loss
from rlmca.types import Batch

AGGREGATIONS = ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"]


def random_batch(B: int, T: int, seed: int, dtype: torch.dtype = torch.float64) -> tuple[Batch, Tensor, Tensor]:
    """(batch, log-probs, entropies) with rows of every kind, one without any live token among them."""
    g = torch.Generator().manual_seed(seed)
    length_B = torch.randint(0, T + 1, (B,), generator=g)
    length_B[seed % B] = 0
    mask_BT = (torch.arange(T) < length_B[:, None]) & (torch.rand(B, T, generator=g) < 0.8)

    def logp() -> Tensor:
        return -torch.rand(B, T, generator=g, dtype=dtype) * 2

    batch = Batch(
        ids_BT=torch.zeros(B, T, dtype=torch.int64),
        length_B=length_B,
        mask_BT=mask_BT,
        old_logp_BT=logp(),
        ref_logp_BT=logp(),
        rollout_logp_BT=logp(),
        advantage_BT=torch.randn(B, T, generator=g, dtype=dtype),
    )
    return batch, logp(), -logp()


def run(loss: Loss, pieces: list[tuple[Batch, Tensor, Tensor]]) -> tuple[Tensor, list[Tensor], dict[str, float]]:
    """What an engine does: global counts, then the sum of the pieces' terms; gradients to logp and entropy."""
    counts: dict[str, Tensor] = {}
    for batch, _, _ in pieces:
        for name, value in loss.counts(batch).items():
            counts[name] = counts.get(name, torch.zeros((), dtype=torch.float64)) + value
    total, leaves = torch.zeros((), dtype=torch.float64), []
    metrics: dict[str, tuple[float, float]] = {}
    for batch, logp, entropy in pieces:
        logp, entropy = logp.clone().requires_grad_(), entropy.clone().requires_grad_()
        term, pairs = loss.terms(TokenOutputs(logp, entropy), batch, counts)
        term.backward()
        total = total + term.detach()
        leaves += [logp, entropy]
        for name, (top, bottom) in pairs.items():
            have = metrics.get(name, (0.0, 0.0))
            metrics[name] = (max(have[0], float(top)) if name.endswith("_max") else have[0] + float(top), have[1] + float(bottom))
    means = {n: top if n.endswith("_max") else top / max(bottom, 1) for n, (top, bottom) in metrics.items()}
    grads = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
    return total, grads, means


def losses() -> list[Loss]:
    made: list[Loss] = [SftLoss()]
    for agg in AGGREGATIONS:
        constant = 5.0 if agg.endswith("norm") else None
        made.append(PolicyLoss(PolicyOptions(loss_agg=agg, loss_agg_constant=constant, kl_coef=0.1, entropy_coef=0.02, dual_clip=2.0)))  # type: ignore[arg-type]
    return made


@given(data=st.data(), seed=st.integers(0, 10**6), which=st.integers(0, 4), B=st.integers(1, 9))
def test_any_split_into_micro_batches(data: st.DataObject, seed: int, which: int, B: int) -> None:
    """Loss, gradients and metrics of a batch do not depend on how it is cut, padded with zero-weight rows, or ordered."""
    T, loss = 6, losses()[which]
    batch, logp, entropy = random_batch(B, T, seed)
    whole, (grad, grad_entropy), metrics = run(loss, [(batch, logp, entropy)])
    order = data.draw(st.permutations(range(B)))
    cuts = sorted(data.draw(st.sets(st.integers(1, B - 1)))) if B > 1 else []
    pieces, chosen = [], []
    for start, stop in zip([0, *cuts], [*cuts, B], strict=True):
        rows = torch.tensor(order[start:stop])
        extra = data.draw(st.integers(0, 2))
        junk = torch.full((extra, T), data.draw(st.sampled_from([0.0, math.inf, math.nan])), dtype=logp.dtype)
        piece = batch.rows(rows).pad_to(len(rows) + extra, T)
        pieces.append((piece, torch.cat([logp[rows], junk]), torch.cat([entropy[rows], junk])))
        chosen.append(rows)
    total, grads, split_metrics = run(loss, pieces)
    torch.testing.assert_close(total, whole, rtol=0, atol=1e-10)
    for k, rows in enumerate(chosen):
        n = len(rows)
        torch.testing.assert_close(grads[2 * k][:n], grad[rows], rtol=0, atol=1e-10)
        torch.testing.assert_close(grads[2 * k + 1][:n], grad_entropy[rows], rtol=0, atol=1e-10)
        assert not grads[2 * k][n:].any() and not grads[2 * k + 1][n:].any()
    assert split_metrics == pytest.approx(metrics, abs=1e-10)


@given(seed=st.integers(0, 10**6), which=st.integers(0, 4), junk=st.sampled_from([math.inf, -math.inf, math.nan, 0.0, 1e30]))
def test_masked_positions_hold_anything(seed: int, which: int, junk: float) -> None:
    loss = losses()[which]
    batch, logp, entropy = random_batch(4, 5, seed)
    clean = run(loss, [(batch, logp, entropy)])
    dead = ~batch.mask_BT
    spoilt = batch.replace(**{n: v.masked_fill(dead, junk) for n, v in batch.tensors() if n.endswith("_BT") and v.is_floating_point()})
    dirty = run(loss, [(spoilt, logp.masked_fill(dead, junk), entropy.masked_fill(dead, junk))])
    assert torch.equal(clean[0], dirty[0])
    assert all(torch.equal(a, b) for a, b in zip(clean[1], dirty[1], strict=True))
    assert clean[2] == dirty[2]


@pytest.mark.parametrize("loss", losses())
@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
def test_non_finite_live_token_reaches_loss_and_gradient(loss: Loss, junk: float) -> None:
    batch, logp, entropy = random_batch(4, 5, 3)
    at = batch.mask_BT.nonzero()[1].tolist()
    logp[at[0], at[1]] = junk
    total, (grad, _), metrics = run(loss, [(batch, logp, entropy)])
    assert not total.isfinite() and not grad.norm().isfinite()
    if isinstance(loss, PolicyLoss):
        assert metrics["nonfinite"] == pytest.approx(1 / int(batch.mask_BT.sum()))


def test_non_finite_old_logp_advantage_and_reference_are_seen_too() -> None:
    batch, logp, entropy = random_batch(4, 5, 3)
    loss = PolicyLoss(PolicyOptions(kl_coef=0.1))
    first_live = torch.arange(20).view(4, 5) == batch.mask_BT.view(-1).nonzero()[0]
    for name in ("old_logp_BT", "advantage_BT", "ref_logp_BT"):
        value = getattr(batch, name).masked_fill(first_live, math.nan)
        total, (grad, _), _ = run(loss, [(batch.replace(**{name: value}), logp, entropy)])
        assert not total.isfinite() and not grad.norm().isfinite(), name


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
    assert float(loss) == pytest.approx(float(want), abs=1e-6)


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
        ({"kind": "cispo"}, "'cispo' is unknown; write one of ppo, grpo"),
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
