"""Log-probability and entropy of tokens straight from hidden states and the head's weight: logits exist a tile at a time.

Shape legend: N tokens, H hidden size, V rows of the head's weight on this rank (padding rows included); a tile is R of
the tokens times C of the rows.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlmca.models.logprobs_backward import Tokens, add_gradients
from rlmca.models.logprobs_passes import choose_passes, overwrite, scaled
from rlmca.models.logprobs_tiles import Head, Tiles, default_tiles

__all__ = ["Tiles", "default_tiles", "head_log_probs"]


def head_log_probs(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    target_N: Tensor,
    *,
    vocab_size: int,
    temperature: float = 1.0,
    group: dist.ProcessGroup | None = None,
    entropy: bool = True,
    tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor | None]:
    """(log-probability of `target_N`, entropy or None), both [N] in fp32 (fp64 for fp64 inputs), at `temperature`.

    The same as `token_log_probs(hidden_NH @ weight_VH.T, ...)` without the logits: the backward makes each tile again.
    `weight_VH` are this rank's rows of a head that is split evenly over `group` (None: one rank); rows at or above
    `vocab_size` are padding and take no part. Products are computed in the type that autocast asks for, else in the
    wider one of the two inputs.

    Every rank of the group gets the same numbers. The gradient that `hidden_NH` gets is this rank's share, from its own
    rows of the head: the caller sums it over the group, as Megatron's `copy_to_tensor_model_parallel_region` and (by a
    reduce-scatter) `gather_from_sequence_parallel_region` do. The weight's gradient is complete. It is summed in fp32
    and goes straight into `weight_VH.main_grad` where Megatron's DDP keeps one. Tokens of which neither output has a
    gradient other than zero take no part in the backward.
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be positive to divide logits by, got {temperature}")
    kind = hidden_NH.device.type
    compute = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else torch.promote_types(hidden_NH.dtype, weight_VH.dtype)
    tiles = tiles or default_tiles(hidden_NH.device)
    passes = choose_passes(hidden_NH.device, hidden_NH.shape[0] * weight_VH.shape[0], tiles.compile_from)
    with torch.autocast(kind, enabled=False):
        head = Head(vocab_size, temperature, group, entropy, tiles, passes, compute)
        return _HeadLogProbs.apply(hidden_NH, weight_VH, target_N, head)


class _HeadLogProbs(torch.autograd.Function):
    """Forward: softmax statistics tile by tile, merged as in the online softmax (Milakov and Gimelshein, 2018).

    What a tile says about a token is (top, total, weighted), see `Passes.statistics`; with the larger top M of two
    tiles, total = sum e^(top-M) total and weighted = sum e^(top-M) (weighted + (top-M) total). The same merges ranks.
    Then log Z = M + log total, logp = z_target - log Z and H = log total - weighted / total.

    The target's logit comes first, by itself: the rounding of a bfloat16 logit would be most of the error of a
    log-probability, and of 1 - p, where the target is likely.
    """

    @staticmethod
    def forward(ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, target_N: Tensor, head: Head) -> tuple[Tensor, Tensor | None]:
        temperature = head.divisor(hidden_NH.device)
        compute_NH, local_N = hidden_NH.to(head.compute), target_N - head.first(weight_VH)
        picked_N, here_N = _target_logits(head, compute_NH, weight_VH, local_N, temperature)
        top_N, total_N, weighted_N = picked_N.where(here_N, float("-inf")), here_N.to(head.precise), torch.zeros_like(picked_N)
        for block, block_CH in head.columns(weight_VH):
            for rows in head.rows(hidden_NH.shape[0]):
                logits_RC = compute_NH[rows] @ block_CH.t()
                _hide(logits_RC, local_N[rows] - block.start)
                _merge((top_N[rows], total_N[rows], weighted_N[rows]), head.passes.statistics(logits_RC, temperature, head.entropy))
        whole_N = top_N.clone()
        head.sum_over_group(whole_N, dist.ReduceOp.MAX)
        _move(top_N, whole_N, total_N, weighted_N)
        sums_3N = torch.stack([total_N, weighted_N, picked_N])
        head.sum_over_group(sums_3N)
        total_N, weighted_N, picked_N = sums_3N
        logp_N = picked_N - whole_N - total_N.log()
        entropy_N = total_N.log() - weighted_N / total_N if head.entropy else None
        ctx.save_for_backward(hidden_NH, weight_VH, local_N, whole_N, total_N, logp_N, entropy_N)
        ctx.head, ctx.main_grad = head, _main_grad(weight_VH)
        ctx.set_materialize_grads(False)
        return logp_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, Tensor | None, None, None]:
        hidden_NH, weight_VH, local_N, top_N, total_N, logp_N, entropy_N = ctx.saved_tensors
        of_hidden, of_weight = ctx.needs_input_grad[:2]
        of_logp_N = torch.zeros_like(logp_N) if grads[0] is None else grads[0]
        of_entropy_2N = None if grads[1] is None else torch.stack([grads[1], entropy_N])
        tokens, live_L = Tokens(hidden_NH, local_N, top_N, total_N, logp_N, of_logp_N, of_entropy_2N).live()
        grad_LH = torch.zeros_like(tokens.hidden_NH, dtype=ctx.head.precise) if of_hidden else None
        own_VH = torch.empty_like(weight_VH) if of_weight and ctx.main_grad is None else None
        add_gradients(ctx.head, tokens, weight_VH, grad_LH, own_VH, ctx.main_grad if of_weight else None)
        if grad_LH is not None:
            grad_LH = grad_LH.to(hidden_NH.dtype)
            if live_L is not None:
                grad_LH = torch.zeros_like(hidden_NH).index_copy_(0, live_L, grad_LH)
        return grad_LH, _told_of_main_grad(weight_VH) if of_weight and own_VH is None else own_VH, None, None


