"""Keys of rewards: which functions score a reply, with what weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlmca.config.fields import option


@dataclass(frozen=True)
class RewardSpec:
    """One reward function. `name`: a registered one, path/file.py:function, or package.module:function."""

    name: str
    weight: float = 1.0
    options: Mapping[str, Any] = field(default_factory=dict)


REGISTERED_REWARDS = (
    *("exact", "choice", "math", "json", "code", "reasoning_gym"),
    *("format", "length", "length_bonus", "overlong", "repetition", "think", "judge", "hybrid"),
)
REWARDS_LATER: Mapping[str, str] = {
    name: f"reward {name}: not in this version; nearest: a function of your own, path/file.py:function"
    for name in ("reward_model", "critic", "vector_mse", "scalar_regression")
}


@dataclass(frozen=True)
class RewardsConfig:
    """Reward functions and the workers that run them."""

    rewards: list[RewardSpec] = option([], "Reward functions: names, or {name, weight, options}.")
    reward_workers: int = option(1, "Processes that run slow checks, and programs of replies at a time.", at_least=1)
    reward_timeout: float = option(10.0, "Seconds that one check may take.", above=0)
    reward_strict: bool = option(False, "End the run at the first score that is invalid (None, an exception, no number).")
