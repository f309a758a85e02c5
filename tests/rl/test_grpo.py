"""Stage grpo through the command line: on-policy numbers, files, resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlmca.run.rollouts import read_rollout
from tests.helpers.runs import grpo_options, kill_when, log_lines, make_project, run, start, write_reward

pytestmark = pytest.mark.serial


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_project(tmp_path_factory.mktemp("project"))
    write_reward(folder)
    return folder


@pytest.fixture(scope="module")
def whole(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("runs") / "whole"
    run("train", grpo_options(project, output, eval_dataset="held", do_eval=True, plot_loss=True, debug_mode=True))
    return output


def test_the_first_update_is_on_policy(whole: Path) -> None:
    """The trainer's log-probs equal the rollout's, weights arrive after every step, the reference starts as the policy."""
    lines = log_lines(whole)
    assert [line["current_steps"] for line in lines] == [1, 2, 3, 4]
    for line in lines:
        assert line["logp_gap_max"] < 1e-5, "the rollout engine does not hold the weights that are trained"
        assert line["updates"] == 2 and line["skipped"] == 0 and line["nonfinite"] == 0
        assert {"reward", "reward_std", "reward/digits", "kl", "entropy", "clip_fraction", "grad_norm", "lr"} <= set(line)
        assert {"time_generate", "time_score", "time_update", "time_sync", "time_step", "tokens_per_second"} <= set(line)
    assert 0 < lines[-1]["kl"] < 1.0
    assert (whole / "training_reward.png").exists()
    assert "eval_accuracy" in json.loads((whole / "all_results.json").read_text())


def test_rollouts_are_written_whole(whole: Path) -> None:
    files = sorted((whole / "rollouts").glob("step-*.jsonl.zst"))
    assert [f.name for f in files] == [f"step-{n}.jsonl.zst" for n in (1, 2, 3, 4)]
    lines = log_lines(whole)
    for step, path in enumerate(files, start=1):
        rows = list(read_rollout(path))
        assert len(rows) == 16 and len({(r["group"], r["k"]) for r in rows}) == 16
        for row in rows:
            assert len(row["reply_ids"]) == len(row["logp"]) == len(row["versions"]) > 0
            assert set(row["versions"]) == {step - 1}, "one rollout, one policy version: that of the step before"
        assert abs(sum(r["reward"] for r in rows) / 16 - lines[step - 1]["reward"]) < 1e-9
        groups = [sum(r["advantage"] for r in rows if r["group"] == g) for g in range(4)]
        assert all(abs(total) < 1e-6 for total in groups)


def test_log_probs_of_the_first_rollout_are_transformers(project: Path, whole: Path) -> None:
    """The sampled ids' log-probs, by a plain forward of the starting model."""
    model = AutoModelForCausalLM.from_pretrained(project / "model")
    for row in read_rollout(whole / "rollouts" / "step-1.jsonl.zst"):
        ids = row["prompt_ids"] + row["reply_ids"]
        logp = torch.log_softmax(model(torch.tensor([ids])).logits[0, :-1], -1)
        expected = [logp[t - 1, ids[t]].item() for t in range(len(row["prompt_ids"]), len(ids))]
        assert max(abs(a - b) for a, b in zip(row["logp"], expected, strict=True)) < 1e-5


def test_the_exported_folder_generates_in_transformers(project: Path, whole: Path, tmp_path: Path) -> None:
    """Greedy answers of `rlmca-cli generate` on the exported folder are Transformers' own."""
    output = tmp_path / "generated"
    options = {
        "model_name_or_path": str(whole), "dataset_dir": str(project / "data"), "eval_dataset": "held", "output_dir": str(output),
        "do_sample": False, "max_new_tokens": 5, "max_prompt_len": 64,
    }  # fmt: skip
    run("generate", options)
    tokenizer = AutoTokenizer.from_pretrained(whole / "hf")
    model = AutoModelForCausalLM.from_pretrained(whole / "hf")
    found = [json.loads(line) for line in (output / "generated_predictions.jsonl").read_text().splitlines()]
    rows = json.loads((project / "data" / "held.json").read_text())
    assert len(found) == len(rows)
    for mine, row in zip(found, rows, strict=True):
        text = tokenizer.apply_chat_template([{"role": "user", "content": row["instruction"]}], add_generation_prompt=True, tokenize=False)
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)
        reply = model.generate(**ids, max_new_tokens=5, do_sample=False)[0, ids["input_ids"].shape[1] :]
        expected = tokenizer.decode([i for i in reply.tolist() if i != tokenizer.eos_token_id])
        assert mine["predict"] == expected


