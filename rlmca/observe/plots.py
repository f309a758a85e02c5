"""Curves of a run, drawn from its log: `training_loss.png`, `training_reward.png`, ..."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from rlmca.observe.jsonl import read_lines
from rlmca.observe.log import LOG_FILE

_logger = logging.getLogger(__name__)


def series(log: Path, name: str) -> tuple[list[int], list[float]]:
    """(steps, values) of every finite value logged under `name`, in the order of the file."""
    points = [
        (line["current_steps"], value)
        for line in read_lines(log)
        if isinstance(value := line.get(name), (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    ]
    return [step for step, _ in points], [float(value) for _, value in points]


def smoothed(values: Sequence[float], weight: float | None = None) -> list[float]:
    """Exponential moving average; by default the weight grows with the number of values, from 0 to about 0.9."""
    keep = 0.9 * (1 - math.exp(-len(values) / 60)) if weight is None else weight
    out: list[float] = []
    for value in values:
        out.append(value if not out else keep * out[-1] + (1 - keep) * value)
    return out


def draw(name: str, steps: Sequence[int], values: Sequence[float]) -> Figure:
    """A figure whose first line holds every point and whose second, from three points on, the moving average."""
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(steps, values, color="#1f77b4", alpha=0.4, marker="." if len(values) < 30 else None, label="logged")
    if len(values) >= 3:
        axes.plot(steps, smoothed(values), color="#1f77b4", label="smoothed")
        axes.legend()
    axes.set_xlabel("step")
    axes.set_ylabel(name)
    axes.set_title(f"training {name}")
    axes.grid(alpha=0.3)
    return figure


def plot_all(output_dir: str | Path, names: Sequence[str]) -> list[Path]:
    """Draws each metric of `names` that has a finite value in the log; returns the files written.

    A metric that was never logged gets no file; all of them together give one warning.
    """
    output_dir = Path(output_dir)
    written, absent = [], []
    for name in names:
        steps, values = series(output_dir / LOG_FILE, name) if (output_dir / LOG_FILE).exists() else ([], [])
        if not values:
            absent.append(name)
            continue
        path = output_dir / f"training_{re.sub(r'[^A-Za-z0-9_.@-]+', '_', name)}.png"
        draw(name, steps, values).savefig(path, dpi=120)
        written.append(path)
    if absent:
        _logger.warning("no plot of %s: no finite value in %s", ", ".join(absent), output_dir / LOG_FILE)
    return written