def _target_logits(head: Head, compute_NH: Tensor, weight_VH: Tensor, local_N: Tensor, temperature: Tensor | None) -> tuple[Tensor, Tensor]:
    """(logits of the targets in fp32 or fp64, zero for those of other ranks; which are this rank's)."""
    here_N = (local_N >= 0) & (local_N < head.real(weight_VH))
    picked_N = torch.zeros(local_N.shape, dtype=head.precise, device=local_N.device)
    for rows in head.rows(local_N.shape[0]):
        target_RH = weight_VH.index_select(0, local_N[rows].where(here_N[rows], 0)).to(head.compute).to(head.precise)
        picked_N[rows] = scaled(target_RH.mul_(compute_NH[rows]).sum(1), temperature).where(here_N[rows], 0.0)
    return picked_N, here_N


def _hide(logits_RC: Tensor, column_R: Tensor) -> None:
    """Take the targets in this tile out of its sums: so low that exp gives zero, finite for the product with that zero."""
    overwrite(logits_RC, column_R, max(-1e30, torch.finfo(logits_RC.dtype).min / 2))


def _merge(sofar: tuple[Tensor, Tensor, Tensor], tile: tuple[Tensor, Tensor, Tensor]) -> None:
    """Take a tile's statistics into those of its rows, in place."""
    top_R, total_R, weighted_R = sofar
    tile_top_R, tile_total_R, tile_weighted_R = tile
    whole_R = torch.maximum(top_R, tile_top_R)
    _move(top_R, whole_R, total_R, weighted_R)
    _move(tile_top_R, whole_R, tile_total_R, tile_weighted_R)
    top_R.copy_(whole_R)
    total_R.add_(tile_total_R)
    weighted_R.add_(tile_weighted_R)


def _move(top_R: Tensor, whole_R: Tensor, total_R: Tensor, weighted_R: Tensor) -> None:
    """State total and weighted relative to `whole_R` instead of `top_R`, in place. A top of -inf (nothing seen) has total 0."""
    down_R = (top_R - whole_R).where(total_R > 0, 0.0)
    shrink_R = down_R.exp()
    weighted_R.addcmul_(down_R, total_R).mul_(shrink_R)
    total_R.mul_(shrink_R)


# ---- Megatron's main_grad


def _main_grad(weight_VH: Tensor) -> Tensor | None:
    """The buffer that Megatron's DDP sums this parameter's gradients in, which a layer may write by itself.

    As its own linear layers do under `gradient_accumulation_fusion`. FSDP has its buffers only while they are used.
    """
    known = hasattr(weight_VH, "grad_added_to_main_grad") and not hasattr(weight_VH, "__fsdp_param__")
    return getattr(weight_VH, "main_grad", None) if known else None


def _told_of_main_grad(weight_VH: Any) -> Tensor | None:
    """What autograd gets for a weight whose gradient is in its main_grad already.

    DDP's hook adds `.grad` to main_grad unless the flag says that this is done. Under `overlap_grad_reduce` it wants some
    `.grad` all the same, as the sign that the parameter is ready: memory that nobody reads. A weight that is the
    embedding of this stage too (Megatron marks it `zero_out_wgrad`, and the hook ignores the flag then) gets its
    `.grad` from the embedding; nothing must be added to that.
    """
    weight_VH.grad_added_to_main_grad = True
    return None if getattr(weight_VH, "zero_out_wgrad", False) else torch.empty_like(weight_VH)
