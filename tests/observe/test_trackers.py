"""The real trackers, each in its offline mode: what they keep, also over a resume, read back with their own tools."""

from __future__ import annotations

import importlib.util
import io
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from rlmca.config import Environment, make_config
from rlmca.observe.log import RunLog
from rlmca.observe.trackers import TrackerOptions
from rlmca.run.tracking import tracker_options

ROOT = Path(__file__).parents[2]
RUN = """
import sys, io, json
from pathlib import Path
from rich.console import Console
from rlmca.observe.log import RunLog
from rlmca.observe.trackers import TrackerOptions
folder, kind, start, swanlab = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4])
options = TrackerOptions([kind], "adding", "mine", {"stage": "sft", "rewards": ["a", {"name": "b"}], "lr": 0.5}, swanlab)
with RunLog(folder, 5, options, append=start > 0, step=start, console=Console(file=io.StringIO())) as log:
    for step in range(start + 1, start + 4):
        log.log(step, {"loss": 1.0 / step, "pass@4": 0.25, "reward/exact": 0.5})
"""


def need(module: str, package: str | None = None) -> pytest.MarkDecorator:
    there = importlib.util.find_spec(module) is not None
    return pytest.mark.skipif(not there, reason=f"{module} is not installed: pip install -r requirements/dev.txt, or {package or module}")


def track(folder: Path, kind: str, start: int = 0, swanlab: dict[str, str] | None = None, **env: str) -> str:
    """Steps start+1 to start+3, in a process of their own: trackers keep state and threads, and change the environment."""
    command = [sys.executable, "-W", "ignore", "-c", RUN, str(folder), kind, str(start), json.dumps(swanlab or {})]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "TRACKIO_DIR": str(folder / "trackio"), **env}
    done = subprocess.run(command, env=environment, cwd=folder, text=True, capture_output=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len((folder / "trainer_log.jsonl").read_text().splitlines()) == start + 3
    assert "left out for the rest of the run" not in done.stderr, done.stderr
    return done.stdout + done.stderr


def test_tensorboard_drops_the_points_after_a_resume(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for start in (0, 2):
        options = TrackerOptions(["tensorboard"], config={"stage": "sft", "lr": 0.5})
        with RunLog(tmp_path, 5, options, append=start > 0, step=start, console=Console(file=io.StringIO())) as log:
            for step in range(start + 1, start + 4):
                log.log(step, {"loss": float(start)})
    events = EventAccumulator(str(tmp_path / "runs"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 0), (2, 0), (3, 2), (4, 2), (5, 2)]
    assert "config/text_summary" in events.Tags()["tensors"]


@need("wandb")
def test_wandb_offline(tmp_path: Path) -> None:
    track(tmp_path, "wandb", WANDB_MODE="offline", WANDB_SILENT="true")
    first = json.loads((tmp_path / "trackers.json").read_text())
    track(tmp_path, "wandb", 2, WANDB_MODE="offline", WANDB_SILENT="true")
    assert json.loads((tmp_path / "trackers.json").read_text()) == first
    files = list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 2 and all(first["wandb"] in file.name for file in files)  # one run, in two pieces: `wandb sync` joins them
    raw = b"".join(file.read_bytes() for file in files)
    assert all(word in raw for word in (b"adding", b"mine", b"reward/exact", b"pass@4", b"rewards"))


@need("swanlab")
def test_swanlab_offline(tmp_path: Path) -> None:
    track(tmp_path, "swanlab", swanlab={"mode": "offline", "log_dir": str(tmp_path / "logs")})
    first = json.loads((tmp_path / "trackers.json").read_text())
    track(tmp_path, "swanlab", 2, swanlab={"mode": "offline", "log_dir": str(tmp_path / "logs")})
    assert json.loads((tmp_path / "trackers.json").read_text()) == first
    raw = b"".join(file.read_bytes() for file in (tmp_path / "logs").rglob("*") if file.is_file())
    assert all(word in raw for word in (b"adding", b"mine", b"reward/exact", b"pass@4"))


@need("trackio")
def test_trackio(tmp_path: Path) -> None:
    import sqlite3

    track(tmp_path, "trackio")
    track(tmp_path, "trackio", 2)
    (database,) = (tmp_path / "trackio").glob("adding*.db")
    with sqlite3.connect(database) as connection:
        rows = connection.execute("select run_name, step, metrics from metrics order by id").fetchall()
    assert [(name, step) for name, step, _ in rows] == [("mine", step) for step in (1, 2, 3, 3, 4, 5)]
    assert json.loads(rows[-1][2])["loss"] == pytest.approx(1 / 5) and json.loads(rows[0][2])["pass@4"] == 0.25


@need("mlflow", "mlflow-skinny sqlalchemy alembic")
def test_mlflow(tmp_path: Path, whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In plain files for speed: to make the default's database takes many seconds; `--whole` does."""
    uri = f"sqlite:///{tmp_path}/mlflow.db" if whole else (tmp_path / "mlruns").as_uri()
    env = {"MLFLOW_ALLOW_FILE_STORE": "true"} if whole else {"MLFLOW_ALLOW_FILE_STORE": "true", "MLFLOW_TRACKING_URI": uri}
    track(tmp_path, "mlflow", **env)
    track(tmp_path, "mlflow", 2, **env)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    (experiment,) = [e for e in client.search_experiments() if e.name == "adding"]
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_name == "mine" and run.info.status == "FINISHED"
    assert run.data.params["lr"] == "0.5" and json.loads(run.data.params["rewards"]) == ["a", {"name": "b"}]
    history = client.get_metric_history(run.info.run_id, "loss")
    assert sorted(m.step for m in history) == [1, 2, 3, 3, 4, 5] and run.data.metrics["pass_at_4"] == 0.25


def test_a_tracker_that_cannot_start_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "runs").write_text("no folder")
    with caplog.at_level(logging.WARNING), RunLog(tmp_path, 2, TrackerOptions(["tensorboard"]), console=Console(file=io.StringIO())) as log:
        log.log(1, {"loss": 1.0})
    assert [r.message.split(" and is left out")[0] for r in caplog.records] == ["report_to: tensorboard could not be started"]


def test_keys_become_options_without_secrets() -> None:
    values = {"model_name_or_path": "m", "dataset": "d", "output_dir": "o", "use_swanlab": True, "swanlab_mode": "local", "project": "p"}
    cfg = make_config({**values, "swanlab_api_key": "s3cret", "hf_hub_token": "t0ken", "run_name": "r"}, env=Environment())
    options = tracker_options(cfg)
    assert (options.report_to, options.project, options.run_name, dict(options.swanlab)) == (["swanlab"], "p", "r", {"mode": "local"})
    assert options.swanlab_api_key == "s3cret"
    assert "s3cret" not in repr(options) and "t0ken" not in repr(options) and options.config["learning_rate"] == 5e-5
    idle = make_config(
        {"model_name_or_path": "m", "dataset": "d", "output_dir": "o", "swanlab_mode": "local", "project": "p"}, env=Environment()
    )
    assert [note.split()[0] for note in idle.notes] == ["swanlab_mode", "project"]
