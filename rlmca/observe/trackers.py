"""`report_to`: the log lines, sent to experiment trackers as well, through the tracker classes of Accelerate."""

from __future__ import annotations

import functools
import importlib.util
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlmca.observe.jsonl import dumps, write_atomically

PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "swanlab": "swanlab", "trackio": "trackio", "mlflow": "mlflow"}
"""Name in `report_to` -> module that it needs."""
RUN_IDS = "trackers.json"
"""In `output_dir`: how each tracker calls the run, so that a resumed run goes on in it."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrackerOptions:
    """`config` is logged with the run: no secrets. `swanlab` holds further arguments of swanlab.init."""

    report_to: Sequence[str] = ()
    project: str = "rlmca"
    run_name: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    swanlab: Mapping[str, Any] = field(default_factory=dict)
    swanlab_api_key: str | None = field(default=None, repr=False)


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


class Trackers:
    """The trackers of a run. One that fails, at its start too, says so once and is left out from then on: it is no reason to lose a run.

    ValueError with every problem of `report_to`, before any is opened. A run that goes on after `start_step` continues the
    trackers' runs that `output_dir` knows of; TensorBoard drops the points of later steps.
    """

    def __init__(self, options: TrackerOptions, output_dir: Path, start_step: int = 0) -> None:
        if problems := check_report_to(options.report_to):
            raise ValueError("; ".join(problems))
        self._open: dict[str, Any] = {}
        names = [name for name in dict.fromkeys(options.report_to) if name != "none"]
        if not names:
            return
        from accelerate import PartialState

        PartialState()  # Accelerate's loggers insist on it; the process group of a run exists by now and stays as it is
        self._ids = _read_ids(output_dir) if start_step else {}
        for name in names:
            self._try(name, "could not be started", functools.partial(self._start, name, options, output_dir, start_step))
        if self._ids:
            write_atomically(output_dir / RUN_IDS, dumps(self._ids) + "\n")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """The finite numbers of one step."""
        for name in list(self._open):
            named = {key.replace("@", "_at_"): value for key, value in metrics.items()} if name == "mlflow" else dict(metrics)
            self._try(name, f"failed at step {step}", functools.partial(self._open[name].log, named, step=step))

    def close(self) -> None:
        """Sends what is left."""
        for name in list(self._open):
            self._try(name, "could not be closed", self._open[name].finish)
        self._open = {}

    def _start(self, name: str, options: TrackerOptions, output_dir: Path, start_step: int) -> None:
        tracker = _OPENERS[name](options, output_dir, start_step, self._ids.get(name))
        tracker.main_process_only = False  # only the main rank gets here
        tracker.start()
        self._open[name] = tracker
        if run_id := _RUN_ID.get(name, lambda _: None)(tracker.tracker):
            self._ids[name] = str(run_id)
        if name == "tensorboard":  # its table of hyperparameters would be a run of its own
            text = "\n".join(f"    {key}: {value}" for key, value in options.config.items())
            tracker.log({"config": text}, step=start_step)
        elif not start_step:  # a run that goes on has it
            tracker.store_init_configuration(_flat(options.config))

    def _try(self, name: str, what: str, action: Callable[[], Any]) -> None:
        try:
            action()
        except Exception as error:
            self._open.pop(name, None)
            _logger.warning("report_to: %s %s and is left out for the rest of the run: %r", name, what, error)


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """Lists and mappings as JSON text: trackers take numbers and texts."""
    return {key: value if isinstance(value, (bool, int, float, str)) else json.dumps(value, default=str) for key, value in config.items()}


def _read_ids(output_dir: Path) -> dict[str, str]:
    try:
        return dict(json.loads((output_dir / RUN_IDS).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}


def _name(options: TrackerOptions, output_dir: Path) -> str:
    return options.run_name or output_dir.resolve().name


def _tensorboard(options: TrackerOptions, output_dir: Path, start_step: int, run_id: str | None) -> Any:
    from accelerate.tracking import TensorBoardTracker

    return TensorBoardTracker("runs", str(output_dir), purge_step=start_step + 1 if start_step else None)


def _wandb(options: TrackerOptions, output_dir: Path, start_step: int, run_id: str | None) -> Any:
    from accelerate.tracking import WandBTracker

    more = {"id": run_id, "resume": "allow"} if run_id else {}
    return WandBTracker(options.project, name=_name(options, output_dir), dir=str(output_dir), **more)


def _swanlab(options: TrackerOptions, output_dir: Path, start_step: int, run_id: str | None) -> Any:
    from accelerate.tracking import SwanLabTracker

    if options.swanlab_api_key:
        import swanlab

        swanlab.login(api_key=options.swanlab_api_key)
    given = {"name": _name(options, output_dir), "log_dir": str(output_dir / "swanlab"), **options.swanlab}
    more = {"id": run_id, "resume": "allow"} if run_id else {}
    return SwanLabTracker(given.pop("project", options.project), **given, **more)


def _trackio(options: TrackerOptions, output_dir: Path, start_step: int, run_id: str | None) -> Any:
    from accelerate.tracking import TrackioTracker

    return TrackioTracker(options.project, name=run_id or _name(options, output_dir), resume="allow" if run_id else "never", embed=False)


def _mlflow(options: TrackerOptions, output_dir: Path, start_step: int, run_id: str | None) -> Any:
    import mlflow
    from accelerate.tracking import MLflowTracker

    if not mlflow.environment_variables.MLFLOW_TRACKING_URI.get():
        mlflow.set_tracking_uri(f"sqlite:///{(output_dir / 'mlflow.db').resolve()}")
    return MLflowTracker(options.project, run_id=run_id, run_name=_name(options, output_dir))


_OPENERS: Mapping[str, Callable[[TrackerOptions, Path, int, str | None], Any]] = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "swanlab": _swanlab,
    "trackio": _trackio,
    "mlflow": _mlflow,
}
_RUN_ID: Mapping[str, Callable[[Any], Any]] = {
    "wandb": lambda run: run.id,
    "swanlab": lambda run: run.id,
    "trackio": lambda run: run.name,
    "mlflow": lambda run: run.info.run_id,
}
