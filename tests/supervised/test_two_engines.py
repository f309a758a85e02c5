"""Stage sft on both engines: one file, one data order, one curve; and the Hugging Face engine through the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from tests.helpers.ranks import rank_pool
from tests.helpers.runs import ROOT, environment, grpo_options, kill_when, log_lines, make_project, run, sft_options, start, write_reward
from tests.helpers.stages import PLAIN, run_stage

pytestmark = pytest.mark.serial


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_project(tmp_path_factory.mktemp("project"))
    write_reward(folder)
    return folder


def test_one_file_gives_one_curve_on_both_engines(project: Path, tmp_path: Path) -> None:
    """Thirty steps over three epochs with decay, warm-up, clipping and evaluation; SFT ignores the sampling temperature."""
    outputs = {True: tmp_path / "megatron", False: tmp_path / "huggingface"}
    for use_mca, output in outputs.items():
        options = sft_options(
            project, output, max_steps=30, learning_rate=3e-3, weight_decay=0.1, max_grad_norm=0.5, save_hf_model=True,
            eval_dataset="held", eval_strategy="steps", eval_steps=10, per_device_eval_batch_size=3,
            temperature=1.0 if use_mca else 0.7,
        )  # fmt: skip
        rank_pool(1).run(run_stage, options, use_mca)
    megatron, ours = (log_lines(output) for output in outputs.values())
    assert len(ours) == 30 and ours[-1]["loss"] < ours[0]["loss"] - 0.5, "the steps must matter"
    for mine, theirs in zip(ours, megatron, strict=True):
        assert set(mine) == set(theirs)
        assert mine["total_tokens"] == theirs["total_tokens"], "the same rows in the same order"
        assert abs(mine["loss"] - theirs["loss"]) < 1e-5 and mine["lr"] == theirs["lr"]
        assert abs(mine["grad_norm"] - theirs["grad_norm"]) < 1e-4 * max(1.0, theirs["grad_norm"])
    for mine, theirs in zip(*(log_lines(output, "eval_loss") for output in outputs.values()), strict=True):
        assert abs(mine["eval_loss"] - theirs["eval_loss"]) < 1e-5
    weights = [load_file(output / "hf" / "model.safetensors") for output in outputs.values()]
    for name, value in weights[0].items():
        torch.testing.assert_close(value, weights[1][name], rtol=0, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
    assert (outputs[True] / "hf" / "config.json").read_bytes() == (outputs[False] / "hf" / "config.json").read_bytes()


def test_a_run_in_float16_is_nearly_the_one_in_float32_on_both_engines(project: Path, tmp_path: Path) -> None:
    lines = {}
    half = {"fp16": True, "initial_loss_scale": 512, "loss_scale_window": 2}
    for name, use_mca, own in (("exact", True, {}), ("megatron", True, half), ("huggingface", False, half)):
        options = sft_options(project, tmp_path / name, max_steps=6, save_hf_model=True, learning_rate=1e-4, **own)
        rank_pool(1).run(run_stage, options, use_mca)
        lines[name] = log_lines(tmp_path / name)
        dtypes = {tensor.dtype for tensor in load_file(tmp_path / name / "hf" / "model.safetensors").values()}
        assert dtypes == {torch.float16 if own else torch.float32}
    for name in ("megatron", "huggingface"):
        for mine, exact in zip(lines[name], lines["exact"], strict=True):
            assert abs(mine["loss"] - exact["loss"]) < 5e-3 and abs(mine["grad_norm"] - exact["grad_norm"]) < 5e-3 * exact["grad_norm"]
            assert (mine["overflow"], mine["skipped"]) == (0.0, 0.0)
        assert [line["loss_scale"] for line in lines[name]] == [512, 512, 1024, 1024, 2048, 2048]


@pytest.fixture(scope="module")
def whole(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps of one process, with checkpoints."""
    output = tmp_path_factory.mktemp("runs") / "whole"
    run("train", sft_options(project, output, save_strategy="steps", save_steps=3), **PLAIN)
    return output


def test_two_processes_equal_one_with_twice_the_accumulation(project: Path, whole: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    run("train", sft_options(project, output, gradient_accumulation_steps=1), NPROC_PER_NODE="2", **PLAIN)
    for mine, expected in zip(log_lines(output), log_lines(whole), strict=True):
        assert abs(mine["loss"] - expected["loss"]) < 1e-6 * max(1.0, expected["loss"])
        assert mine["total_tokens"] == expected["total_tokens"]


def test_resume_after_a_kill_is_the_uninterrupted_run(project: Path, whole: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    options = sft_options(project, output, save_strategy="steps", save_steps=2, gradient_checkpointing=True, flash_attn="sdpa")
    process = start("train", options, **PLAIN)
    kill_when(process, lambda: (output / "trainer_log.jsonl").exists() and len(log_lines(output)) >= 3)
    run("train", options, **PLAIN)
    assert [line["loss"] for line in log_lines(output)] == [line["loss"] for line in log_lines(whole)]
    mine, theirs = (load_file(folder / "checkpoint-6" / "model.safetensors") for folder in (output, whole))
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_a_checkpoint_is_evaluated_as_it_stands(project: Path, whole: Path, tmp_path: Path) -> None:
    """`checkpoint-N` is a model folder: of `rlmca-cli eval`, and of a new run on either engine."""
    output = tmp_path / "eval"
    options = {
        "model_name_or_path": str(whole / "checkpoint-3"), "dataset_dir": str(project / "data"), "eval_dataset": "held",
        "rewards": "exact", "output_dir": str(output), "max_new_tokens": 4, "max_prompt_len": 64,
    }  # fmt: skip
    run("eval", options, **PLAIN)
    assert "eval_accuracy" in json.loads((output / "eval_results.json").read_text())
    assert len((output / "eval_predictions.jsonl").read_text().splitlines()) == 11
    text = run("train", sft_options(project, whole, max_steps=9), USE_MCA="1", status=2)
    assert "was written by the huggingface engine and this run has the megatron one: set USE_MCA as it was" in " ".join(text.split())


CODE = """
import sys
from rlmca.cli.main import main
for path in sys.argv[1:]:
    assert main(["train", path, "--dry_run"]) == main(["train", path]) == 0
    print("megatron modules:", [name for name in sys.modules if name.split(".")[0] == "megatron"])
"""


def test_no_stage_needs_megatron(project: Path, tmp_path: Path) -> None:
    files = []
    for options in (sft_options(project, tmp_path / "sft", max_steps=1), grpo_options(project, tmp_path / "grpo", max_steps=1)):
        files.append(tmp_path / f"{options['stage']}.yaml")
        files[-1].write_text(yaml.safe_dump(options))
    done = subprocess.run(
        [sys.executable, "-c", CODE, *map(str, files)], env=environment(**PLAIN), cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("megatron modules: []") == 2
