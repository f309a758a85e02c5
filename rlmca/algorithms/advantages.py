"""Group-relative advantages (GRPO, arXiv 2402.03300, section 4.1.2).

Shape legend: N rewards, G groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from rlmca.types import Sample

AdvantageStd = Literal["population", "sample", "none"]

CONSTANT_SPREAD = 4 * torch.finfo(torch.float32).eps
"""Rewards that differ by less than this, relative to the largest of the group, are one value and its rounding."""


def group_advantages(
    rewards: Tensor | Sequence[float | None],
    group_ids: Tensor | Sequence[int],
    *,
    std: AdvantageStd = "population",
    eps: float = 1e-6,
) -> Tensor:
    """(r - mean) / (std + eps) inside each prompt group, [N] in the order given.

    Groups may have unequal sizes and their members may come in any order. A `None` or nan reward is invalid:
    it enters no mean and gets 0. So does a group of one, and every member of a constant group, constant up
    to fp32 rounding included (seven rewards of 0.7 must not be blown up by a std of 1e-8).

    std: "population" divides by n, "sample" by n - 1, "none" only subtracts the mean.
    Returns float64 for a list or float64 rewards, else float32. Computed in float64, in the centred form.
    Raises ValueError for lengths that differ, an infinite reward or an unknown `std`.
    """
    if std not in ("population", "sample", "none"):
        raise ValueError(f"advantage std {std!r} is unknown; write population, sample or none")
    if not isinstance(rewards, Tensor):
        rewards = torch.tensor([float("nan") if r is None else float(r) for r in rewards], dtype=torch.float64)
    group_N = torch.as_tensor(group_ids, device=rewards.device)
    if rewards.ndim != 1 or group_N.shape != rewards.shape:
        raise ValueError(f"rewards {tuple(rewards.shape)} and group ids {tuple(group_N.shape)} must be two lists of one length")
    reward_N = rewards.double()
    if bool(reward_N.isinf().any()):
        at = int(reward_N.isinf().nonzero()[0, 0])
        raise ValueError(f"reward {at} is infinite; a reward must be a finite number, or None when it is invalid")
    out = torch.zeros_like(reward_N)
    valid_N = reward_N.isfinite()
    if bool(valid_N.any()):
        out[valid_N] = _standardised(reward_N[valid_N], group_N[valid_N], std, eps)
    return out.to(torch.promote_types(rewards.dtype, torch.float32))


def _standardised(reward_N: Tensor, group_N: Tensor, std: AdvantageStd, eps: float) -> Tensor:
    _, group_N = torch.unique(group_N, return_inverse=True)
    G = int(group_N.max()) + 1

    def total(value_N: Tensor) -> Tensor:
        return value_N.new_zeros(G).index_add_(0, group_N, value_N)

    def extreme(value_N: Tensor, reduce: str) -> Tensor:
        return value_N.new_zeros(G).scatter_reduce_(0, group_N, value_N, reduce, include_self=False)

    n_G = total(torch.ones_like(reward_N))
    centred_N = reward_N - (total(reward_N) / n_G)[group_N]
    if std == "none":
        advantage_N = centred_N
    else:
        divisor_G = n_G if std == "population" else (n_G - 1).clamp(min=1)
        advantage_N = centred_N / ((total(centred_N.square()) / divisor_G).sqrt() + eps)[group_N]
    spread_G = extreme(reward_N, "amax") - extreme(reward_N, "amin")
    constant_G = spread_G <= CONSTANT_SPREAD * extreme(reward_N.abs(), "amax")
    return advantage_N.masked_fill(constant_G[group_N], 0.0)


def assign_advantages(samples: Sequence[Sample], *, std: AdvantageStd = "population", eps: float = 1e-6, clip: float | None = None) -> None:
    """Sets `advantage` of every sample from its reward and group.

    Samples without a valid reward, and empty replies (no token could carry the credit), stay outside the
    group's statistics and get 0. `clip` bounds the result to [-clip, clip].
    """
    rewards = [s.reward if s.reply_ids else None for s in samples]
    advantage_N = group_advantages(rewards, [s.group for s in samples], std=std, eps=eps)
    if clip is not None:
        advantage_N = advantage_N.clamp(-clip, clip)
    for sample, advantage in zip(samples, advantage_N.tolist(), strict=True):
        sample.advantage = advantage
