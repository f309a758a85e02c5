"""Advantages of the loop: the KL in the reward, tokens of one reply apart, against plain loops over the same numbers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from rlmca.config import Environment, RunConfig, make_config
from rlmca.rl.advantages import make_advantages
from rlmca.rl.update import update_policy
from rlmca.types import Sample, batch_of_samples
from rlmca.workers import SpmdGroup
from tests.helpers.huggingface import make_hf_engine
from tests.helpers.models import save_model
from tests.rl.test_update import samples


def config(**changes: Any) -> RunConfig:
    values = {"stage": "grpo", "model_name_or_path": "m", "dataset": "d", "output_dir": "o", "rewards": "exact", "rollout_batch_size": 4,
              "num_generations": 4, "max_new_tokens": 6, "temperature": 0.8, **changes}  # fmt: skip
    return make_config(values, env=Environment())


def group_of(engine: Any) -> SpmdGroup:
    return SpmdGroup(engine, engine.parallel)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("qwen3_tied", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def pair(folder: Path) -> tuple[SpmdGroup, SpmdGroup]:
    """A policy that has moved away from its reference."""
    policy, reference = group_of(make_hf_engine(folder, micro_batch=4)), group_of(make_hf_engine(folder, trainable=False))
    update_policy(policy, None, samples(5), config(kl_coef=0.0), step=1, learning_rate=3e-2)
    return policy, reference


def drawn() -> list[Sample]:
    """Rewards that differ, one invalid, one empty reply with a valid reward that must not count."""
    found = samples(1)
    for number, sample in enumerate(found):
        sample.reward = math.sin(number)
    found[2].reward = None
    found[7].reply_ids, found[7].reply_logp = [], []
    return found


def log_ratio(pair: tuple[SpmdGroup, SpmdGroup], found: list[Sample]) -> list[list[float]]:
    """log pi - log pi_ref of every reply token, by forwards of its own."""
    batch = batch_of_samples(found)
    policy_BT, reference_BT = (group.log_probs(batch, temperature=0.8).logp_BT for group in pair)
    return [(policy_BT - reference_BT)[b, len(s.prompt_ids) : s.length].tolist() for b, s in enumerate(found)]


def counted(found: list[Sample]) -> list[int]:
    return [i for i, s in enumerate(found) if s.reward is not None and s.reply_ids]


def test_leave_one_out_compares_rewards_less_their_kl(pair: tuple[SpmdGroup, SpmdGroup]) -> None:
    found = drawn()
    metrics = make_advantages(found, *pair, config(rl_algorithm="rloo", kl_coef=0.5), kl_coef=0.5)
    kl = [sum(row) for row in log_ratio(pair, found)]
    assert max(map(abs, kl)) > 1e-2, "the policies must differ"
    live = counted(found)
    for i, sample in enumerate(found):
        others = [float(found[j].reward or 0) - 0.5 * kl[j] for j in live if found[j].group == sample.group and j != i]
        own = float(sample.reward or 0) - 0.5 * kl[i]
        expected = own - sum(others) / len(others) if i in live else 0.0
        assert sample.advantage == pytest.approx(expected, abs=1e-5) and sample.advantages is None
    assert metrics["reward_kl"] == pytest.approx(0.5 * sum(kl[i] for i in live) / len(live), abs=1e-5)


@pytest.mark.parametrize("name", ["reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_tokens_have_discounted_whitened_returns(name: str, pair: tuple[SpmdGroup, SpmdGroup]) -> None:
    found = drawn()
    cfg = config(rl_algorithm=name, kl_in="reward", kl_estimator="k1", gamma=0.9)
    metrics = make_advantages(found, *pair, cfg, kl_coef=0.3)  # an adaptive coefficient is not the YAML's
    kl, live, returns = log_ratio(pair, found), counted(found), {}
    for i in live:
        last = float(found[i].reward or 0)
        if name.endswith("baseline"):
            mates = [float(found[j].reward or 0) for j in live if found[j].group == found[i].group]
            last -= sum(mates) / len(mates)
        row, total = [], 0.0
        for t in reversed(range(len(kl[i]))):
            total = -0.3 * kl[i][t] + (last if t == len(kl[i]) - 1 else 0.0) + 0.9 * total
            row.insert(0, total)
        returns[i] = row
    flat = torch.tensor([value for row in returns.values() for value in row], dtype=torch.float64)
    for i, sample in enumerate(found):
        if i not in live:
            assert sample.advantages is None and sample.advantage == 0.0
            continue
        expected = ((torch.tensor(returns[i], dtype=torch.float64) - flat.mean()) / (flat.var() + 1e-8).sqrt()).tolist()
        assert sample.advantages == pytest.approx(expected, abs=1e-4)
        assert sample.advantage == pytest.approx(sum(expected) / len(expected), abs=1e-4)
    assert metrics["advantage"] == pytest.approx(0, abs=1e-6) and metrics["advantage_std"] == pytest.approx(1, abs=0.05)
    batch = batch_of_samples([found[i] for i in live])
    assert batch.advantage_BT is not None and batch.advantage_BT[0, found[0].length - 1].item() == pytest.approx(found[0].advantages[-1])  # type: ignore[index]


@pytest.mark.parametrize("name", ["grpo", "rloo", "dr_grpo", "reinforce_plus_plus_baseline", "reinforce_plus_plus"])
def test_an_invalid_reward_reaches_no_other_reply(name: str) -> None:
    """Known fault R10: what the reward functions made of a reply that does not count changes nothing."""
    cfg, kept = config(advantage=name, kl_coef=0), []
    for junk in (0.0, 1e6):
        found = drawn()
        found[7].reward = junk  # the empty reply
        make_advantages(found, None, None, cfg, kl_coef=0.0)  # type: ignore[arg-type]
        kept.append([(s.advantage, s.advantages) for s in found])
    assert kept[0] == kept[1] and any(advantage for advantage, _ in kept[0])


def test_advantages_are_cut_and_those_of_an_earlier_rollout_forgotten() -> None:
    found = drawn()
    for sample in found:
        sample.advantages = [7.0] * len(sample.reply_ids)
    metrics = make_advantages(found, None, None, config(advantage_clip=0.5, kl_coef=0), kl_coef=0.0)  # type: ignore[arg-type]
    assert metrics["advantage_abs_max"] == 0.5 and all(s.advantages is None for s in found)
    for sample in found:
        sample.reward = None
    assert make_advantages(found, None, None, config(kl_coef=0), kl_coef=0.0) == {}  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["gspo", "rloo"])
def test_an_update_does_not_depend_on_micro_batches(name: str, folder: Path) -> None:
    """Two mini-batches of gspo, so that ratios matter; the one step of rloo with its KL in the reward."""
    cfg = config(rl_algorithm=name, mini_batch_size=2 if name == "gspo" else None, clip_ratio_high=0.3 if name == "gspo" else None)
    after = []
    for micro_batch in (1, 2, 4):
        found = drawn()
        policy, reference = group_of(make_hf_engine(folder, micro_batch=micro_batch)), group_of(make_hf_engine(folder, trainable=False))
        make_advantages(found, policy, reference, cfg, kl_coef=cfg.rl.kl_coef)
        update_policy(policy, reference if name == "rloo" else None, found, cfg, step=1, learning_rate=1e-3)
        after.append({key: tensor.clone() for key, tensor in policy.hf_tensors()})
    for other in after[1:]:
        for key, tensor in other.items():
            torch.testing.assert_close(tensor, after[0][key], rtol=0, atol=1e-5, msg=lambda m, k=key: f"{k}: {m}")


@pytest.mark.parametrize("name", ["reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_masked_truncated_replies_are_in_no_whitening(name: str, pair: tuple[SpmdGroup, SpmdGroup]) -> None:
    """What is trained on has mean 0 and spread 1, whatever the replies scored that are left out of the loss."""
    found = drawn()
    for number, sample in enumerate(found):
        sample.finish = "length" if number % 4 == 0 else "stop"
    found[0].reward = 1e6
    cfg = config(rl_algorithm=name, mask_truncated=True, kl_coef=0.0)
    make_advantages(found, *pair, cfg, kl_coef=0.0)
    trained = torch.tensor([a for s in found if not s.truncated and s.reward is not None for a in s.advantages or []], dtype=torch.float64)
    assert not any(any(s.advantages or []) for s in found if s.truncated)
    assert abs(float(trained.mean())) < 1e-6 and float(trained.std()) == pytest.approx(1, abs=1e-6)
