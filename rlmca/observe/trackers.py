"""`report_to`: the log lines, sent to experiment trackers as well."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "swanlab": "swanlab", "trackio": "trackio", "mlflow": "mlflow"}
"""Name in `report_to` -> package that it needs."""


class Tracker(Protocol):
    """Receives finite scalars."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """The metrics of one step."""
        ...

    def close(self) -> None:
        """Sends what is left."""
        ...


def check_report_to(report_to: Sequence[str]) -> list[str]:
    """Problems of a `report_to` list, each a sentence: unknown names and packages that are not installed."""
    problems = []
    for name in report_to:
        if name == "none":
            continue
        if name not in PACKAGES:
            problems.append(f"report_to: {name} is not known; write any of {', '.join(PACKAGES)}, or none")
        elif importlib.util.find_spec(PACKAGES[name]) is None:
            problems.append(f"report_to: {name} needs the package {PACKAGES[name]}, which is not installed; install it or leave {name} out")
    return problems


def open_trackers(report_to: Sequence[str], output_dir: Path, run_name: str | None, start_step: int) -> dict[str, Tracker]:
    """The trackers named, by name. Raises ValueError with every problem of the list before any is opened."""
    if problems := check_report_to(report_to):
        raise ValueError("; ".join(problems))
    name = run_name or output_dir.name
    return {kind: _OPENERS[kind](output_dir, name, start_step) for kind in dict.fromkeys(report_to) if kind != "none"}


class _TensorBoard:
    """Event files in `output_dir/runs`; points after the step that a run resumes from are purged."""

    def __init__(self, output_dir: Path, name: str, start_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(output_dir / "runs"), purge_step=start_step + 1 if start_step else None)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for key, value in metrics.items():
            self._writer.add_scalar(key, value, step)

    def close(self) -> None:
        self._writer.close()


class _Module:
    """A tracker whose package has `init`, `log(metrics, step=)` and `finish` as module functions."""

    def __init__(self, module: str, options: Mapping[str, Any]) -> None:
        self._module = importlib.import_module(module)
        self._module.init(**options)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._module.log(dict(metrics), step=step)

    def close(self) -> None:
        self._module.finish()


class _MLflow:
    """One MLflow run."""

    def __init__(self, output_dir: Path, name: str, start_step: int) -> None:
        self._mlflow = importlib.import_module("mlflow")
        self._mlflow.start_run(run_name=name)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._mlflow.log_metrics({key.replace("@", "_at_"): value for key, value in metrics.items()}, step=step)

    def close(self) -> None:
        self._mlflow.end_run()


_PROJECT = "rlmca"
_OPENERS: dict[str, Callable[[Path, str, int], Tracker]] = {
    "tensorboard": _TensorBoard,
    "wandb": lambda out, name, _: _Module("wandb", {"project": _PROJECT, "name": name, "dir": str(out)}),
    "swanlab": lambda out, name, _: _Module("swanlab", {"project": _PROJECT, "experiment_name": name, "logdir": str(out / "swanlab")}),
    "trackio": lambda out, name, _: _Module("trackio", {"project": _PROJECT, "name": name}),
    "mlflow": _MLflow,
}
