"""Working precision, bounded log-ratios, and the handling of live and non-finite values."""

from __future__ import annotations

import torch
from torch import Tensor

LOG_RATIO_BOUND = 20.0


def working(value: Tensor) -> Tensor:
    """`value` in the precision of the arithmetic: at least fp32; float64 stays float64."""
    return value.to(torch.promote_types(value.dtype, torch.float32))


def clamp_log_ratio(value: Tensor) -> Tensor:
    """Bounded to +-20, so that `exp` neither overflows nor makes one token outweigh a batch."""
    return value.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def live_index(mask_BT: Tensor) -> Tensor:
    """Flat positions [N] of the live tokens, in order.

    Losses gather these first and compute on [N] only: what stands at a masked position is never read, so it
    can be inf or nan without reaching loss or gradient, and padding costs nothing.
    """
    return mask_BT.reshape(-1).nonzero().squeeze(1)


def take(value_BT: Tensor, index_N: Tensor) -> Tensor:
    """[N] values at flat positions, in working precision."""
    return working(value_BT.reshape(-1).index_select(0, index_N))


def poison(loss: Tensor, carrier_N: Tensor, *watched_N: Tensor) -> Tensor:
    """`loss`, unchanged while every watched value is finite; otherwise nan in value and in gradient.

    Clamps and minima give a non-finite token a gradient of exactly zero, which would hide it from a check
    of the gradient norm. Adding nan * `carrier_N` makes both the loss and the gradient say so.
    """
    watch = torch.zeros((), dtype=carrier_N.dtype, device=carrier_N.device)
    for value in watched_N:
        watch = watch + value.detach().sum() * 0
    return loss + (watch * carrier_N).sum()
