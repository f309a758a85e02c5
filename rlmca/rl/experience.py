"""What a scored rollout has to say about itself."""

from __future__ import annotations

from collections.abc import Sequence

import numpy

from rlmca.algorithms.advantages import CONSTANT_SPREAD
from rlmca.types import Sample


def uniform_groups(samples: Sequence[Sample]) -> set[int]:
    """Groups whose replies all have the same reward (also groups without any): no advantage, no policy gradient.

    Replies count as they do for advantages: those with a valid reward and at least one token, equal up to fp32 rounding.
    """
    spread: dict[int, tuple[float, float]] = {}
    for s in samples:
        if s.reward is not None and s.reply_ids:
            low, high = spread.get(s.group, (s.reward, s.reward))
            spread[s.group] = (min(low, s.reward), max(high, s.reward))
    varied = {group for group, (low, high) in spread.items() if high - low > CONSTANT_SPREAD * max(abs(low), abs(high))}
    return {s.group for s in samples} - varied


def reward_statistics(samples: Sequence[Sample]) -> dict[str, float]:
    """Mean and spread of the reward and its parts, reply lengths, truncated share; invalid samples are left out and counted."""
    rewards = numpy.array([s.reward for s in samples if s.reward is not None], dtype=float)
    lengths = numpy.array([len(s.reply_ids) for s in samples], dtype=float)
    result = {
        "reward_invalid": float(sum(s.reward is None for s in samples)),
        "zero_std_groups": len(uniform_groups(samples)) / max(1, len({s.group for s in samples})),
        "reply_length": float(lengths.mean()),
        "reply_length_max": float(lengths.max()),
        "truncated": sum(s.truncated for s in samples) / len(samples),
    }
    if rewards.size:
        result |= {"reward": float(rewards.mean()), "reward_std": float(rewards.std())}
    for name in sorted({name for s in samples for name in s.reward_parts}):
        parts = [value for s in samples if (value := s.reward_parts.get(name)) is not None]
        if parts:
            result[f"reward/{name}"] = sum(parts) / len(parts)
    return result
