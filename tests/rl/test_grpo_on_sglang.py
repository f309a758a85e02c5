"""Stage grpo with replies by an SGLang server that the run starts: on-policy numbers, versions, and what is left when it dies."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from rlmca.run.rollouts import read_rollout
from tests.helpers.runs import end_group, grpo_options, log_lines, make_project, run, start, write_reward

pytestmark = pytest.mark.serial


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_project(tmp_path_factory.mktemp("project"))
    write_reward(folder)
    return folder


def test_a_run_with_a_server_is_on_policy_and_ends_clean(project: Path, tmp_path: Path) -> None:
    """The trainer's log-probs are the server's at every step, so it has every step's weights; greedy replies are the local engine's."""
    output = tmp_path / "run"
    options = grpo_options(project, output, rollout_engine="sglang", eval_dataset="held", do_eval=True, temperature=0.7, max_steps=3)
    run("train", options)
    lines = log_lines(output)
    assert [line["current_steps"] for line in lines] == [1, 2, 3]
    for line in lines:
        assert line["logp_gap_max"] < 1e-5 and line["updates"] > 0 and line["nonfinite"] == 0
        rows = list(read_rollout(output / "rollouts" / f"step-{line['current_steps']}.jsonl.zst"))
        assert len(rows) == 16 and len({tuple(r["reply_ids"]) for r in rows}) > 1
        assert {v for r in rows for v in r["versions"]} == {line["current_steps"] - 1}
        assert all(len(r["reply_ids"]) == len(r["logp"]) == len(r["versions"]) > 0 for r in rows)
    assert (output / "sglang" / "sglang-0.log").stat().st_size > 0
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(output) in " ".join(p.info["cmdline"] or [])]
    evaluation = {**options, "model_name_or_path": str(output), "output_dir": str(tmp_path / "eval"), "rollout_engine": "local"}
    run("eval", evaluation)
    local = json.loads((tmp_path / "eval" / "eval_results.json").read_text())
    ours = json.loads((output / "all_results.json").read_text())
    assert {k: ours[k] for k in ("eval_reward", "eval_length_mean", "eval_accuracy")} == {
        k: local[k] for k in ("eval_reward", "eval_length_mean", "eval_accuracy")
    }


def test_a_server_that_dies_ends_the_run_with_one_clear_error(project: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    process = start("train", grpo_options(project, output, rollout_engine="sglang", max_steps=100000))
    try:
        end = time.monotonic() + 300
        while not ((output / "trainer_log.jsonl").exists() and log_lines(output)):
            assert process.poll() is None, process.communicate()[0][-4000:]
            assert time.monotonic() < end, "no step was made"
            time.sleep(0.05)
        below = psutil.Process(process.pid).children(recursive=True)
        (server,) = [p for p in below if any("launch_cpu.py" in part for part in p.cmdline())]
        os.kill(server.pid, signal.SIGKILL)
        text, _ = process.communicate(timeout=120)
    finally:
        end_group(process)
    assert process.returncode not in (0, -signal.SIGKILL)
    assert "SGLang server http://127.0.0.1:" in text and "was killed by SIGKILL" in text
    assert "Traceback" not in text, text[-3000:]
    _, alive = psutil.wait_procs(below, timeout=30)
    assert not alive, [p.cmdline() for p in alive]
