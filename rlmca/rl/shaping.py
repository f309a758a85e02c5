"""What is done to rewards between the reward functions and the advantages."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy

from rlmca.algorithms.moments import RunningMoments
from rlmca.config import RunConfig
from rlmca.rl.experience import uniform_groups
from rlmca.types import Sample

PART = "overlong"
"""Name of the punishment for length among a sample's reward parts."""


def overlong(length: int, longest: int, buffer: int) -> float:
    """Soft punishment of a reply of `length` tokens, from 0 (at most longest - buffer) falling linearly to -1 (longest).

    DAPO (arXiv 2503.14476), eq. 13. `buffer` is at least 1.
    """
    return max(-1.0, min(0.0, (longest - buffer - length) / buffer))


def shape_rewards(samples: Sequence[Sample], cfg: RunConfig, moments: RunningMoments) -> dict[str, float]:
    """Changes `reward` as `overlong_buffer` and `reward_normalize` say, and keeps what it was in `raw_reward`.

    Invalid samples stay invalid. The punishment stands last among the parts, so that the first still judges accuracy; it
    is taken off before normalisation. `moments` are those of all rollouts so far. Returns metrics; without either key
    nothing changes and there are none.
    """
    g = cfg.gathering
    if not g.overlong_buffer and g.reward_normalize == "none":
        return {}
    for sample in samples:
        sample.raw_reward = sample.reward
    metrics: dict[str, float] = {}
    if g.overlong_buffer:
        metrics |= _punish(samples, cfg.generation.max_new_tokens, g.overlong_buffer, g.overlong_penalty)
    if g.reward_normalize != "none":
        _normalize(samples, moments if g.reward_normalize == "running" else RunningMoments())
    shaped = numpy.array([s.reward for s in samples if s.reward is not None], dtype=float)
    if shaped.size:
        metrics |= {"reward_shaped": float(shaped.mean()), "reward_shaped_std": float(shaped.std())}
    return metrics


def _punish(samples: Sequence[Sample], longest: int, buffer: int, penalty: float) -> dict[str, float]:
    taken = []
    for sample in samples:
        if sample.reward is not None:
            off = penalty * overlong(len(sample.reply_ids), longest, buffer)
            sample.reward_parts = {**sample.reward_parts, PART: off}
            sample.reward += off
            taken.append(off)
    return {f"reward/{PART}": math.fsum(taken) / len(taken)} if taken else {}


def _normalize(samples: Sequence[Sample], moments: RunningMoments) -> None:
    """(r - mean) / std, all replies of a group without a signal the same, whatever rounding would make of them.

    Empty replies carry no credit and have no part in the moments, as in advantages.
    """
    silent = uniform_groups(samples)
    same: dict[int, float] = {}
    for sample in samples:
        if sample.reward is not None and sample.reply_ids and sample.group in silent:
            sample.reward = same.setdefault(sample.group, sample.reward)
    moments.update([s.reward for s in samples if s.reply_ids])
    for sample in samples:
        if sample.reward is not None:
            sample.reward = moments.normalise(sample.reward)
