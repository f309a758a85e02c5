"""Stage grpo of models with experts: rollouts by the local engine hold the weights that are trained, in every layout."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rlmca.config import Environment, make_config
from rlmca.rl.grpo import run as run_grpo
from rlmca.run.rollouts import read_rollout
from tests.helpers.runs import grpo_options, log_lines, make_project, run, sft_options, write_reward

pytestmark = pytest.mark.serial


def project_of(family: str, folder: Path, *, stacked: bool = False) -> Path:
    """A project of this family; `stacked`: its model folder holds the experts of a layer in one tensor."""
    write_reward(make_project(folder, family=family))
    if stacked:
        model = folder / "model"
        AutoModelForCausalLM.from_pretrained(model).save_pretrained(model, save_original_format=False)
    return folder


def check_steps(output: Path, steps: int) -> list[dict[str, Any]]:
    lines = log_lines(output)
    assert [line["current_steps"] for line in lines] == list(range(1, steps + 1))
    for line in lines:
        assert line["logp_gap_max"] < 1e-5, "the rollout engine does not hold the weights that are trained"
        assert line["updates"] == 2 and line["skipped"] == 0 and line["nonfinite"] == 0
    return lines


@pytest.mark.whole
@pytest.mark.parametrize(
    ("family", "stacked"),
    [
        pytest.param("qwen3_moe", False, marks=pytest.mark.whole),
        ("qwen2_moe", True),
        pytest.param("mixtral", False, marks=pytest.mark.whole),
    ],
)
def test_a_run_is_on_policy_and_exports_the_form_it_came_in(family: str, stacked: bool, tmp_path: Path) -> None:
    project, output = project_of(family, tmp_path / "project", stacked=stacked), tmp_path / "run"
    run("train", grpo_options(project, output, max_steps=3, eval_dataset="held", do_eval=True))
    check_steps(output, 3)
    before, after = (load_file(folder / "model.safetensors") for folder in (project / "model", output / "hf"))
    assert before.keys() == after.keys() and any(name.endswith("experts.gate_up_proj") for name in after) is stacked
    moved = [name for name in after if ".experts." in name and not torch.equal(before[name], after[name])]
    assert len(moved) > len([name for name in after if ".experts." in name]) // 2
    model = AutoModelForCausalLM.from_pretrained(project / "model")
    for row in read_rollout(output / "rollouts" / "step-1.jsonl.zst"):
        ids = row["prompt_ids"] + row["reply_ids"]
        logp = torch.log_softmax(model(torch.tensor([ids])).logits[0, :-1], -1)
        expected = [logp[t - 1, ids[t]].item() for t in range(len(row["prompt_ids"]), len(ids))]
        assert max(abs(a - b) for a, b in zip(row["logp"], expected, strict=True)) < 1e-5
    run("eval", grpo_options(project, tmp_path / "eval", model_name_or_path=str(output), eval_dataset="held"))
    ours, theirs = (json.loads((path).read_text()) for path in (output / "all_results.json", tmp_path / "eval" / "eval_results.json"))
    assert theirs["eval_reward"] == ours["eval_reward"] and theirs["eval_length_mean"] == ours["eval_length_mean"]


@pytest.mark.whole
def test_a_run_with_a_server_is_on_policy(tmp_path: Path) -> None:
    project, output = project_of("mixtral", tmp_path / "project"), tmp_path / "run"
    run("train", grpo_options(project, output, max_steps=2, rollout_engine="sglang"))
    check_steps(output, 2)


def test_experts_on_two_ranks_give_the_run_of_one_process(tmp_path: Path, ray_cluster: None) -> None:
    project = project_of("qwen2_moe", tmp_path / "project")
    run("train", grpo_options(project, tmp_path / "one", max_steps=2))
    experts = {"expert_model_parallel_size": 2, "moe_token_dispatcher_type": "alltoall"}
    cfg = make_config(grpo_options(project, tmp_path / "ep2", max_steps=2, **experts), env=Environment(use_mca=True))
    run_grpo(dataclasses.replace(cfg, ray_ranks=2))
    for mine, other in zip(check_steps(tmp_path / "ep2", 2), check_steps(tmp_path / "one", 2), strict=True):
        for key in ("loss", "reward", "kl", "entropy", "grad_norm"):
            assert abs(mine[key] - other[key]) <= 2e-5 * max(1.0, abs(other[key])), key


@pytest.mark.whole
def test_replies_are_scored_while_stage_sft_trains_experts(tmp_path: Path) -> None:
    """Both ranks give their part of the weights; only the first one writes replies."""
    project, output = project_of("mixtral", tmp_path / "project"), tmp_path / "run"
    scored = {"rewards": "exact", "max_new_tokens": 4, "eval_dataset": "held", "eval_strategy": "steps", "eval_steps": 2}
    experts = {"expert_model_parallel_size": 2, "gradient_accumulation_steps": 1}
    run("train", sft_options(project, output, max_steps=2, **scored, **experts), NPROC_PER_NODE="2")
    assert {"eval_accuracy", "eval_reward/exact"} <= set(log_lines(output, "eval_loss")[-1])
