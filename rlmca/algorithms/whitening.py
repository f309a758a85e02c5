"""Whitening of advantages over everything that is trained on together.

Shape legend: B rows, T token positions.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rlmca.algorithms.numeric import live_index, take

EPS = 1e-8


def whiten(value_BT: Tensor, mask_BT: Tensor, sum_over_ranks: Callable[[Tensor], Tensor] = lambda total: total) -> Tensor:
    """Live values minus their mean, over their standard deviation: (x - mean) / sqrt(var + 1e-8), zero off the mask; [B, T].

    Mean and variance (unbiased, n - 1) are those of all ranks' live values: `sum_over_ranks` adds a tensor up over every
    rank that holds a share of them, data-parallel and context-parallel ones alike. Each rank calls it twice, also one
    without a live value, so no rank waits for another. With fewer than two live values in all there is no spread: they
    come back as they are. Deviations are squared after centring; E[x^2] - E[x]^2 would lose all digits of values far
    from zero (Chan, Golub and LeVeque 1983, "Algorithms for Computing the Sample Variance").
    """
    index_N = live_index(mask_BT)
    live_N = take(value_BT, index_N)
    total, count = sum_over_ranks(torch.stack([live_N.double().sum(), torch.full((), len(live_N), dtype=torch.float64).to(live_N.device)]))
    centred_N = live_N.double() - total / count.clamp(min=1)
    squares = sum_over_ranks(centred_N.square().sum().reshape(1))[0]
    if count > 1:
        live_N = (centred_N / (squares / (count - 1) + EPS).sqrt()).to(live_N.dtype)
    return torch.zeros(mask_BT.shape, dtype=live_N.dtype, device=live_N.device).view(-1).index_copy(0, index_N, live_N).view(mask_BT.shape)
