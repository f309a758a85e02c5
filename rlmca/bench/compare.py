"""`bench demo`: a GRPO step of ours beside the same step written by hand in plain PyTorch, in one run.

Both start from the model that the demo's supervised stage leaves and do the same work: same prompts a step, replies,
optimizer, mini-batches. Each runs in a process of its own; the processes alternate, so that a noisy machine hits all
alike; the first steps of each process are left out as warm-up, and the median of the rest counts.
"""

from __future__ import annotations

import os
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from rlmca.bench.base import Bench
from rlmca.bench.commands import RLMCA, run_command
from rlmca.bench.demo import ASSETS, GRPO_YAML, MEGATRON, OUTPUTS, SFT_FOLDER, DemoOptions, prepare_assets, train_sft
from rlmca.config import ConfigError
from rlmca.observe.console import console
from rlmca.observe.jsonl import read_lines
from rlmca.observe.log import LOG_FILE

PLAIN = "plain PyTorch"


@dataclass(frozen=True)
class CompareOptions:
    """`rounds` processes of each kind with `steps` steps each, the first `warmup` of them uncounted."""

    rounds: int = 2
    steps: int = 14
    warmup: int = 4
    threads: int = 1
    seed: int = 0
    model: str = ""
    """HF folder to start from; empty: the demo's, made by its supervised stage when it is not there yet."""


@dataclass(frozen=True)
class Measured:
    """The counted steps of one kind: seconds each, share of replies in the updates, mean reward."""

    seconds: list[float]
    used: list[float]
    reward: list[float]

    def __add__(self, other: Measured) -> Measured:
        return Measured(self.seconds + other.seconds, self.used + other.used, self.reward + other.reward)


def run_compare(options: CompareOptions) -> dict[str, Any]:
    """Run all rounds, print the table, return the figures (seconds per sample and ratios to the plain loop)."""
    if options.warmup >= options.steps or options.warmup < 0 or min(options.rounds, options.threads) < 1:
        raise ConfigError("bench demo: rounds and threads must be at least 1, and warmup at least 0 and below steps")
    env = {"OMP_NUM_THREADS": str(options.threads)}
    model = _model(options)
    sides = {PLAIN: "", "rlmca, old_logp: rollout": "rollout", "rlmca, old_logp: trainer": "trainer"}
    measured: dict[str, Measured] = {name: Measured([], [], []) for name in sides}
    for number in range(options.rounds):
        for name, old_logp in sides.items():
            out = OUTPUTS / "bench" / f"{number}-{old_logp or 'plain'}"
            run = _run_ours if old_logp else _run_plain
            measured[name] += run(options, model, old_logp, out, env, seed=options.seed + number)
    samples = _samples_per_step()
    rows = {name: _figures(values, samples, statistics.median(measured[PLAIN].seconds)) for name, values in measured.items()}
    _print(rows, options)
    return {"bench": "demo", "options": {**vars(options)}, "cpu_count": os.cpu_count(), "samples_per_step": samples, "results": rows}


def _model(options: CompareOptions) -> Path:
    """Where both sides start; the demo's assets are needed in any case, for the prompts."""
    prepare_assets()
    if options.model:
        if not (Path(options.model) / "config.json").is_file():
            raise ConfigError(f"bench demo: model={options.model} is no Hugging Face folder (no config.json)")
        return Path(options.model)
    if not (SFT_FOLDER / "config.json").is_file():
        train_sft(DemoOptions(seed=options.seed))
    return SFT_FOLDER


def _run_plain(options: CompareOptions, model: Path, old_logp: str, out: Path, env: dict[str, str], seed: int) -> Measured:
    report = out / "steps.jsonl"
    command = [sys.executable, "-m", "rlmca.bench.plain_loop", "--model", str(model), "--data", str(ASSETS / "rl.json")]
    command += ["--steps", str(options.steps), "--seed", str(seed), "--out", str(report)]
    run_command(command, env=env, log=out / "output.log", shown=f"python -m rlmca.bench.plain_loop --steps {options.steps} --seed {seed}")
    lines = list(read_lines(report))[options.warmup :]
    return Measured([x["seconds"] for x in lines], [x["used_share"] for x in lines], [x["reward"] for x in lines])


def _run_ours(options: CompareOptions, model: Path, old_logp: str, out: Path, env: dict[str, str], seed: int) -> Measured:
    settings = [f"model_name_or_path={model}", f"old_logp={old_logp}", f"max_steps={options.steps}", f"seed={seed}"]
    settings += [f"output_dir={out}", "overwrite_output_dir=true", "logging_steps=1", "plot_loss=false"]
    settings += ["eval_strategy=no", "stop_value=null"]
    command = [*RLMCA, "train", str(GRPO_YAML), *settings]
    shown = f"rlmca-cli train {GRPO_YAML} {' '.join(settings)}"
    run_command(command, env={**env, **MEGATRON}, log=out.with_name(out.name + ".log"), shown=shown)
    lines = [x for x in read_lines(out / LOG_FILE) if "time_step" in x][options.warmup :]
    return Measured([x["time_step"] for x in lines], [x["used_samples"] for x in lines], [x["reward"] for x in lines])


def _samples_per_step() -> int:
    from rlmca.bench.plain_loop import PlainOptions

    return PlainOptions.rollout_batch_size * PlainOptions.num_generations


def _figures(measured: Measured, samples: int, plain_seconds: float) -> dict[str, float]:
    seconds = statistics.median(measured.seconds)
    return {
        "seconds_per_step": seconds,
        "ms_per_sample": 1000 * seconds / samples,
        "ratio_to_plain": seconds / plain_seconds,
        "steps": len(measured.seconds),
        "slowest_step": max(measured.seconds),
        "used_share": statistics.mean(measured.used),
        "reward": statistics.mean(measured.reward),
    }


def _print(rows: dict[str, dict[str, float]], options: CompareOptions) -> None:
    threads = f"{options.threads} thread{'s' if options.threads > 1 else ''}"
    title = f"GRPO on the demo, all in, {threads}; medians; used: share of replies in updates"
    table = Table(title=title, title_justify="left")
    table.add_column("loop", no_wrap=True)
    for column in ("ms/sample", "ratio", "s/step", "steps", "used", "reward"):
        table.add_column(column, justify="right")
    for name, row in rows.items():
        table.add_row(
            name,
            f"{row['ms_per_sample']:.3f}",
            f"{row['ratio_to_plain']:.2f}",
            f"{row['seconds_per_step']:.3f}",
            f"{row['steps']:.0f}",
            f"{row['used_share']:.0%}",
            f"{row['reward']:.3f}",
        )
    console().print(table)


DEMO = Bench("demo", CompareOptions(), run_compare)
