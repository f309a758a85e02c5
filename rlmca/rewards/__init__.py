"""From samples to scores: rules, verifiers and user functions. Knows no engine."""

from __future__ import annotations

from rlmca.rewards.base import Failure, Reward, Spec, Verdict
from rlmca.rewards.registry import REGISTRY
from rlmca.rewards.reward_set import RewardError, RewardSet, build_rewards, rewards_of

__all__ = ["REGISTRY", "Failure", "Reward", "RewardError", "RewardSet", "Spec", "Verdict", "build_rewards", "rewards_of"]
