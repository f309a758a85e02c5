"""The run's log: `trainer_log.jsonl`, one console line per log step, and the trackers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.text import Text

from rlmca.observe.console import console as run_console
from rlmca.observe.jsonl import dumps, plain, read_lines, write_atomically
from rlmca.observe.trackers import TrackerOptions, Trackers

LOG_FILE = "trainer_log.jsonl"
_SHOWN = (
    "loss", "eval_loss", "eval_accuracy", "eval_reward", "reward", "zero_std_groups", "lr", "grad_norm", "loss_scale", "kl", "entropy",
)  # fmt: skip
"""Metrics of the console line, in this order, where they are logged; the file has all."""


class RunLog:
    """Writes what a step has to say, once, to everywhere. On ranks other than the main one it does nothing.

    A run that resumes passes `append=True` and the `step` it resumes from: lines of later steps, written before the
    run was stopped, are dropped first, so that the file holds every step once. `tokens` is the number of tokens seen
    before this start; the throughput counts from there. `clock` gives seconds.
    """

    def __init__(
        self,
        output_dir: str | Path,
        total_steps: int,
        tracking: TrackerOptions | None = None,
        append: bool = False,
        is_main: bool = True,
        *,
        step: int = 0,
        tokens: int = 0,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path = Path(output_dir) / LOG_FILE
        self._total, self._first_step, self._first_tokens, self._clock = total_steps, step if append else 0, tokens, clock
        self._start = clock()
        self._console = console or run_console()
        self._file: TextIO | None = None
        self._trackers: Trackers | None = None
        if is_main:
            self._trackers = Trackers(tracking or TrackerOptions(), Path(output_dir), self._first_step)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            _keep_until(self.path, step if append else 0)
            self._file = self.path.open("a", encoding="utf-8")

    def log(self, step: int, metrics: Mapping[str, Any], epoch: float | None = None, tokens: int | None = None) -> dict[str, Any]:
        """Writes the line of optimizer step `step` (1 is the first) and returns it.

        `metrics` are scalars under any name (loss and lr among them); `tokens` is the total seen so far. Fields keep
        LLaMA-Factory's names and forms: percentage with two digits, times as H:MM:SS, throughput in tokens per second.
        """
        elapsed = self._clock() - self._start
        done = step - self._first_step
        left = (self._total - step) * elapsed / done if done > 0 else 0.0
        line: dict[str, Any] = {"current_steps": step, "total_steps": self._total}
        line |= {name: metrics[name] for name in ("loss", "lr") if name in metrics}
        line["epoch"] = epoch if epoch is None else round(epoch, 4)
        line["percentage"] = round(step / self._total * 100, 2) if self._total > 0 else 100.0
        line["elapsed_time"], line["remaining_time"] = format_time(elapsed), format_time(left)
        if tokens is not None:
            line["throughput"] = round((tokens - self._first_tokens) / elapsed, 2) if elapsed > 0 else 0.0
            line["total_tokens"] = tokens
        clash = sorted((line.keys() - {"loss", "lr"}) & metrics.keys())
        if clash:
            raise ValueError(f"metrics may not be named {', '.join(clash)}: the log line has these names already")
        line = plain(line | dict(metrics))
        if self._file is not None:
            self._file.write(dumps(line) + "\n")
            self._file.flush()
            self._console.print(console_line(line), highlight=False, soft_wrap=True)
            self._track(step, line)
        return line

    def _track(self, step: int, line: Mapping[str, Any]) -> None:
        scalars = {
            key: float(value)
            for key, value in line.items()
            if isinstance(value, (int, float)) and not isinstance(value, bool) and key not in ("current_steps", "total_steps")
        }
        if self._trackers is not None:
            self._trackers.log(step, scalars)

    def close(self) -> None:
        """Closes the file and the trackers."""
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._trackers is not None:
            self._trackers.close()
            self._trackers = None

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def format_time(seconds: float) -> str:
    """H:MM:SS, days in front where there are any."""
    return str(timedelta(seconds=int(max(0.0, seconds))))


def console_line(line: Mapping[str, Any]) -> Text:
    """The short form of a log line."""
    text = Text(f"step {line['current_steps']}/{line['total_steps']}", style="bold")
    for name in _SHOWN:
        value = line.get(name)
        if isinstance(value, (int, float)) and math.isfinite(value):
            text.append(f"  {name} ", style="dim").append(f"{value:.4g}", style="default")
        elif name in line:
            text.append(f"  {name} ", style="dim").append("not finite", style="red")
    if line.get("throughput") is not None:
        text.append(f"  {line['throughput']:,.0f} tokens/s", style="not bold")
    return text.append(f"  {line['elapsed_time']}<{line['remaining_time']}", style="dim")


def _keep_until(path: Path, step: int) -> None:
    """Leaves the lines of steps up to `step` in the file; 0 empties it."""
    kept = [line for line in read_lines(path) if line.get("current_steps", 0) <= step] if step and path.exists() else []
    write_atomically(path, "".join(dumps(line) + "\n" for line in kept))
