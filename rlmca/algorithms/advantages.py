"""Advantages of whole replies against the other replies to the same prompt.

GRPO (arXiv 2402.03300, section 4.1.2), RLOO (arXiv 2402.14740, section 3.2), Dr. GRPO (arXiv 2503.20783: std "none").

Shape legend: N rewards, M rollouts (rewards, each counted once), G groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from rlmca.types import Sample

AdvantageStd = Literal["population", "sample", "none"]
GroupAdvantage = Literal["grpo", "rloo", "dr_grpo"]
Ids = Tensor | Sequence[int]
Rewards = Tensor | Sequence[float | None]

CONSTANT_SPREAD = 4 * torch.finfo(torch.float32).eps
"""Rewards that differ by less than this, relative to the largest of the group, are one value and its rounding."""


def group_advantages(
    rewards: Rewards,
    group_ids: Ids,
    *,
    std: AdvantageStd = "population",
    eps: float = 1e-6,
    rollout_ids: Ids | None = None,
    valid: Tensor | Sequence[bool] | None = None,
) -> Tensor:
    """(r - mean) / (std + eps) inside each prompt group, [N] in the order given.

    Groups may have unequal sizes and their members may come in any order. A `None` or nan reward is invalid:
    it enters no mean and gets 0; so is any that `valid` marks False, whatever it is. A group of one gets 0, and every
    member of a constant group, constant up to fp32 rounding included (seven rewards of 0.7 must not be blown up by a std
    of 1e-8). `rollout_ids`: rows with the same id (of the same group) are pieces of one rollout with one reward; it
    counts once in the statistics and all its rows get its advantage.

    std: "population" divides by n, "sample" by n - 1, "none" only subtracts the mean.
    Returns float64 for a list or float64 rewards, else float32. Computed in float64, in the centred form.
    Raises ValueError for lengths that differ, an infinite reward, pieces of a rollout whose rewards differ, or an
    unknown `std`.
    """
    if std not in ("population", "sample", "none"):
        raise ValueError(f"advantage std {std!r} is unknown; write population, sample or none")

    def rule(centred_M: Tensor, group_M: Tensor, n_G: Tensor) -> Tensor:
        if std == "none":
            return centred_M
        divisor_G = n_G if std == "population" else (n_G - 1).clamp(min=1)
        spread_G = (_total(centred_M.square(), group_M, n_G) / divisor_G).sqrt()
        return centred_M / (spread_G + eps)[group_M]

    return _in_groups(rewards, group_ids, rollout_ids, valid, rule)


def leave_one_out(
    rewards: Rewards, group_ids: Ids, *, rollout_ids: Ids | None = None, valid: Tensor | Sequence[bool] | None = None
) -> Tensor:
    """r minus the mean of the *other* members of its group, [N]: (r - mean) * n / (n - 1).

    Invalid rewards, groups of one, constant groups, rollouts in pieces, result type and errors: as in `group_advantages`.
    """

    def rule(centred_M: Tensor, group_M: Tensor, n_G: Tensor) -> Tensor:
        return centred_M * (n_G / (n_G - 1).clamp(min=1))[group_M]

    return _in_groups(rewards, group_ids, rollout_ids, valid, rule)


def _in_groups(
    rewards: Rewards,
    group_ids: Ids,
    rollout_ids: Ids | None,
    valid: Tensor | Sequence[bool] | None,
    rule: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> Tensor:
    """`rule(rewards minus their group's mean, groups, sizes)` of the valid rewards, 0 for the others and constant groups."""
    if not isinstance(rewards, Tensor):
        rewards = torch.tensor([float("nan") if r is None else float(r) for r in rewards], dtype=torch.float64)
    group_N = torch.as_tensor(group_ids, device=rewards.device)
    if rewards.ndim != 1 or group_N.shape != rewards.shape:
        raise ValueError(f"rewards {tuple(rewards.shape)} and group ids {tuple(group_N.shape)} must be two lists of one length")
    rollout_N = torch.arange(len(rewards)) if rollout_ids is None else torch.as_tensor(rollout_ids)
    if rollout_N.shape != rewards.shape:
        raise ValueError(f"rewards {tuple(rewards.shape)} and rollout ids {tuple(rollout_N.shape)} must be two lists of one length")
    reward_N = rewards.double()
    if valid is not None:
        reward_N = reward_N.masked_fill(~torch.as_tensor(valid, device=rewards.device).bool(), float("nan"))
    if bool(reward_N.isinf().any()):
        at = int(reward_N.isinf().nonzero()[0, 0])
        raise ValueError(f"reward {at} is infinite; a reward must be a finite number, or None when it is invalid")
    out = torch.zeros_like(reward_N)
    valid_N = reward_N.isfinite()
    if bool(valid_N.any()):
        place_N, reward_M, group_M = _rollouts(reward_N[valid_N], group_N[valid_N], rollout_N.to(group_N)[valid_N])
        out[valid_N] = _centred(reward_M, group_M, rule)[place_N]
    return out.to(torch.promote_types(rewards.dtype, torch.float32))


def _rollouts(reward_N: Tensor, group_N: Tensor, rollout_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(which rollout each row is of, reward of each rollout, group of each rollout)."""
    key_M2, place_N = torch.unique(torch.stack([group_N, rollout_N], 1), dim=0, return_inverse=True)
    reward_M = reward_N.new_zeros(len(key_M2)).index_copy(0, place_N, reward_N)  # one of its rows; they must all agree
    differs_N = reward_M[place_N] != reward_N
    if bool(differs_N.any()):
        group, rollout = key_M2[place_N[differs_N][0]].tolist()
        raise ValueError(f"the rows of rollout {rollout} of group {group} have different rewards; a rollout has one reward")
    return place_N, reward_M, key_M2[:, 0]


