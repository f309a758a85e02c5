"""Per-token log-probability and entropy from vocabulary-parallel logits, with their gradient.

Shape legend: N tokens, V vocabulary columns held by this rank (padding columns included).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def token_log_probs(
    logits_NV: Tensor, target_N: Tensor, *, vocab_size: int, temperature: float = 1.0, group: dist.ProcessGroup | None = None
) -> tuple[Tensor, Tensor]:
    """(log-probability of `target_N`, entropy), both [N] in fp32 (fp64 for fp64 logits), at `temperature`.

    `logits_NV` are this rank's columns of a vocabulary that is split evenly over `group` (None: one rank);
    columns at or above `vocab_size` are padding and take no part. The distribution is softmax(logits / temperature);
    its entropy is H = log Z - sum_v p_v z_v. Every rank of the group gets the same numbers.
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be positive to divide logits by, got {temperature}")
    return _TokenLogProbs.apply(logits_NV, target_N, vocab_size, temperature, group)


class _TokenLogProbs(torch.autograd.Function):
    """Softmax statistics shared by both outputs; the backward needs the probabilities alone.

    d logp / d z_v = 1[v = target] - p_v and dH / d z_v = -p_v (log p_v + H), both times 1 / temperature.
    """

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, target_N: Tensor, vocab_size: int, temperature: float, group: Any) -> tuple[Tensor, Tensor]:
        width = logits_NV.shape[1]
        first = width * (dist.get_rank(group) if group is not None else 0)
        real = min(max(vocab_size - first, 0), width)  # this rank's columns that are no padding
        z_NV = logits_NV[:, :real].to(torch.promote_types(logits_NV.dtype, torch.float32))
        if temperature != 1.0:
            z_NV = z_NV / temperature
        top_N = z_NV.amax(dim=1) if real else z_NV.new_full((z_NV.shape[0],), float("-inf"))
        _reduce(top_N, dist.ReduceOp.MAX, group)
        p_NV = (z_NV - top_N[:, None]).exp_()
        local_N = target_N - first
        here_N = (local_N >= 0) & (local_N < real)
        column_N1 = local_N.clamp(0, max(real - 1, 0))[:, None]
        picked_N = z_NV.gather(1, column_N1)[:, 0] if real else z_NV.new_zeros(z_NV.shape[0])
        sums_3N = torch.stack([p_NV.sum(1), (p_NV * z_NV).sum(1), picked_N.where(here_N, picked_N.new_zeros(()))])
        _reduce(sums_3N, dist.ReduceOp.SUM, group)
        total_N, weighted_N, target_logit_N = sums_3N
        log_total_N = total_N.log() + top_N
        p_NV.div_(total_N[:, None])
        entropy_N = log_total_N - weighted_N / total_N
        ctx.save_for_backward(p_NV, column_N1, here_N, entropy_N)
        ctx.width, ctx.temperature, ctx.dtype = width, temperature, logits_NV.dtype
        ctx.set_materialize_grads(False)
        return target_logit_N - log_total_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None, None, None]:
        p_NV, column_N1, here_N, entropy_N = ctx.saved_tensors
        grad_logp_N, grad_entropy_N = grads
        dz_NV = torch.zeros_like(p_NV) if grad_logp_N is None else p_NV * -grad_logp_N[:, None]
        if grad_entropy_N is not None:
            dz_NV.addcmul_(torch.xlogy(p_NV, p_NV).addcmul_(p_NV, entropy_N[:, None]), grad_entropy_N[:, None], value=-1)
        if grad_logp_N is not None and p_NV.shape[1]:
            dz_NV.scatter_add_(1, column_N1, grad_logp_N.where(here_N, grad_logp_N.new_zeros(()))[:, None])
        if ctx.temperature != 1.0:
            dz_NV.div_(ctx.temperature)
        grad_NV = torch.nn.functional.pad(dz_NV, (0, ctx.width - dz_NV.shape[1]))  # padding columns get no gradient
        return grad_NV.to(ctx.dtype), None, None, None, None


def _reduce(values: Tensor, op: Any, group: Any) -> None:
    if group is not None and dist.get_world_size(group) > 1:
        dist.all_reduce(values, op=op, group=group)
