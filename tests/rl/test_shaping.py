"""Rewards between the functions and the advantages: punishment for length, normalisation."""

from __future__ import annotations

import json
from typing import Any

import numpy
import pytest

from rlmca.algorithms import assign_advantages
from rlmca.algorithms.moments import RunningMoments
from rlmca.config import Environment, RunConfig, make_config
from rlmca.rl.experience import uniform_groups
from rlmca.rl.shaping import overlong, shape_rewards
from rlmca.run.evaluate import is_right
from rlmca.types import Sample


def config(**changes: Any) -> RunConfig:
    values = {
        "stage": "grpo",
        "model_name_or_path": "m",
        "dataset": "d",
        "output_dir": "o",
        "rewards": "exact",
        "max_new_tokens": 20,
        **changes,
    }
    return make_config(values, env=Environment(use_mca=True))


def sample(reward: float | None, length: int = 5, group: int = 0) -> Sample:
    return Sample([1], [2] * length, [0.0] * length, [0] * length, "stop", group=group, reward=reward, reward_parts={"exact": reward})


def test_soft_punishment_is_that_of_the_paper() -> None:
    """arXiv 2503.14476, eq. 13 at its own sizes: 20480 tokens at most, a buffer of 4096."""
    assert [overlong(n, 20480, 4096) for n in (1, 16384, 18432, 20480, 30000)] == [0.0, 0.0, -0.5, -1.0, -1.0]
    assert overlong(16385, 20480, 4096) == pytest.approx(-1 / 4096)


def test_length_costs_reward_and_does_not_judge() -> None:
    samples = [sample(1.0, 16), sample(1.0, 18), sample(1.0, 20), sample(None, 20)]
    metrics = shape_rewards(samples, config(overlong_buffer=4, overlong_penalty=0.6), RunningMoments())
    assert [s.reward for s in samples] == pytest.approx([1.0, 0.7, 0.4, None])
    assert [s.raw_reward for s in samples] == [1.0, 1.0, 1.0, None]
    assert [is_right(s) for s in samples] == [True, True, True, False]
    assert list(samples[2].reward_parts) == ["exact", "overlong"] and "overlong" not in samples[3].reward_parts
    assert metrics["reward/overlong"] == pytest.approx(-0.3) and metrics["reward_shaped"] == pytest.approx(0.7)


def test_nothing_changes_without_the_keys() -> None:
    samples = [sample(1.0), sample(0.25, 20)]
    assert shape_rewards(samples, config(), RunningMoments()) == {}
    assert [(s.reward, s.raw_reward) for s in samples] == [(1.0, None), (0.25, None)]


def test_rewards_of_a_rollout_are_normalised() -> None:
    rewards = [3.0, 1.0, None, 4.0, 1.0, 5.0]
    samples = [sample(reward) for reward in rewards] + [sample(100.0, 0)]
    shape_rewards(samples, config(reward_normalize="batch"), RunningMoments())
    valid = numpy.array([r for r in rewards if r is not None])
    expected = (valid - valid.mean()) / valid.std(ddof=1)
    assert [s.reward for s in samples[:-1] if s.reward is not None] == pytest.approx(expected.tolist(), rel=1e-6)
    assert samples[2].reward is None and [s.raw_reward for s in samples[:-1]] == rewards


def test_running_moments_are_those_of_all_rewards_and_are_saved() -> None:
    draw = numpy.random.RandomState(0)
    seen, moments = [1e6 + draw.randn(8) for _ in range(3)], RunningMoments()
    for part in seen:
        samples = [sample(float(value)) for value in part]
        shape_rewards(samples, config(reward_normalize="running"), moments)
        saved = json.loads(json.dumps(moments.state_dict()))
        moments = RunningMoments()
        moments.load_state_dict(saved)
    whole = numpy.concatenate(seen)
    assert [s.reward for s in samples] == pytest.approx(((seen[-1] - whole.mean()) / whole.std(ddof=1)).tolist(), rel=1e-5)


@pytest.mark.parametrize("mode", ["batch", "running"])
def test_rounding_of_equal_rewards_is_not_blown_up(mode: str) -> None:
    nearly = [sample(0.7, group=0), sample(0.7 * (1 + 1e-8), group=0), sample(0.7 * (1 - 1e-8), group=0)]
    others = [sample(0.69, group=1), sample(0.71, group=1)]
    for samples in (nearly, [*nearly, *others]):
        for s in samples:
            s.reward = s.raw_reward if s.raw_reward is not None else s.reward
        shape_rewards(samples, config(reward_normalize=mode), RunningMoments())
        assign_advantages(samples, std="sample", eps=1e-6)
        assert 0 in uniform_groups(samples) and [s.advantage for s in nearly] == [0.0, 0.0, 0.0]
    assert others[0].advantage == -others[1].advantage != 0