def _centred(reward_M: Tensor, group_M: Tensor, rule: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
    _, group_M = torch.unique(group_M, return_inverse=True)
    like_G = reward_M.new_zeros(int(group_M.max()) + 1)

    def extreme(value_M: Tensor, reduce: str) -> Tensor:
        return like_G.scatter_reduce(0, group_M, value_M, reduce, include_self=False)

    n_G = _total(torch.ones_like(reward_M), group_M, like_G)
    advantage_M = rule(reward_M - (_total(reward_M, group_M, like_G) / n_G)[group_M], group_M, n_G)
    spread_G = extreme(reward_M, "amax") - extreme(reward_M, "amin")
    constant_G = spread_G <= CONSTANT_SPREAD * extreme(reward_M.abs(), "amax")
    return advantage_M.masked_fill(constant_G[group_M], 0.0)


def _total(value_M: Tensor, group_M: Tensor, like_G: Tensor) -> Tensor:
    return torch.zeros_like(like_G).index_add_(0, group_M, value_M)


def assign_advantages(
    samples: Sequence[Sample],
    *,
    kind: GroupAdvantage = "grpo",
    std: AdvantageStd = "population",
    eps: float = 1e-6,
    clip: float | None = None,
) -> None:
    """Sets `advantage` of every sample from its reward and group.

    kind: grpo (`group_advantages`), dr_grpo (the same without a division), rloo (`leave_one_out`); `std` and `eps` are
    those of grpo. Samples without a valid reward, and empty replies (no token could carry the credit), stay outside the
    group's statistics and get 0. `clip` bounds the result to [-clip, clip].
    """
    rewards, groups = [s.reward for s in samples], [s.group for s in samples]
    valid = [bool(s.reply_ids) for s in samples]
    if kind == "rloo":
        advantage_N = leave_one_out(rewards, groups, valid=valid)
    elif kind in ("grpo", "dr_grpo"):
        advantage_N = group_advantages(rewards, groups, std=std if kind == "grpo" else "none", eps=eps, valid=valid)
    else:
        raise ValueError(f"advantage {kind!r} is not one of replies against each other; write grpo, rloo or dr_grpo")
    if clip is not None:
        advantage_N = advantage_N.clamp(-clip, clip)
    for sample, advantage in zip(samples, advantage_N.tolist(), strict=True):
        sample.advantage = advantage
