"""What each kind of policy loss computes per token, before correction and aggregation.

rho = exp(logp - logp_old) of a token, log ratio clamped to +-20; A its advantage; sg stops the gradient.
- ppo, grpo: -min(rho A, clip(rho, low, high) A) (PPO, arXiv 1707.06347, eq. 7).
- gspo: the same with the sequence's ratio s = exp(mean of log rho over its live tokens), mean clamped to +-20, in place of
  every token's (arXiv 2507.18071, eq. 5-7). gspo_token: sg(s) pi / sg(pi), the same value with a gradient of the
  token's own (eq. 14); equal to gspo for an advantage of the whole sequence.
- cispo: -sg(clamp(rho, floor, cap)) A logp (arXiv 2506.13585, eq. 4-5).
- reinforce: -A logp; the ratio is taken as 1, so the policy must be the one that sampled.

Shape legend: B rows, T positions, N live tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlmca.algorithms.aggregate import row_sums, to_tokens
from rlmca.algorithms.numeric import LOG_RATIO_BOUND, clamp_log_ratio
from rlmca.algorithms.policy_options import CLIPPED, PolicyOptions


@dataclass(frozen=True)
class Objective:
    """Per-token results of a kind, all [N]."""

    loss_N: Tensor
    log_ratio_N: Tensor
    """Token by token, clamped, whatever the kind."""
    ratio_N: Tensor
    """The one that the kind bounds: of tokens, or of their sequences."""


def objective(logp_N: Tensor, old_N: Tensor, advantage_N: Tensor, mask_BT: Tensor, index_N: Tensor, o: PolicyOptions) -> Objective:
    """See the file's top; `old_N` carries no gradient. Rows must be whole: a sequence's ratio is that of all its live tokens."""
    raw_N = logp_N - old_N
    log_ratio_N = clamp_log_ratio(raw_N)
    if o.kind == "gspo":
        ratio_N = clamp_log_ratio(_row_mean(raw_N, mask_BT, index_N)).exp()
    elif o.kind == "gspo_token":
        mean_N = _row_mean(raw_N.detach(), mask_BT, index_N)
        # where the clamp holds the sequence's ratio, the token's has no gradient either
        own_N = torch.where(mean_N.abs() <= LOG_RATIO_BOUND, logp_N - logp_N.detach(), 0.0)
        ratio_N = clamp_log_ratio(mean_N).exp() * own_N.exp()
    else:
        ratio_N = log_ratio_N.exp()
    if o.kind in CLIPPED:
        loss_N = _clipped(ratio_N, advantage_N, o)
    elif o.kind == "cispo":
        loss_N = -ratio_N.detach().clamp(*o.bounds) * advantage_N * logp_N
    else:
        loss_N = -advantage_N * logp_N
    return Objective(loss_N, log_ratio_N, ratio_N)


def _row_mean(value_N: Tensor, mask_BT: Tensor, index_N: Tensor) -> Tensor:
    mean_B = row_sums(value_N, mask_BT, index_N) / mask_BT.sum(1).clamp(min=1)
    return to_tokens(mean_B, mask_BT, index_N).to(value_N.dtype)


def _clipped(ratio_N: Tensor, advantage_N: Tensor, o: PolicyOptions) -> Tensor:
    """Per-token loss: the pessimistic of plain and clipped objective, bounded for A < 0 when dual_clip is set."""
    gain_N = torch.minimum(ratio_N * advantage_N, ratio_N.clamp(*o.bounds) * advantage_N)
    if o.dual_clip is not None:
        gain_N = torch.where(advantage_N < 0, torch.maximum(gain_N, o.dual_clip * advantage_N), gain_N)
    return -gain_N


def ratio_metrics(found: Objective, advantage_N: Tensor, o: PolicyOptions) -> dict[str, Tensor]:
    """Per-token values to be averaged: the ratio, whether a bound changed the token's gradient, half the squared log ratio.

    A clipped objective is bounded below only for A < 0 and above only for A > 0; cispo's weight is bounded for any A;
    reinforce has no bound.
    """
    low, high = o.bounds
    low_N, high_N = found.ratio_N < low, found.ratio_N > high
    if o.kind in CLIPPED:
        low_N, high_N = low_N & (advantage_N < 0), high_N & (advantage_N > 0)
    return {
        "ratio": found.ratio_N,
        "clip_fraction": low_N | high_N,
        "clip_fraction_low": low_N,
        "clip_fraction_high": high_N,
        "approx_kl": found.log_ratio_N.square() / 2,
    }
