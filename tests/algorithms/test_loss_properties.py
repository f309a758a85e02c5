"""What every loss keeps, whatever its choices: independence of the split, blindness to masked positions, loud non-finite values."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlmca.algorithms import Loss, PolicyLoss, PreferenceLoss, SftLoss, gae, kl, value_loss, value_terms
from rlmca.algorithms.aggregate import mask_counts
from tests.algorithms.pieces import KINDS, Piece, every_loss, policy_losses, random_batch, run

LOSSES = every_loss()
JUNK = [math.inf, -math.inf, math.nan, 0.0, 1e30]


@given(data=st.data(), seed=st.integers(0, 10**6), B=st.integers(1, 9))
def test_any_split_into_micro_batches(data: st.DataObject, seed: int, B: int) -> None:
    """Loss, gradients and metrics of a batch do not depend on how it is cut, padded with zero-weight rows, or ordered.

    Units (the two rows of a pair) stay together; policy losses do not see them, so their units are cut as well.
    """
    loss, T = data.draw(st.sampled_from(LOSSES)), 6
    batch, logp, entropy = random_batch(B, T, seed)
    if not isinstance(loss, PreferenceLoss):
        batch = batch.replace(unit_B=None)
    units = [[row] for row in range(B)] if batch.unit_B is None else [[r for r in (u, u + 1) if r < B] for u in range(0, B, 2)]
    whole, (grad, grad_entropy), metrics = run(loss, [(batch, logp, entropy)])
    order = data.draw(st.permutations(range(len(units))))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(units) - 1)))) if len(units) > 1 else []
    pieces, chosen = [], []
    for start, stop in zip([0, *cuts], [*cuts, len(units)], strict=True):
        rows = torch.tensor([row for unit in order[start:stop] for row in units[unit]])
        extra = data.draw(st.integers(0, 2))
        junk = torch.full((extra, T), data.draw(st.sampled_from(JUNK)), dtype=logp.dtype)
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


def spoilt(piece: Piece, junk: float) -> Piece:
    batch, logp, entropy = piece
    dead = ~batch.mask_BT
    fields = {n: v.masked_fill(dead, junk) for n, v in batch.tensors() if n.endswith("_BT") and v.is_floating_point()}
    return batch.replace(**fields), logp.masked_fill(dead, junk), entropy.masked_fill(dead, junk)


@pytest.mark.parametrize("group", ["supervised", *KINDS])
def test_every_choice_is_blind_to_masked_positions_and_cut_in_two(group: str) -> None:
    """Each kind x aggregation x correction: bitwise the same with anything off the mask; the same from two micro-batches."""
    losses: list[Loss] = [loss for loss in LOSSES if not isinstance(loss, PolicyLoss)]
    for number, loss in enumerate(losses if group == "supervised" else policy_losses(group)):
        piece = random_batch(6, 5, number)
        clean = run(loss, [piece])
        for junk in JUNK:
            dirty = run(loss, [spoilt(piece, junk)])
            assert torch.equal(clean[0], dirty[0])
            assert all(torch.equal(a, b) for a, b in zip(clean[1], dirty[1], strict=True))
            assert clean[2] == dirty[2]
        batch, logp, entropy = piece
        halves = [(batch.rows(rows), logp[rows], entropy[rows]) for rows in (slice(0, 2), slice(2, 6))]
        total, grads, metrics = run(loss, halves)
        torch.testing.assert_close(total, clean[0], rtol=0, atol=1e-10)
        torch.testing.assert_close(torch.cat(grads[::2]), clean[1][0], rtol=0, atol=1e-10)
        assert metrics == pytest.approx(clean[2], abs=1e-10)


@pytest.mark.parametrize("group", ["supervised", *KINDS])
@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
def test_non_finite_live_token_reaches_loss_and_gradient(group: str, junk: float) -> None:
    losses: list[Loss] = [loss for loss in LOSSES if not isinstance(loss, PolicyLoss)]
    for loss in losses if group == "supervised" else policy_losses(group):
        batch, logp, entropy = random_batch(6, 5, 3)
        paired = batch.mask_BT.any(1).view(3, 2).all(1).repeat_interleave(2)  # a preference loss reads whole pairs only
        at = (batch.mask_BT & paired[:, None]).nonzero()[0].tolist()
        logp[at[0], at[1]] = junk
        total, (grad, _), metrics = run(loss, [(batch, logp, entropy)])
        assert not total.isfinite() and not grad.norm().isfinite()
        if isinstance(loss, PolicyLoss):
            assert metrics["nonfinite"] == pytest.approx(1 / int(batch.mask_BT.sum()))


@pytest.mark.parametrize("name", ["old_logp_BT", "advantage_BT", "ref_logp_BT", "rollout_logp_BT"])
def test_non_finite_values_that_the_loss_reads_are_seen_too(name: str) -> None:
    batch, logp, entropy = random_batch(6, 5, 3)
    first_live = torch.arange(30).view(6, 5) == batch.mask_BT.view(-1).nonzero()[0]
    for kind in KINDS:
        for loss in policy_losses(kind):
            if (name == "ref_logp_BT" and not loss.options.kl_coef) or (name == "rollout_logp_BT" and loss.options.correction is None):
                continue
            value = getattr(batch, name).masked_fill(first_live, math.nan)
            total, (grad, _), _ = run(loss, [(batch.replace(**{name: value}), logp, entropy)])
            assert not total.isfinite() and not grad.norm().isfinite(), loss.options


def test_nothing_live_is_zero_and_finite() -> None:
    for loss in LOSSES:
        batch, logp, entropy = random_batch(4, 5, 1)
        total, (grad, _), metrics = run(loss, [(batch.replace(mask_BT=torch.zeros_like(batch.mask_BT)), logp, entropy)])
        assert float(total) == 0.0 and not grad.any() and all(math.isfinite(value) for value in metrics.values())


@given(seed=st.integers(0, 10**6), clip=st.sampled_from([None, 0.2]), junk=st.sampled_from(JUNK), cut=st.integers(0, 5))
def test_value_loss_of_pieces_adds_up_and_is_blind_off_the_mask(seed: int, clip: float | None, junk: float, cut: int) -> None:
    batch, values, returns = random_batch(5, 6, seed)
    mask, old = batch.mask_BT, batch.ref_logp_BT
    assert old is not None
    values = values.requires_grad_()
    loss, metrics = value_loss(values, old, returns, mask, clip=clip)
    (grad,) = torch.autograd.grad(loss, values)
    dirty = [x.detach().masked_fill(~mask, junk) for x in (values, old, returns)]
    leaf = dirty[0].requires_grad_()
    counts = mask_counts(mask)
    shares = [value_terms(leaf[r], dirty[1][r], dirty[2][r], mask[r], counts, clip=clip) for r in (slice(0, cut), slice(cut, 5))]
    (dirty_grad,) = torch.autograd.grad(shares[0][0] + shares[1][0], leaf)
    torch.testing.assert_close(shares[0][0] + shares[1][0], loss, rtol=0, atol=1e-10)
    torch.testing.assert_close(dirty_grad, grad, rtol=0, atol=1e-10)
    for name, value in metrics.items():
        top, bottom = (sum(float(share[1][name][i]) for share in shares) for i in (0, 1))
        assert top / max(bottom, 1) == pytest.approx(float(value), abs=1e-10)
    first = torch.arange(30).view(5, 6) == mask.view(-1).nonzero()[:1].sum() if mask.any() else None
    if first is not None:
        bad, _ = value_loss(values.detach().masked_fill(first, math.nan), old, returns, mask, clip=clip)
        assert not bad.isfinite()


@given(seed=st.integers(0, 10**6), junk=st.sampled_from(JUNK))
def test_gae_is_that_of_the_live_tokens_put_side_by_side(seed: int, junk: float) -> None:
    batch, rewards, values = random_batch(4, 7, seed)
    mask = batch.mask_BT
    got, returns = gae(rewards.masked_fill(~mask, junk), values.masked_fill(~mask, junk), mask, gamma=0.9, lam=0.8)
    assert not got[~mask].any() and not returns[~mask].any()
    for b in range(4):
        r, v = rewards[b][mask[b]].tolist(), values[b][mask[b]].tolist()
        # the definition, as a sum: A_t = sum_k (gamma lam)^k delta_{t+k}
        delta = [r[t] + 0.9 * (v[t + 1] if t + 1 < len(v) else 0.0) - v[t] for t in range(len(r))]
        want = [sum(0.72**k * d for k, d in enumerate(delta[t:])) for t in range(len(r))]
        assert got[b][mask[b]].tolist() == pytest.approx(want, abs=1e-12)
        assert returns[b][mask[b]].tolist() == pytest.approx([a + x for a, x in zip(want, v, strict=True)], abs=1e-12)


@given(log=st.floats(-1e4, 1e4), kind=st.sampled_from(["k1", "abs", "k2", "k3"]))
def test_kl_estimators_are_finite_and_of_the_right_sign(log: float, kind: str) -> None:
    value = float(kl(torch.tensor(-1.0, dtype=torch.float64), torch.tensor(-1.0 + log, dtype=torch.float64), kind=kind))  # type: ignore[arg-type]
    assert math.isfinite(value) and (kind == "k1" or value >= 0)


def test_supervised_group_covers_what_is_no_policy_loss() -> None:
    assert len(LOSSES) == 1 + 5 + 6 * 4 * 5 and isinstance(LOSSES[0], SftLoss)
