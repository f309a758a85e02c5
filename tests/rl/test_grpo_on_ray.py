"""Stage grpo with its ranks on Ray: the same run as in one process, resume, and nothing left when it is killed."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from rlmca.config import Environment, make_config
from rlmca.run.rollouts import read_rollout
from tests.helpers.runs import end_group, grpo_options, log_lines, make_project, run, sft_options, start, write_reward

pytestmark = pytest.mark.serial


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_project(tmp_path_factory.mktemp("project"))
    write_reward(folder)
    return folder


@pytest.fixture(scope="module")
def whole(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps in one process; the others are compared with it."""
    output = tmp_path_factory.mktemp("runs") / "whole"
    run("train", grpo_options(project, output))
    return output


def same_run(mine: Path, expected: Path, tolerance: float) -> None:
    """Equal numbers at every step, and the same sampled ids as long as weights agree that far."""
    lines = log_lines(mine)
    assert len(lines) == 4
    for a, b in zip(lines, log_lines(expected), strict=True):
        assert a["logp_gap_max"] < 1e-5, "the rollout engine does not hold the weights that are trained"
        for key in ("loss", "reward", "kl", "entropy", "grad_norm", "total_tokens"):
            assert abs(a[key] - b[key]) <= tolerance * max(1.0, abs(b[key])), f"{key} of step {a['current_steps']}"
    for step in (1, 2, 3, 4):
        rows = [list(read_rollout(folder / "rollouts" / f"step-{step}.jsonl.zst")) for folder in (mine, expected)]
        assert [r["reply_ids"] for r in rows[0]] == [r["reply_ids"] for r in rows[1]]
        assert {v for r in rows[0] for v in r["versions"]} == {step - 1}
    weights = [load_file(folder / "hf" / "model.safetensors") for folder in (mine, expected)]
    assert weights[0].keys() == weights[1].keys()
    for name, tensor in weights[0].items():
        torch.testing.assert_close(tensor, weights[1][name], rtol=0, atol=10 * tolerance)


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "tp2": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "pp2": (2, {"pipeline_model_parallel_size": 2}),
    "cp2_packed": (2, {"context_parallel_size": 2, "cp_comm_type": "a2a", "packing": True}),
    "dp2_packed": (2, {"packing": True, "max_tokens_per_microbatch": 200}),
}


@pytest.mark.cases(1)
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_ranks_on_ray_give_the_run_of_one_process(layout: str, project: Path, whole: Path, tmp_path: Path, ray_cluster: None) -> None:
    from rlmca.rl.grpo import run as run_grpo

    world, changes = LAYOUTS[layout]
    cfg = make_config(grpo_options(project, tmp_path / "run", **changes), env=Environment(use_mca=True))
    run_grpo(dataclasses.replace(cfg, ray_ranks=world))
    same_run(tmp_path / "run", whole, tolerance=0.0 if layout == "one" else 2e-5)


def test_the_command_line_trains_on_ray_and_resumes_after_a_signal(project: Path, whole: Path, tmp_path: Path) -> None:
    """SIGTERM ends the run with a checkpoint; the same command goes on to the same numbers. No process is left either time."""
    output = tmp_path / "run"
    options = grpo_options(project, output, save_strategy="epoch", tensor_model_parallel_size=2)
    process = start("train", options, NPROC_PER_NODE="2")
    below: list[psutil.Process] = []

    def two_steps() -> bool:
        found = (output / "trainer_log.jsonl").exists() and len(log_lines(output)) >= 2
        if found:
            below.extend(psutil.Process(process.pid).children(recursive=True))
        return found

    try:
        wait_for(two_steps, process)
        os.killpg(process.pid, signal.SIGTERM)  # as schedulers do: Ray's processes are in the group too
        text, _ = process.communicate(timeout=300)
    finally:
        end_group(process)
    assert process.returncode == 128 + signal.SIGTERM, text
    assert len(below) > 3, "Ray and its ranks"
    all_gone(below)
    done = len(log_lines(output))
    assert (output / f"checkpoint-{done}").is_dir() and done < 4
    run("train", options, NPROC_PER_NODE="2")
    same_run(output, whole, tolerance=2e-5)


def test_a_killed_driver_leaves_no_process(project: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    process = start("train", grpo_options(project, output, max_steps=1000), NPROC_PER_NODE="2")
    below: list[psutil.Process] = []

    def running() -> bool:
        found = (output / "trainer_log.jsonl").exists() and len(log_lines(output)) >= 1
        if found:
            below.extend(psutil.Process(process.pid).children(recursive=True))
        return found

    try:
        wait_for(running, process)
        os.kill(process.pid, signal.SIGKILL)  # this process alone: what it started must notice by itself
        process.wait(timeout=60)
        all_gone(below)
    finally:
        end_group(process)


@pytest.mark.whole
def test_sft_on_ray_is_the_run_under_torchrun(project: Path, tmp_path: Path) -> None:
    held = {"eval_dataset": "held", "do_eval": True}
    changes = {"tensor_model_parallel_size": 2, "max_steps": 4, **held}
    run("train", sft_options(project, tmp_path / "torchrun", **changes), NPROC_PER_NODE="2")
    run("train", sft_options(project, tmp_path / "ray", use_ray=True, **changes), NPROC_PER_NODE="2")
    lines = [log_lines(tmp_path / kind) for kind in ("ray", "torchrun")]
    assert [[line[key] for key in ("loss", "grad_norm", "lr", "epoch", "total_tokens")] for line in lines[0]] == [
        [line[key] for key in ("loss", "grad_norm", "lr", "epoch", "total_tokens")] for line in lines[1]
    ]
    results = [json.loads((tmp_path / kind / "all_results.json").read_text()) for kind in ("ray", "torchrun")]
    assert results[0]["eval_loss"] == results[1]["eval_loss"] and results[0]["epoch"] == results[1]["epoch"]


def wait_for(condition: Any, process: Any, seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()[0][-4000:]
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def all_gone(processes: list[psutil.Process], seconds: float = 40) -> None:
    assert processes
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    assert not alive, [p.cmdline() for p in alive]
