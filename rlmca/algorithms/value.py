"""The critic's loss: clipped squared error of values against returns (as in the code released with PPO, arXiv 1707.06347).

Shape legend: B rows, T positions, N live tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlmca.algorithms.aggregate import mask_counts
from rlmca.algorithms.contract import Counts, Metrics
from rlmca.algorithms.numeric import live_index, poison, take
from rlmca.algorithms.policy import averaged


def value_terms(
    values_BT: Tensor, old_BT: Tensor | None, returns_BT: Tensor, mask_BT: Tensor, counts: Counts, *, clip: float | None
) -> tuple[Tensor, Metrics]:
    """(a micro-batch's share of `value_loss`, metrics), given the `tokens` of the whole optimizer step (`mask_counts`)."""
    if clip is not None and not clip > 0:
        raise ValueError(f"value_clip {clip} must be positive; leave it out for an unclipped loss")
    index_N = live_index(mask_BT)
    value_N, return_N = take(values_BT, index_N), take(returns_BT, index_N).detach()
    watched = [value_N, return_N]
    loss_N = (value_N - return_N).square()
    clipped_N = torch.zeros_like(loss_N, dtype=torch.bool)
    if clip is not None:
        if old_BT is None:
            raise ValueError(f"old values are missing: value_clip {clip} bounds the distance from them")
        old_N = take(old_BT, index_N).detach()
        watched.append(old_N)
        bounded_N = (value_N.clamp(old_N - clip, old_N + clip) - return_N).square()
        # counted here: once the larger is taken, nothing tells which of the two it was
        clipped_N = bounded_N > loss_N
        loss_N = torch.maximum(loss_N, bounded_N)
    weight = (1 / counts["tokens"].clamp(min=1)).to(loss_N.dtype)
    loss = poison((loss_N / 2 * weight).sum(), value_N, *watched)
    with torch.no_grad():
        tokens = torch.tensor(float(index_N.shape[0]), dtype=torch.float64, device=value_N.device)
        sums = {"value_clip_fraction": clipped_N, "value": value_N, "return": return_N, "value_error": (value_N - return_N).abs()}
        metrics: Metrics = {"loss": (loss.double() * counts["tokens"], tokens)}
        metrics.update({name: (value.sum(dtype=torch.float64), tokens) for name, value in sums.items()})
    return loss, metrics


def value_loss(
    values: Tensor, old_values: Tensor | None, returns: Tensor, mask: Tensor, *, clip: float | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """(loss, metrics): mean over live tokens of 1/2 max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2).

    All [B, T]; `mask` nonzero at live tokens; `clip` None: the plain squared error, then `old_values` may be None. Metrics
    over live tokens: `loss`, `value_clip_fraction` (share where the clipped error is the larger), `value`, `return`,
    `value_error` (absolute). The caller multiplies by vf_coef. Whatever the split, `value_terms` adds up to this.
    """
    mask_BT = mask.bool()
    loss, metrics = value_terms(values, old_values, returns, mask_BT, mask_counts(mask_BT), clip=clip)
    return loss, averaged(metrics)


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """1 - Var(R - V) / Var(R) over live tokens: 1 for a perfect critic, 0 for one that knows the mean; 0 without any spread."""
    index_N = live_index(mask.bool())
    value_N, return_N = (take(x, index_N).detach().double() for x in (values, returns))
    if len(index_N) < 2:
        return 0.0
    spread = float(return_N.var(correction=0))
    return 1 - float((return_N - value_N).var(correction=0)) / spread if spread > 0 else 0.0
