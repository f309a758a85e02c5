"""Stage grpo on the Hugging Face engine, and both engines on the rollouts that it recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlmca.config import Environment, make_config
from rlmca.rl.update import update_policy
from rlmca.workers import SpmdGroup
from tests.helpers.engine import Layout, make_engine
from tests.helpers.huggingface import make_hf_engine
from tests.helpers.runs import grpo_options, kill_when, log_lines, make_project, run, start, write_reward
from tests.helpers.stages import PLAIN, recorded_samples

pytestmark = pytest.mark.serial


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_project(tmp_path_factory.mktemp("project"))
    write_reward(folder)
    return folder


def options(project: Path, output: Path, **changes: Any) -> dict[str, Any]:
    """One optimizer step a rollout, so that every logged ratio is that of a first update."""
    return grpo_options(project, output, **{"mini_batch_size": 4, "temperature": 0.7, "save_strategy": "steps", "save_steps": 1, **changes})


@pytest.fixture(scope="module")
def whole(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("runs") / "whole"
    run("train", options(project, output), **PLAIN)
    return output


def test_the_first_update_is_on_policy(whole: Path) -> None:
    lines = log_lines(whole)
    assert [line["current_steps"] for line in lines] == [1, 2, 3, 4]
    for line in lines:
        assert line["ratio"] == line["ratio_max"] == 1.0
        assert line["logp_gap_max"] < 1e-5, "the rollout engine does not hold the weights that are trained"
        assert line["updates"] == 1 and line["skipped"] == 0
    assert lines[0]["kl"] == 0.0 and 0 < lines[-1]["kl"] < 1.0


def test_resume_after_a_kill_is_the_uninterrupted_run(project: Path, whole: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    process = start("train", options(project, output), **PLAIN)
    kill_when(process, lambda: (output / "trainer_log.jsonl").exists() and len(log_lines(output)) >= 2)
    assert len(log_lines(output)) < 4
    run("train", options(project, output), **PLAIN)
    for mine, expected in zip(log_lines(output), log_lines(whole), strict=True):
        for key in ("loss", "reward", "kl", "entropy", "grad_norm", "total_tokens"):
            assert mine[key] == expected[key], f"{key} of step {mine['current_steps']}"
    mine, theirs = (load_file(folder / "hf" / "model.safetensors") for folder in (output, whole))
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_recorded_rollouts_make_the_same_steps_on_both_engines(project: Path, whole: Path) -> None:
    """Four rollouts, two mini-batches each, with an entropy bonus and a KL to a reference, at temperature 0.7."""
    values = options(project, whole, mini_batch_size=2, entropy_coef=0.01, kl_coef=0.1, per_device_train_batch_size=3)
    cfg = make_config(values, env=Environment())
    folder = project / "model"
    rollouts = [recorded_samples(path) for path in sorted((whole / "rollouts").glob("step-*.jsonl.zst"))]
    assert len(rollouts) == 4 and any(s.advantage for s in rollouts[0])
    makers = (
        lambda trainable: make_hf_engine(folder, micro_batch=3, trainable=trainable),
        lambda trainable: make_engine(folder, Layout("tp1", micro_batch=3), trainable=trainable),
    )
    found = []
    for make in makers:
        policy, reference = (SpmdGroup(engine, engine.parallel) for engine in (make(True), make(False)))
        steps = [update_policy(policy, reference, rollout, cfg, step=n, learning_rate=1e-3) for n, rollout in enumerate(rollouts)]
        found.append((steps, {name: tensor.clone() for name, tensor in policy.hf_tensors()}))
    (ours, mine), (megatron, theirs) = found
    for step, (a, b) in enumerate(zip(ours, megatron, strict=True)):
        assert a.keys() == b.keys() and a["updates"] == b["updates"] == 2 and {"kl", "entropy", "ratio_max"} <= set(a)
        for name in a:
            assert abs(a[name] - b[name]) < 1e-5 * max(1.0, abs(b[name])), f"{name} of rollout {step}: {a[name]} {b[name]}"
    for name, value in mine.items():
        torch.testing.assert_close(value, theirs[name], rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
    start_weights = load_file(folder / "model.safetensors")
    assert max((value - start_weights[name]).abs().max().item() for name, value in mine.items()) > 1e-3, "the steps must matter"
