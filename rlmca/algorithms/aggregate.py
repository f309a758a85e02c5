"""From per-token values to rows and to one number: sums of rows, the four aggregations, their global denominators.

Shape legend: B rows, T positions, N live tokens.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from rlmca.algorithms.contract import Counts

LossAgg = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"]


def mask_counts(mask_BT: Tensor) -> dict[str, Tensor]:
    """`tokens` live tokens and `sequences` rows with at least one, float64 scalars.

    A row without a live token (padding of a batch, a masked truncated reply) is in no denominator, as it is
    in no numerator.
    """
    length_B = mask_BT.sum(1)
    return {"tokens": length_B.sum().double(), "sequences": (length_B > 0).sum().double()}


def row_sums(value_N: Tensor, mask_BT: Tensor, index_N: Tensor) -> Tensor:
    """[B] float64 sums of the live tokens' values of each row, differentiable; 0 for a row without one.

    Rows are summed as rows of a matrix, not scattered into their sums: the order of additions is fixed on every device.
    """
    flat = value_N.new_zeros(mask_BT.numel()).index_copy(0, index_N, value_N)
    return flat.view(mask_BT.shape).sum(1, dtype=torch.float64)


def to_tokens(value_B: Tensor, mask_BT: Tensor, index_N: Tensor) -> Tensor:
    """[N]: every live token has the value of its row; differentiable."""
    return value_B[:, None].expand(mask_BT.shape).reshape(-1).index_select(0, index_N)


def token_weights(mask_BT: Tensor, index_N: Tensor, counts: Counts, agg: LossAgg, constant: float | None, like: Tensor) -> Tensor:
    """[N] weights such that the weighted sum of per-token losses over all micro-batches is the aggregate.

    token_mean: 1/tokens; seq_mean_token_mean: 1/(length of the row * sequences); seq_mean_token_sum:
    1/sequences; seq_mean_token_sum_norm: 1/(sequences * constant), as in Dr. GRPO (arXiv 2503.20783).
    `counts` are those of the whole optimizer step; when nothing is live the weights are finite.
    """
    if agg == "token_mean":
        return (1 / counts["tokens"].clamp(min=1)).to(like.dtype).expand(index_N.shape[0])
    sequences = counts["sequences"].clamp(min=1)
    if agg == "seq_mean_token_mean":
        length_N = to_tokens(mask_BT.sum(1), mask_BT, index_N)
        return (1 / (length_N.double() * sequences)).to(like.dtype)
    divisor = sequences if constant is None else sequences * constant
    return (1 / divisor).to(like.dtype).expand(index_N.shape[0])
