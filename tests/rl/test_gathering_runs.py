"""Whole runs in this process, on the local engine: what a checkpoint keeps of all that surrounds an update."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlmca.config import Environment, LateError, make_config
from rlmca.rl import grpo
from rlmca.run.rollouts import read_rollout
from tests.helpers.runs import grpo_options, log_lines, make_project, write_reward
from tests.helpers.tokenizers import THINKING, tiny_tokenizer

AROUND: dict[str, Any] = {
    "dynamic_sampling": True, "oversample": 1.5, "thinking_ratio": 0.5, "reward_normalize": "running", "advantage_std": "none",
    "overlong_buffer": 3, "overlong_penalty": 0.1, "curriculum": "pass_rate", "curriculum_range": [0.0, 0.4], "kl_coef": 0.0,
}  # fmt: skip


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_project(tmp_path_factory.mktemp("project"), rows=12)
    write_reward(folder)
    (folder / "reward.py").write_text("def any_digit(samples):\n    return [float(any(c.isdigit() for c in s.reply)) for s in samples]\n")
    tiny_tokenizer(THINKING).save_pretrained(folder / "model")
    return folder


def train(project: Path, output: Path, **changes: Any) -> list[dict[str, Any]]:
    """The run on the Megatron engine, which leaves no process group behind; its log."""
    rewards = [{"name": f"{project / 'reward.py'}:any_digit"}]
    values = grpo_options(project, output, **{"rewards": rewards, "max_new_tokens": 4, "mini_batch_size": 4, "use_cpu": True, **changes})
    grpo.run(make_config(values, env=Environment(use_mca=True)))
    return log_lines(output)


def test_a_resumed_run_is_the_uninterrupted_one(project: Path, tmp_path: Path) -> None:
    whole = train(project, tmp_path / "whole", **AROUND)
    train(project, tmp_path / "part", **AROUND, max_steps=2, save_strategy="steps", save_steps=2)
    state = json.loads((tmp_path / "part" / "checkpoint-2" / "run_state.json").read_text())
    assert state["kept"]["curriculum"]["prompts"] and state["kept"]["reward_moments"]["count"] == 32
    assert state["order"]["position"] == round(12 * whole[1]["epoch"]) > 8, "more prompts were read than trained on"
    resumed = train(project, tmp_path / "part", **AROUND, save_strategy="steps", save_steps=2)
    assert [line["current_steps"] for line in resumed] == [1, 2, 3, 4]
    same = ("loss", "reward", "reward_shaped", "pass_rate", "curriculum_left", "drawn_prompts", "drawn_batches", "epoch", "grad_norm")
    for mine, expected in zip(resumed, whole, strict=True):
        assert {name: mine[name] for name in same} == {name: expected[name] for name in same}
        assert expected["zero_std_groups"] == 0.0 and expected["drawn_prompts"] >= 6
    assert sum(line["dropped_alike"] for line in whole) > 0
    mine, theirs = (load_file(tmp_path / name / "hf" / "model.safetensors") for name in ("part", "whole"))
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    for step in range(1, 5):
        rows, again = (list(read_rollout(tmp_path / name / "rollouts" / f"step-{step}.jsonl.zst")) for name in ("whole", "part"))
        assert [row["reply_ids"] for row in rows] == [row["reply_ids"] for row in again]
        assert len(rows) == 16 and sorted({row["group"] for row in rows}) == [0, 1, 2, 3]
        for name, key in (("raw_reward", "reward"), ("reward", "reward_shaped")):
            assert math.isclose(sum(row[name] for row in rows) / 16, whole[step - 1][key], abs_tol=1e-9)
    every = [row for step in range(1, 5) for row in read_rollout(tmp_path / "whole" / "rollouts" / f"step-{step}.jsonl.zst")]
    assert {row["prompt"].endswith("</think>\n\n") for row in every} == {True, False}, "both kinds of prompts occur"


def test_a_policy_that_always_scores_alike_ends_at_the_bound(project: Path, tmp_path: Path) -> None:
    (project / "flat.py").write_text("def flat(samples):\n    return [0.5 for _ in samples]\n")
    with pytest.raises(LateError, match=r"0 of the 4 groups of step 1 .*dynamic_sampling_max_batches 2 batches: 8 of 8 groups"):
        train(
            project,
            tmp_path / "run",
            rewards=[{"name": f"{project / 'flat.py'}:flat"}],
            dynamic_sampling=True,
            dynamic_sampling_max_batches=2,
        )
