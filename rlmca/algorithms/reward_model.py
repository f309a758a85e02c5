"""The pairwise loss of reward models (Bradley and Terry 1952, "Rank analysis of incomplete block designs")."""

from __future__ import annotations

import torch
from torch import Tensor

from rlmca.algorithms.numeric import working


def bradley_terry(chosen: Tensor, rejected: Tensor) -> tuple[Tensor, Tensor]:
    """(loss, accuracy) of scores of pairs, [P] each: mean of -log sigmoid(r_chosen - r_rejected); share ranked right.

    A tie is not ranked right, so accuracy and that of the swapped pairs add up to 1 only without ties. No pairs: 0 and 0.
    Raises ValueError for shapes that differ.
    """
    if chosen.shape != rejected.shape:
        raise ValueError(f"{tuple(chosen.shape)} chosen scores and {tuple(rejected.shape)} rejected ones do not pair up")
    pairs = max(chosen.numel(), 1)
    gap = working(chosen) - working(rejected)
    loss = -torch.nn.functional.logsigmoid(gap).sum() / pairs
    return loss, (gap.detach() > 0).sum().to(loss.dtype) / pairs
