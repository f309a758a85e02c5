"""Whole runs through the command line: a tiny project on disk, the process, its log."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from tests.helpers.models import make_model
from tests.helpers.tokenizers import tiny_tokenizer

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 600


def make_project(folder: Path, *, family: str = "qwen3_tied", rows: int = 40) -> Path:
    """A folder with a tiny model and tokenizer (`model/`) and data (`data/`): `add` to train on, `held` to evaluate on."""
    tokenizer = tiny_tokenizer()
    model = make_model(family, vocab_size=len(tokenizer) + 5, eos_token_id=tokenizer.eos_token_id)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    data = folder / "data"
    data.mkdir(parents=True)
    pairs = [(a, b) for a in range(12) for b in range(9)]
    picked = [pairs[(7 * i) % len(pairs)] for i in range(rows + 11)]
    examples = [
        {"instruction": f"What is {a} + {b} = ?" + " please" * (a % 3), "input": "", "output": str(a + b), "answer": str(a + b)}
        for a, b in picked
    ]
    (data / "add.json").write_text(json.dumps(examples[:rows]))
    (data / "held.json").write_text(json.dumps(examples[rows:]))
    (data / "dataset_info.json").write_text(json.dumps({"add": {"file_name": "add.json"}, "held": {"file_name": "held.json"}}))
    return folder


def sft_options(project: Path, output: Path, **changes: Any) -> dict[str, Any]:
    return {
        "stage": "sft",
        "model_name_or_path": str(project / "model"),
        "dataset_dir": str(project / "data"),
        "dataset": "add",
        "cutoff_len": 64,
        "output_dir": str(output),
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 2,
        "max_steps": 6,
        "save_strategy": "no",
        "seed": 3,
        **changes,
    }


def grpo_options(project: Path, output: Path, **changes: Any) -> dict[str, Any]:
    return {
        "stage": "grpo",
        "model_name_or_path": str(project / "model"),
        "dataset_dir": str(project / "data"),
        "dataset": "add",
        "output_dir": str(output),
        "rewards": [{"name": str(project / "reward.py") + ":digits"}],
        "rollout_batch_size": 4,
        "num_generations": 4,
        "mini_batch_size": 2,
        "per_device_train_batch_size": 4,
        "max_prompt_len": 64,
        "max_new_tokens": 5,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "max_steps": 4,
        "save_strategy": "no",
        "seed": 3,
        **changes,
    }


def write_reward(project: Path) -> None:
    """A user's reward function: the share of digits in the reply, which a random model can earn by luck."""
    (project / "reward.py").write_text(
        "def digits(samples):\n    return [sum(c.isdigit() for c in s.reply) / max(1, len(s.reply)) for s in samples]\n"
    )


def environment(**extra: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    return {**kept, "USE_MCA": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT), **extra}


def start(command: str, options: dict[str, Any], *arguments: str, **env: str) -> subprocess.Popen[str]:
    """The command line on a YAML of these options, in a process group of its own."""
    path = Path(str(options["output_dir"])).parent / f"{command}-{Path(str(options['output_dir'])).name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(options))
    return subprocess.Popen(
        [sys.executable, "-m", "rlmca.cli.main", command, str(path), *arguments],
        env=environment(**env),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def run(command: str, options: dict[str, Any], *arguments: str, status: int = 0, **env: str) -> str:
    """Run to the end; the output. Whatever is left of the process group is ended."""
    process = start(command, options, *arguments, **env)
    try:
        output, _ = process.communicate(timeout=TIMEOUT_S)
    finally:
        end_group(process)
    assert process.returncode == status, f"exit status {process.returncode}, expected {status}:\n{output[-4000:]}"
    return output


def kill_when(process: subprocess.Popen[str], condition: Any, *, number: int = signal.SIGKILL) -> int:
    """Send a signal to the whole group as soon as `condition()` holds; the exit status."""
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert process.poll() is None, f"ended before it was to be stopped:\n{process.communicate()[0][-4000:]}"
        assert time.monotonic() < deadline, "the condition never came"
        time.sleep(0.02)
    os.killpg(process.pid, number)
    process.communicate(timeout=TIMEOUT_S)
    end_group(process)
    return process.returncode


def end_group(process: subprocess.Popen[str]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def log_lines(output: Path, key: str = "loss") -> list[dict[str, Any]]:
    """The lines of trainer_log.jsonl that have `key`."""
    lines = [json.loads(line) for line in (output / "trainer_log.jsonl").read_text().splitlines()]
    return [line for line in lines if key in line]
