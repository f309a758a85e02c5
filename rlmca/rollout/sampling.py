"""From logits to one token per row and its log-probability.

Shape legend: B rows, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlmca.rollout.base import SamplingParams
from rlmca.rollout.seeds import uniform_B


def choose(logits_BV: Tensor, params: SamplingParams, seed_B: Tensor, position: int) -> tuple[Tensor, Tensor]:
    """(token_B int64, logp_B float32): greedy, or drawn by inverting the cumulative distribution at a counter-based number.

    The log-probability is that of the full vocabulary at the sampling temperature (greedy: at temperature 1), before
    top-k and top-p. `logits_BV` may be overwritten.
    """
    logits_BV = logits_BV.float()
    if params.greedy:
        best_B, token_B = logits_BV.max(dim=-1)
        return token_B, best_B - torch.logsumexp(logits_BV, dim=-1)
    if params.temperature != 1.0:
        logits_BV = logits_BV / params.temperature
    logp_BV = torch.log_softmax(logits_BV, dim=-1)
    prob_BV = logp_BV.exp()
    if params.filtered:
        prob_BV = keep_likely(prob_BV, params.top_k, params.top_p)
    token_B = invert(prob_BV, uniform_B(seed_B, position))
    return token_B, logp_BV.gather(1, token_B[:, None])[:, 0]


def invert(prob_BV: Tensor, u_B: Tensor) -> Tensor:
    """The first token whose cumulative (unnormalised) probability exceeds u_B in [0, 1); never one of probability 0.

    Cumulative sums are kept in float32 for large vocabularies' sake: a token below about 6e-8 may not be drawn.
    """
    cumulative_BV = prob_BV.cumsum(dim=-1)
    total_B = cumulative_BV[:, -1]
    # rounding u * total up to the total would point behind the last token
    target_B = torch.minimum((u_B * total_B).to(total_B.dtype), torch.nextafter(total_B, torch.zeros_like(total_B)))
    token_B = torch.searchsorted(cumulative_BV, target_B[:, None], right=True)[:, 0]
    return token_B.clamp_(max=prob_BV.shape[-1] - 1)  # not-a-number weights find no token; the caller sees it in the log-prob


def keep_likely(prob_BV: Tensor, top_k: int, top_p: float) -> Tensor:
    """Probabilities with everything outside top-k, then outside top-p of what is left, set to 0 (not normalised).

    Top-p keeps the smallest set of most likely tokens whose share reaches `top_p`: the one that crosses it is in.
    """
    V = prob_BV.shape[-1]
    k = min(top_k, V) if top_k > 0 else V
    sorted_Bk, index_Bk = prob_BV.topk(k, dim=-1) if k < V else prob_BV.sort(dim=-1, descending=True)
    if top_p < 1:
        share_Bk = sorted_Bk / sorted_Bk.sum(dim=-1, keepdim=True)
        before_Bk = share_Bk.cumsum(dim=-1) - share_Bk
        sorted_Bk = sorted_Bk.masked_fill(before_Bk >= top_p, 0.0)
    return torch.zeros_like(prob_BV).scatter_(1, index_Bk, sorted_Bk)