def test_two_runs_with_one_seed_are_one_run(project: Path, whole: Path, tmp_path: Path) -> None:
    output = tmp_path / "again"
    run("train", grpo_options(project, output, eval_dataset="held", do_eval=True))
    a, b = load_file(whole / "hf" / "model.safetensors"), load_file(output / "hf" / "model.safetensors")
    assert all(torch.equal(a[name], b[name]) for name in a)
    start_weights = load_file(project / "model" / "model.safetensors")
    assert any(not torch.equal(a[name], start_weights[name]) for name in a)


def test_resume_after_a_kill_is_the_uninterrupted_run(project: Path, whole: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    options = grpo_options(project, output, save_strategy="steps", save_steps=1, save_total_limit=2)
    process = start("train", options)
    kill_when(process, lambda: (output / "trainer_log.jsonl").exists() and len(log_lines(output)) >= 2)
    assert len(log_lines(output)) < 4
    run("train", options)
    mine, expected = log_lines(output), log_lines(whole)
    assert [line["current_steps"] for line in mine] == [1, 2, 3, 4]
    for a, b in zip(mine, expected, strict=True):
        for key in ("loss", "reward", "kl", "entropy", "grad_norm", "total_tokens"):
            assert a[key] == b[key], f"{key} of step {a['current_steps']}"


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "changes",
    [
        {"old_logp": "rollout", "kl_coef": 0.0, "loss_agg": "token_mean", "entropy_coef": 0.02, "drop_zero_std_groups": True},
        {"updates_per_rollout": 2, "temperature": 0.7, "mask_truncated": True, "advantage_std": "population", "advantage_clip": 1.0},
        {"rewards": ["format", {"name": "math", "weight": 2.0}], "max_new_tokens": 3, "top_k": 20},
    ],
    ids=["rollout_logp", "two_epochs", "format_math"],
)
def test_other_options_run(changes: dict[str, Any], project: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    run("train", grpo_options(project, output, max_steps=2, **changes))
    lines = log_lines(output)
    assert len(lines) == 2
    if "updates_per_rollout" in changes and lines[0]["updates"]:
        assert lines[0]["logp_gap_max"] < 1e-5, "log-probs at temperature 0.7 on both sides"
    if changes.get("kl_coef") == 0.0:
        assert "kl" not in lines[0] and max(line["logp_gap_max"] for line in lines) < 1e-5


@pytest.mark.cases(1)
@pytest.mark.parametrize(("key", "dtype", "gap"), [("bf16", torch.bfloat16, 0.5), ("fp16", torch.float16, 0.05)])
def test_half_precision_runs(key: str, dtype: torch.dtype, gap: float, project: Path, tmp_path: Path) -> None:
    """Rollouts and the exported folder have the run's type; replies have the trainer's log-probs within its accuracy."""
    output = tmp_path / "run"
    run("train", grpo_options(project, output, max_steps=2, **{key: True}))
    assert {t.dtype for t in load_file(output / "hf" / "model.safetensors").values()} == {dtype}
    lines = log_lines(output)
    assert lines[0]["logp_gap_max"] < gap
    assert [line.get("loss_scale") for line in lines] == [65536.0 if key == "fp16" else None] * 2


def test_rewards_that_are_never_valid_end_the_run_at_the_first_rollout(project: Path, tmp_path: Path) -> None:
    (project / "nothing.py").write_text("def nothing(samples):\n    return [None for _ in samples]\n")
    rewards = [{"name": str(project / "nothing.py") + ":nothing"}]
    printed = " ".join(run("train", grpo_options(project, tmp_path / "run", rewards=rewards), status=2).split())
    assert "rewards: none of the 16 replies of step 1 has a valid score from nothing" in printed and "Traceback" not in printed
