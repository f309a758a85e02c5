"""`bench logprobs`: log-probs and entropy from hidden states, forward and backward: ours beside all logits at once, in one run.

Every measurement has a process of its own, so that peaks of memory are its own; the processes alternate, and the median
over all rounds counts.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from rlmca.bench.base import Bench
from rlmca.bench.commands import run_command
from rlmca.config import ConfigError
from rlmca.observe.console import console

NAIVE = "all logits"
VARIANTS = {NAIVE: ("naive", 1), "all logits, torch.compile": ("compiled", 1), "rlmca": ("ours", 1), "rlmca, TP2": ("ours", 2)}
"""Name -> what the worker calls it, and on how many tensor-parallel ranks."""
ENTROPY = {
    "none": "log_softmax(logits.float()).gather and no entropy",
    "value": "log_softmax(logits.float()).gather and the entropy's value, without its gradient",
    "gradient": "log_softmax(logits.float()).gather and the entropy with its gradient",
}
TIME_BAR, MEMORY_BAR = 0.85, 0.20
"""What ours may take of what `NAIVE` takes at the default sizes."""


@dataclass(frozen=True)
class LogProbOptions:
    """Sizes in bfloat16; `rounds` processes of each kind with `steps` counted steps each, after one that is not counted."""

    tokens: int = 4096
    hidden: int = 1024
    vocab: int = 151936
    rounds: int = 3
    steps: int = 2
    threads: int = 1
    entropy: str = "value"
    """What all logits at once compute of the entropy: none, value, gradient. Ours always gives it with its gradient."""
    error_tokens: int = 256
    """Tokens for which log-probs and gradients are compared with float64."""


def run_logprobs(options: LogProbOptions) -> dict[str, Any]:
    """Run all rounds, print the table, return the figures."""
    if min(value for value in vars(options).values() if isinstance(value, int)) < 1 or options.vocab < 2:
        raise ConfigError("bench logprobs: sizes, rounds, steps and threads must be at least 1, vocab at least 2")
    if options.entropy not in ENTROPY:
        raise ConfigError(f"bench logprobs: entropy={options.entropy} is none of {', '.join(ENTROPY)}")
    measured: dict[str, list[dict[str, Any]]] = {name: [] for name in VARIANTS}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.rounds):
            for name, (kind, ranks) in VARIANTS.items():
                measured[name].append(_measure(options, kind, ranks, Path(folder) / f"{number}-{kind}-{ranks}.json"))
        errors = _measure(options, "errors", 1, Path(folder) / "errors.json")
    rows = {name: _figures(values, measured[NAIVE]) for name, values in measured.items()}
    naive_computes = ENTROPY[options.entropy]
    _print(rows, errors, options, naive_computes)
    figures = {"bench": "logprobs", "options": {**vars(options)}, "cpu_count": os.cpu_count(), "all_logits_compute": naive_computes}
    return {**figures, "results": rows, "errors": errors, "bars": {"time": TIME_BAR, "memory": MEMORY_BAR}}


def _measure(options: LogProbOptions, kind: str, ranks: int, out: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "rlmca.bench.logprobs_worker", "--kind", kind, "--ranks", str(ranks), "--out", str(out)]
    for name, value in vars(options).items():
        if name != "rounds":
            command += [f"--{name}", str(value)]
    shown = f"python -m rlmca.bench.logprobs_worker --kind {kind} --ranks {ranks}"
    run_command(command, env={"OMP_NUM_THREADS": str(options.threads)}, log=out.with_suffix(".log"), shown=shown)
    result: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return result


def _figures(values: list[dict[str, Any]], naive: list[dict[str, Any]]) -> dict[str, float]:
    def seconds(runs: list[dict[str, Any]]) -> float:
        return statistics.median([s for run in runs for s in run["seconds"]])

    def extra(runs: list[dict[str, Any]]) -> float:
        return statistics.median([run["extra_bytes"] for run in runs])

    return {
        "seconds": seconds(values),
        "fastest_seconds": min(s for run in values for s in run["seconds"]),
        "slowest_seconds": max(s for run in values for s in run["seconds"]),
        "extra_gb": extra(values) / 1e9,
        "time_ratio": seconds(values) / seconds(naive),
        "memory_ratio": extra(values) / max(extra(naive), 1),
        "first_step_seconds": statistics.median([run["first"] for run in values]),
    }


def _print(rows: dict[str, dict[str, float]], errors: dict[str, Any], options: LogProbOptions, naive_computes: str) -> None:
    size = f"{options.tokens} tokens, hidden {options.hidden}, vocabulary {options.vocab}, bf16, threads: {options.threads}"
    table = Table(title=f"Log-probs and entropy, forward + backward, {size}; medians", title_justify="left")
    table.add_column("way", no_wrap=True)
    for column in ("s", "ratio", "extra GB", "ratio", "first step s"):
        table.add_column(column, justify="right")
    for name, row in rows.items():
        cells = (f"{row['seconds']:.2f}", f"{row['time_ratio']:.2f}", f"{row['extra_gb']:.2f}", f"{row['memory_ratio']:.2f}")
        table.add_row(name, *cells, f"{row['first_step_seconds']:.1f}")
    console().print(table)
    console().print(f"{NAIVE}: {naive_computes}; rlmca: log-prob and entropy, both with gradients; TP2: a rank's share, slowest rank")
    for name, error in errors.items():
        console().print(
            f"bf16 against float64, {name}: log-probs off by {error['logp']:.1e} nats on average, "
            f"gradients by {error['hidden']:.2%} (hidden states) and {error['weight']:.2%} (weight)"
        )


LOGPROBS = Bench("logprobs", LogProbOptions(), run_logprobs)
