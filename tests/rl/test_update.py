"""Mini-batches, baselines and the choice of samples, with a real engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rlmca.algorithms import assign_advantages
from rlmca.config import Environment, RunConfig, make_config
from rlmca.rl.experience import reward_statistics, uniform_groups
from rlmca.rl.update import mini_batches, trainable_samples, update_policy
from rlmca.types import Sample
from rlmca.workers import SpmdGroup
from tests.helpers.engine import Layout, make_engine
from tests.helpers.models import save_model


def config(**changes: Any) -> RunConfig:
    values = {"stage": "grpo", "model_name_or_path": "m", "dataset": "d", "output_dir": "o", "rewards": "exact", "rollout_batch_size": 4,
              "num_generations": 4, "mini_batch_size": 2, "kl_coef": 0.0, "max_new_tokens": 6, **changes}  # fmt: skip
    return make_config(values, env=Environment(use_mca=True))


def samples(seed: int = 0) -> list[Sample]:
    draw = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=draw))

    found = []
    for group in range(4):
        prompt = [number(0, 67) for _ in range(3 + group)]
        for k in range(4):
            reply = [number(0, 67) for _ in range(number(1, 6))]
            found.append(
                Sample(
                    prompt, reply, [0.0] * len(reply), [0] * len(reply), "stop", group=group, k=k, reward=float(k % 2), advantage=k - 1.5
                )
            )
    return found


class Recorder(SpmdGroup):
    """The group, with the metrics of every optimizer step kept."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine, engine.parallel)
        self.steps: list[dict[str, float]] = []
        self.forwards = 0

    def train_batch(self, *args: Any) -> dict[str, float]:
        self.steps.append(super().train_batch(*args))
        return self.steps[-1]

    def log_probs(self, *args: Any, **kwargs: Any) -> Any:
        self.forwards += 1
        return super().log_probs(*args, **kwargs)


@pytest.fixture
def policy(tmp_path: Path) -> Recorder:
    return Recorder(make_engine(save_model("qwen3_tied", tmp_path / "model"), Layout("tp1", micro_batch=3)))


def test_first_ratio_is_exactly_one_without_a_second_forward(policy: Recorder) -> None:
    update_policy(policy, None, samples(), config(), step=1, learning_rate=1e-2)
    assert policy.steps[0]["ratio"] == policy.steps[0]["ratio_max"] == 1.0
    assert policy.steps[0]["approx_kl"] == policy.steps[0]["clip_fraction"] == 0.0
    assert policy.forwards == 1, "the first mini-batch needs no forward of its own, the second does"
    assert abs(policy.steps[1]["ratio_max"] - 1.0) > 1e-3, "after a step the policy has moved away from its baseline"


def test_every_first_ratio_is_one_while_the_policy_stands_still(policy: Recorder) -> None:
    """At rate 0 the baselines of all mini-batches and epochs are those of the first forward."""
    update_policy(policy, None, samples(), config(updates_per_rollout=2), step=1, learning_rate=0.0)
    assert len(policy.steps) == 4
    for metrics in policy.steps:
        assert abs(metrics["ratio"] - 1.0) < 1e-5 and abs(metrics["ratio_max"] - 1.0) < 1e-5


def test_the_gap_is_measured_before_the_policy_moves(policy: Recorder) -> None:
    """With the rollout's log-probs as baseline, later mini-batches see a policy that the rollout did not come from."""
    metrics = update_policy(policy, None, samples(), config(old_logp="rollout"), step=1, learning_rate=1e-2)
    assert len(policy.steps) == 2
    assert metrics["logp_gap_max"] == policy.steps[0]["logp_gap_max"] and metrics["logp_gap"] == policy.steps[0]["logp_gap"]


def test_sampling_temperature_reaches_the_ratio_and_the_gap(policy: Recorder) -> None:
    """Known fault F1: with T != 1 the first on-policy ratio is still 1 and rollout log-probs at T agree with the trainer's."""
    drawn = samples()
    cfg = config(temperature=0.5, mini_batch_size=4)
    from rlmca.types import batch_of_samples

    batch = batch_of_samples(drawn)
    logp_BT = policy.log_probs(batch, temperature=0.5).logp_BT
    for row, sample in enumerate(drawn):
        start = len(sample.prompt_ids)
        sample.reply_logp = logp_BT[row, start : sample.length].tolist()
    update_policy(policy, None, drawn, cfg, step=1, learning_rate=1e-3)
    assert policy.steps[0]["ratio_max"] == 1.0 and policy.steps[0]["logp_gap_max"] < 1e-5
    cold = policy.log_probs(batch, temperature=1.0).logp_BT
    assert (cold - logp_BT).abs().max() > 0.1


def test_mini_batches_keep_groups_whole_and_lose_nothing() -> None:
    drawn = samples()
    parts = mini_batches(drawn, 3, "seed")
    assert sorted(id(s) for part in parts for s in part) == sorted(id(s) for s in drawn)
    groups = [{s.group for s in part} for part in parts]
    assert sum(len(g) for g in groups) == 4 and max(len(g) for g in groups) - min(len(g) for g in groups) <= 1
    assert mini_batches(drawn, 3, "seed") == parts and mini_batches(drawn, 9, "s") != [] and all(mini_batches(drawn, 9, "s"))
    assert mini_batches([], 2, "seed") == []


def test_what_an_update_learns_from() -> None:
    drawn = samples()
    drawn[0].reward = None
    drawn[1].reply_ids, drawn[1].reply_logp = [], []
    drawn[2].finish = "length"
    for sample in drawn[4:8]:
        sample.reward = 0.1 * 7
    assert len(trainable_samples(drawn, config())) == 14
    assert len(trainable_samples(drawn, config(mask_truncated=True))) == 13
    assert uniform_groups(drawn) == {1}
    assert {s.group for s in trainable_samples(drawn, config(drop_zero_std_groups=True))} == {0, 2, 3}
    statistics = reward_statistics(drawn)
    assert statistics["reward_invalid"] == 1 and statistics["zero_std_groups"] == 0.25 and statistics["truncated"] == 1 / 16


def test_groups_without_a_signal_are_those_whose_advantages_are_all_zero() -> None:
    """Small rewards count, an empty reply does not, rounding is no difference."""
    drawn = samples()
    for sample in drawn:
        sample.reward = {0: 1e-7 * sample.k, 1: 1e6, 2: 0.7, 3: 0.0}[sample.group]
    drawn[4].reward = 1e6 * (1 + 1e-7)  # group 1: rounding
    drawn[12].reward, drawn[12].reply_ids, drawn[12].reply_logp = 1.0, [], []  # group 3: no token could carry it
    assign_advantages(drawn, std="sample")
    silent = {group for group in range(4) if not any(s.advantage for s in drawn if s.group == group)}
    assert uniform_groups(drawn) == silent == {1, 2, 3}


def test_a_rollout_without_a_signal_changes_nothing(policy: Recorder) -> None:
    drawn = samples()
    for sample in drawn:
        sample.reward, sample.advantage = 1.0, 0.0
    before = [p.clone() for p in (p for _, p in policy.engine.named_parameters())]
    metrics = update_policy(policy, None, drawn, config(drop_zero_std_groups=True, entropy_coef=0.1), step=1, learning_rate=1.0)
    assert metrics["skipped"] == 1.0 and metrics["updates"] == 0.0 and metrics["used_samples"] == 0.0
    assert all(torch.equal(a, b) for a, b in zip(before, (p for _, p in policy.engine.named_parameters()), strict=True))
