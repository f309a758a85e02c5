"""Whitening of advantages over everything that is trained on together.

Shape legend: B rows, T token positions.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rlmca.algorithms.numeric import live_index, take

EPS = 1e-8


def whiten(values_BT: Tensor, mask_BT: Tensor, *, unbiased: bool = True, reduce: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """Live values minus their mean, over their standard deviation: (x - mean) / sqrt(var + 1e-8), zero off the mask; [B, T].

    Mean and variance (over n - 1, or over n when not `unbiased`) are those of all ranks' live values: `reduce` sums a
    tensor over every rank that holds a share of them, data-parallel and context-parallel ones alike. Each rank calls it
    twice, also one without a live value, so no rank waits for another. With fewer than two live values in all there is
    no spread: they come back as they are. Deviations are squared after centring; E[x^2] - E[x]^2 would lose all digits
    of values far from zero (Chan, Golub and LeVeque 1983, "Algorithms for Computing the Sample Variance").
    """
    together = reduce or (lambda total: total)
    index_N = live_index(mask_BT)
    live_N = take(values_BT, index_N)
    exact_N = live_N.double()
    total, count = together(torch.stack([exact_N.sum(), exact_N.new_full((), len(index_N))]))
    centred_N = exact_N - total / count.clamp(min=1)
    squares = together(centred_N.square().sum().reshape(1))[0]
    if count > 1:
        variance = squares / (count - 1 if unbiased else count)
        live_N = (centred_N / (variance + EPS).sqrt()).to(live_N.dtype)
    out_BT = torch.zeros(mask_BT.shape, dtype=live_N.dtype, device=live_N.device)
    return out_BT.view(-1).index_copy(0, index_N, live_N).view(mask_BT.shape)
