"""Each preset end to end in this process: a run of two steps whose first loss and advantages are recomputed from its rollout."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch

from rlmca.algorithms import policy_loss
from rlmca.config import Environment, RunConfig, make_config
from rlmca.config.presets import PRESETS
from rlmca.rl import grpo
from rlmca.rl.update import policy_options
from rlmca.run.rollouts import read_rollout
from tests.helpers.runs import grpo_options, log_lines, make_project, write_reward


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_project(tmp_path_factory.mktemp("project"), rows=8)
    write_reward(folder)
    (folder / "varied.py").write_text("def varied(samples):\n    return [sum(map(ord, s.reply)) % 7 / 6 for s in samples]\n")
    return folder


def configured(project: Path, output: Path, **changes: Any) -> RunConfig:
    """With rewards that differ within every group, whatever a random model writes."""
    varied = [{"name": f"{project / 'varied.py'}:varied"}]
    values = grpo_options(
        project, output, **{"rollout_batch_size": 2, "max_steps": 2, "save_hf_model": False, "rewards": varied, **changes}
    )
    if "mini_batch_size" not in changes:
        del values["mini_batch_size"]
    return make_config(values, env=Environment())


def expected_advantages(cfg: RunConfig, rows: list[dict[str, Any]]) -> list[list[float]]:
    """Of every token, by the formulas of each algorithm in plain Python; the reference is the policy, so its KL is 0."""
    rl, found = cfg.rl, []
    for row in rows:
        rewards = [r["reward"] for r in rows if r["group"] == row["group"]]
        mean, n = sum(rewards) / len(rewards), len(rewards)
        value = row["reward"] - mean
        if rl.advantage == "rloo":
            value *= n / (n - 1)
        elif rl.advantage == "grpo":
            spread = statistics.pstdev(rewards) if rl.advantage_std == "population" else statistics.stdev(rewards)
            value /= spread + rl.advantage_eps
        elif rl.advantage == "reinforce_plus_plus":
            value = row["reward"]
        found.append([value] * len(row["reply_ids"]))
    if rl.token_level:
        flat = [value for row in found for value in row]
        mean, spread = statistics.mean(flat), statistics.stdev(flat)
        found = [[(value - mean) / spread for value in row] for row in found]
    return found


def padded(rows: list[list[float]]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row, dtype=torch.float64) for row in rows], batch_first=True)


@pytest.mark.parametrize("name", PRESETS)
def test_a_run_of_the_preset_is_its_formula(name: str, project: Path, tmp_path: Path) -> None:
    cfg = configured(project, tmp_path / "run", rl_algorithm=name)
    grpo.run(cfg)
    first, second = log_lines(tmp_path / "run")
    rows = list(read_rollout(tmp_path / "run" / "rollouts" / "step-1.jsonl.zst"))
    advantages = expected_advantages(cfg, rows)
    assert any(abs(value) > 0.1 for row in advantages for value in row), "rewards must differ"
    for row, expected in zip(rows, advantages, strict=True):
        assert row.get("advantages", [row["advantage"]] * len(expected)) == pytest.approx(expected, abs=2e-4)
        assert ("advantages" in row) is cfg.rl.token_level
    options = policy_options(cfg)
    logp_BT, mask_BT = padded([r["logp"] for r in rows]), padded([[1.0] * len(r["logp"]) for r in rows])
    loss, _ = policy_loss(
        logp_BT, None, padded(advantages), mask_BT, kind=options.kind, clip_low=options.clip_low, clip_high=options.clip_high,
        cispo_cap=options.cispo_cap, loss_agg=options.loss_agg, loss_agg_constant=options.loss_agg_constant,
    )  # fmt: skip
    assert first["loss"] == pytest.approx(float(loss), abs=1e-4), "the first update's reference is the policy: no KL yet"
    assert first["ratio"] == first["ratio_max"] == 1.0 and first["updates"] == second["updates"] == 1
    assert {"advantage", "advantage_std", "advantage_abs_max", "reward", "reward_std", "reward/varied", "zero_std_groups", "entropy",
            "clip_fraction", "logp_gap", "logp_gap_max", "reply_length", "truncated", "time_advantages"} <= set(second)  # fmt: skip
    assert ("kl" in second) is (cfg.rl.kl_coef > 0) and ("reward_kl" in second) is cfg.rl.kl_rewarded
    if cfg.rl.kl_coef:
        assert second["kl"] > first["kl"] >= 0
    text = (tmp_path / "run" / "config.yaml").read_text()
    assert f"rl_algorithm: {name}\n" in text and f"advantage: {cfg.rl.advantage}\n" in text


def test_an_adaptive_coefficient_goes_on_after_a_resume(project: Path, tmp_path: Path) -> None:
    """Of the KL in the reward, with two mini-batches and passes, early stop in reach, and weights of the rollout corrected."""
    changes = {
        "rl_algorithm": "reinforce_plus_plus", "kl_target": 0.01, "kl_coef": 0.2, "mini_batch_size": 1, "updates_per_rollout": 2,
        "early_stop_kl": 0.5, "rollout_correction": "tis", "max_steps": 3, "lr_scheduler_type": "constant",
    }  # fmt: skip
    grpo.run(configured(project, tmp_path / "whole", **changes))
    saving = {"save_strategy": "steps", "save_steps": 1}
    grpo.run(configured(project, tmp_path / "parts", **{**changes, **saving, "max_steps": 2}))
    state = json.loads((tmp_path / "parts" / "checkpoint-2" / "run_state.json").read_text())
    grpo.run(configured(project, tmp_path / "parts", **{**changes, **saving}))
    whole, parts = log_lines(tmp_path / "whole"), log_lines(tmp_path / "parts")
    assert [line["kl_coef"] for line in parts] == [line["kl_coef"] for line in whole]
    assert whole[0]["kl_coef"] == 0.2 and len({line["kl_coef"] for line in whole}) == 3
    assert state["kept"]["kl_coef"]["coef"] == whole[2]["kl_coef"]
    for line, expected in zip(parts, whole, strict=True):
        for key in ("loss", "reward", "reward_kl", "kl", "grad_norm", "early_stopped", "correction_weight"):
            assert line[key] == expected[key], f"{key} of step {line['current_steps']}"
    for before, after in zip(whole, whole[1:], strict=False):
        error = max(-0.2, min(0.2, before["kl"] / 0.01 - 1))
        assert after["kl_coef"] == pytest.approx(before["kl_coef"] * (1 + 0.1 * error), rel=1e-9)


@pytest.mark.parametrize("name", ["grpo", "cispo", "gspo", "nemotron_grpo"])
def test_the_reward_rises(name: str, project: Path, tmp_path: Path) -> None:
    """The share of digits in the replies of a random model, over 16 rollouts."""
    changes: dict[str, Any] = {
        "rollout_batch_size": 8,
        "num_generations": 8,
        "per_device_train_batch_size": 64,
        "learning_rate": 1e-2,
        "max_steps": 16,
    }
    changes["rewards"] = [{"name": f"{project / 'reward.py'}:digits"}]
    grpo.run(configured(project, tmp_path / "run", rl_algorithm=name, log_rollouts=False, **changes))
    rewards = [line["reward"] for line in log_lines(tmp_path / "run")]
    assert statistics.mean(rewards[:3]) < 0.1 and statistics.mean(rewards[-3:]) > 0.3, rewards
