"""`make demo`: SFT, GRPO and evaluation of a tiny model through the command line, and one table at the end.

Run from the repository's folder. What it makes lies in `outputs/demo/`: assets, both runs, evaluations, `summary.json`.
Choices are made on the validation questions; the test questions are read once, by the three evaluations at the end.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from rlmca.bench import demo_assets
from rlmca.bench.commands import RLMCA, CommandFailed, run_command
from rlmca.config import ConfigError
from rlmca.observe.console import console, note
from rlmca.observe.jsonl import read_lines
from rlmca.observe.log import LOG_FILE
from rlmca.run.output import write_json

OUTPUTS = Path("outputs/demo")
ASSETS = OUTPUTS / "assets"
SFT_YAML = Path("examples/megatron/demo_sft.yaml")
GRPO_YAML = Path("examples/megatron/demo_grpo.yaml")
BASE_FOLDER = ASSETS / demo_assets.MODEL_FOLDER
SFT_FOLDER = OUTPUTS / "sft" / "hf"
GRPO_FOLDER = OUTPUTS / "grpo" / "hf"
MEGATRON = {"USE_MCA": "1"}


@dataclass(frozen=True)
class Phase:
    """Wall seconds of a command, start-up included, and the tokens per second that it logged."""

    seconds: float
    tokens_per_second: float | None


@dataclass(frozen=True)
class DemoOptions:
    """What of the demo can be chosen. `tp` ranks hold the policy together: torchrun's in the first stage, Ray's in the second."""

    seed: int = 0
    rollout: str = "local"
    tp: int = 1

    @property
    def rollout_settings(self) -> list[str]:
        """Settings of the commands that write replies."""
        return [] if self.rollout == "local" else [f"rollout_engine={self.rollout}"]


def prepare_assets() -> None:
    """The tiny model and data, made once."""
    if not GRPO_YAML.is_file():
        raise ConfigError(f"{GRPO_YAML} is not here: run this in the folder of the repository")
    if demo_assets.prepare(ASSETS):
        note(f"made the demo's model and data in {ASSETS}")


def train_sft(options: DemoOptions) -> float:
    """The supervised stage; its wall seconds."""
    return _train(SFT_YAML, SFT_FOLDER.parent, options, [])


def train_grpo(options: DemoOptions) -> float:
    """The RL stage, from what the supervised stage left; its wall seconds."""
    return _train(GRPO_YAML, GRPO_FOLDER.parent, options, options.rollout_settings)


def _train(yaml: Path, output_dir: Path, options: DemoOptions, extra: list[str]) -> float:
    shutil.rmtree(output_dir, ignore_errors=True)
    settings = [str(yaml), f"seed={options.seed}", *extra]
    env = dict(MEGATRON)
    if options.tp > 1:
        settings.append(f"tensor_model_parallel_size={options.tp}")
        env["NPROC_PER_NODE"] = str(options.tp)
    return run_command([*RLMCA, "train", *settings], env=env, shown=f"rlmca-cli train {' '.join(settings)}")


def evaluate(name: str, model: Path, options: DemoOptions) -> tuple[float, Phase]:
    """(accuracy of greedy replies to the test questions, cost)."""
    out = OUTPUTS / "eval" / name
    shutil.rmtree(out, ignore_errors=True)
    settings = [str(GRPO_YAML), f"model_name_or_path={model}", "eval_dataset=demo_test", f"output_dir={out}", *options.rollout_settings]
    seconds = run_command([*RLMCA, "eval", *settings], env=MEGATRON, shown=f"rlmca-cli eval {' '.join(settings)}")
    results = json.loads((out / "eval_results.json").read_text(encoding="utf-8"))
    return results["eval_accuracy"], Phase(seconds, results["eval_tokens_per_second"])


def run_demo(options: DemoOptions) -> dict[str, Any]:
    """Everything; prints the table, writes `outputs/demo/summary.json` and returns what is in it."""
    prepare_assets()
    (OUTPUTS / "summary.json").unlink(missing_ok=True)  # an interrupted demo leaves no figures of an earlier one
    phases: dict[str, Phase] = {}
    phases["sft"] = Phase(train_sft(options), _throughput(SFT_FOLDER.parent))
    phases["grpo"] = Phase(train_grpo(options), _throughput(GRPO_FOLDER.parent))
    accuracy: dict[str, float] = {}
    for name, model in (("base", BASE_FOLDER), ("sft", SFT_FOLDER), ("grpo", GRPO_FOLDER)):
        accuracy[name], phases[f"eval_{name}"] = evaluate(name, model, options)
    summary = {
        "accuracy": accuracy,
        "seconds": {name: round(phase.seconds, 2) for name, phase in phases.items()},
        "tokens_per_second": {name: phase.tokens_per_second for name, phase in phases.items()},
        "samples_per_second": samples_per_second(GRPO_FOLDER.parent),
        "hf_folder": str(GRPO_FOLDER),
        **dataclasses.asdict(options),
    }
    write_json(OUTPUTS / "summary.json", summary)
    _print(summary, phases)
    return summary


def _throughput(output_dir: Path) -> float | None:
    """Tokens per second of a whole training run, prompts included, as its last log line has it."""
    values = [line["throughput"] for line in read_lines(output_dir / LOG_FILE) if line.get("throughput")]
    return values[-1] if values else None


def samples_per_second(output_dir: Path) -> float:
    """Replies generated, scored and trained on per second: the median step of an RL run, its rollout files counted."""
    seconds = [line["time_step"] for line in read_lines(output_dir / LOG_FILE) if "time_step" in line]
    if not seconds:
        raise ValueError(f"{output_dir / LOG_FILE} has no line with time_step")
    first = min((output_dir / "rollouts").glob("step-*.jsonl.zst"))
    import zstandard

    with zstandard.open(first, "rt", encoding="utf-8") as lines:
        replies = sum(1 for _ in lines)
    return round(replies / statistics.median(seconds), 1)


def _print(summary: dict[str, Any], phases: dict[str, Phase]) -> None:
    accuracy: dict[str, float] = summary["accuracy"]
    table = Table(title="demo: greedy replies to test questions that nothing has seen before", title_justify="left")
    table.add_column("model")
    for column in ("held-out accuracy", "training s", "tokens/s", "evaluation s"):
        table.add_column(column, justify="right")
    for name, label in (("base", "before"), ("sft", "after SFT"), ("grpo", "after GRPO")):
        phase = phases.get(name)
        speed = "" if phase is None or phase.tokens_per_second is None else f"{phase.tokens_per_second:,.0f}"
        cost = "" if phase is None else f"{phase.seconds:.1f}"
        table.add_row(label, f"{accuracy[name]:.3f}", cost, speed, f"{phases[f'eval_{name}'].seconds:.1f}")
    console().print(table)
    note(f"GRPO: {summary['samples_per_second']:,.0f} replies a second, all in")
    plots = sorted(GRPO_FOLDER.parent.glob("*.png"))
    note(f"plots: {', '.join(map(str, plots)) if plots else 'none were drawn'}")
    note(f"Hugging Face folder: {GRPO_FOLDER}")
    note(f"all figures: {OUTPUTS / 'summary.json'}")


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m rlmca.bench.demo [--seed N] [--rollout local|sglang] [--tp N]`."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="seed of both trainings (the data stays the same)")
    parser.add_argument("--rollout", choices=("local", "sglang"), default="local", help="engine that writes the replies")
    parser.add_argument("--tp", type=int, default=1, help="ranks over which the policy is split")
    options = DemoOptions(**vars(parser.parse_args(argv)))
    try:
        run_demo(options)
    except KeyboardInterrupt:
        print("demo: interrupted", file=sys.stderr)
        return 130
    except (CommandFailed, ConfigError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
