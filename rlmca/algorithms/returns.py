"""Credit along the tokens of a reply: discounted returns, generalised advantage estimation, REINFORCE++.

Shape legend: B rows, T positions, N live tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rlmca.algorithms.advantages import Ids, group_advantages
from rlmca.algorithms.whitening import whiten


def gae(rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """(advantages, returns), both [B, T], of token rewards and values [B, T]; 0 where `mask` [B, T] is.

    delta_t = r_t + gamma V_t' - V_t, A_t = delta_t + gamma lam A_t', returns = A + V (arXiv 1506.02438, eq. 16), with t'
    the next live position of the row: a masked one (a tool's answer between two turns, padding) is no step of time, holds
    anything, and nothing is bootstrapped from it. Behind the last live token the value is 0. Computed in float64;
    float64 for float64 rewards or values, else float32.
    """
    mask_BT = mask.bool()
    reward_BT, value_BT = (x.detach().double().masked_fill(~mask_BT, 0.0) for x in (rewards, values))
    advantage_BT = torch.zeros_like(reward_BT)
    next_value_B = next_advantage_B = reward_BT.new_zeros(len(reward_BT))
    for t in reversed(range(reward_BT.shape[1])):
        live_B = mask_BT[:, t]
        delta_B = reward_BT[:, t] + gamma * next_value_B - value_BT[:, t]
        next_advantage_B = torch.where(live_B, delta_B + gamma * lam * next_advantage_B, next_advantage_B)
        next_value_B = torch.where(live_B, value_BT[:, t], next_value_B)
        advantage_BT[:, t] = torch.where(live_B, next_advantage_B, 0.0)
    dtype = torch.promote_types(torch.promote_types(rewards.dtype, values.dtype), torch.float32)
    return advantage_BT.to(dtype), (advantage_BT + value_BT).to(dtype)


def discounted_returns(rewards: Tensor, mask: Tensor, *, gamma: float) -> Tensor:
    """G_t = r_t + gamma G_t' over live positions, t' the next one of the row; [B, T], 0 where `mask` is. Types as in `gae`."""
    advantages, _ = gae(rewards, torch.zeros_like(rewards), mask, gamma=gamma, lam=1.0)
    return advantages


def at_last_token(values: Tensor, mask: Tensor) -> Tensor:
    """[B] values put at each row's last live position, [B, T], zero elsewhere; a row without a live token gets none."""
    mask_BT = mask.bool()
    behind_BT = mask_BT.flip(1).cumsum(1).flip(1)  # live tokens from here to the end
    return torch.where(mask_BT & (behind_BT == 1), values[:, None], 0.0)


def reinforce_plus_plus(
    rewards: Tensor | Sequence[float | None],
    mask: Tensor,
    *,
    kl: Tensor | None = None,
    kl_coef: float = 0.0,
    gamma: float = 1.0,
    group_ids: Ids | None = None,
    unbiased: bool = True,
    reduce: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """(returns, whitened returns), both [B, T], zero off the mask: REINFORCE++ (arXiv 2501.03262, section 3).

    Token reward: -kl_coef * `kl` [B, T] (k1 of the policy that sampled against the reference), plus the reply's reward at
    its last live token; then discounted returns; then whitened over all live tokens of all ranks (`whiten`: `unbiased`,
    `reduce`). With `group_ids` the reply's reward is first less the mean of its group (the `_baseline` form), a group of
    one being 0. A `None` or nan reward is invalid: its row is 0 and in no statistic. Raises ValueError for an infinite
    reward or a `kl_coef` without `kl`.
    """
    if kl_coef and kl is None:
        raise ValueError(f"kl_coef is {kl_coef} but no kl is given; give both, or leave both out when the KL is in the loss")
    if not isinstance(rewards, Tensor):
        rewards = torch.tensor([float("nan") if r is None else float(r) for r in rewards], dtype=torch.float64)
    rewards = rewards.to(mask.device)
    if bool(rewards.isinf().any()):
        raise ValueError(f"reward {int(rewards.isinf().nonzero()[0, 0])} is infinite; a reward must be a finite number, or None")
    mask_BT = mask.bool() & rewards.isfinite()[:, None]
    if group_ids is not None:
        rewards = group_advantages(rewards, group_ids, std="none", valid=mask_BT.any(1))
    dtype = torch.promote_types(rewards.dtype, torch.float32)
    reward_BT = at_last_token(rewards.double(), mask_BT)
    if kl is not None and kl_coef:
        dtype = torch.promote_types(dtype, kl.dtype)
        reward_BT = reward_BT - kl_coef * kl.detach().double()
    returns_BT = discounted_returns(reward_BT, mask_BT, gamma=gamma)
    return returns_BT.to(dtype), whiten(returns_BT, mask_BT, unbiased=unbiased, reduce=reduce).to(dtype)
