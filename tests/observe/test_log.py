"""The log file: strict JSON, one line a step, also after a resume."""

from __future__ import annotations

import io
import json
import logging
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from rlmca.observe.jsonl import plain, read_lines, write_atomically
from rlmca.observe.log import RunLog, format_time
from rlmca.observe.trackers import PACKAGES, TrackerOptions, check_report_to


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def quiet() -> Console:
    return Console(file=io.StringIO(), width=200)


def strict_lines(path: Path) -> list[dict]:
    def refuse(name: str) -> float:
        raise ValueError(f"{name} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().split("\n") if line]


def test_a_line_has_the_fields_and_forms_of_llamafactory(tmp_path: Path) -> None:
    clock, console = Clock(), quiet()
    log = RunLog(tmp_path, 8, console=console, clock=clock)
    clock.now += 3725
    log.log(2, {"loss": 1.5, "lr": 2e-5, "grad_norm": 0.25, "reward/exact": 0.5}, epoch=0.123456, tokens=7450)
    log.close()
    assert strict_lines(tmp_path / "trainer_log.jsonl") == [
        {
            "current_steps": 2, "total_steps": 8, "loss": 1.5, "lr": 2e-5, "epoch": 0.1235, "percentage": 25.0,
            "elapsed_time": "1:02:05", "remaining_time": "3:06:15", "throughput": 2.0, "total_tokens": 7450,
            "grad_norm": 0.25, "reward/exact": 0.5,
        }
    ]  # fmt: skip
    shown = console.file.getvalue()
    assert shown.count("\n") == 1 and "step 2/8" in shown and "loss 1.5" in shown and "1:02:05<3:06:15" in shown


def test_what_json_cannot_write_becomes_null(tmp_path: Path) -> None:
    with RunLog(tmp_path, 3, console=quiet()) as log:
        log.log(
            1,
            {"loss": math.nan, "a": math.inf, "b": torch.tensor(-math.inf), "c": np.float32(2), "d": torch.tensor(3), "e": [math.nan, 1.0]},
        )
    (line,) = strict_lines(tmp_path / "trainer_log.jsonl")
    assert [line[key] for key in ("loss", "a", "b", "c", "d", "e")] == [None, None, None, 2.0, 3, [None, 1.0]]


def test_a_resumed_run_holds_every_step_once(tmp_path: Path) -> None:
    path = tmp_path / "trainer_log.jsonl"
    with RunLog(tmp_path, 6, console=quiet()) as log:
        for step in range(1, 6):
            log.log(step, {"loss": float(step)})
    with open(path, "a") as file:
        file.write('{"current_steps": 6, "los')  # killed while it wrote
    clock = Clock()
    log = RunLog(tmp_path, 6, append=True, step=3, tokens=1000, console=quiet(), clock=clock)
    assert [line["current_steps"] for line in strict_lines(path)] == [1, 2, 3]
    clock.now += 10
    log.log(4, {"loss": 40.0}, tokens=1500)
    log.log(5, {"loss": 50.0}, tokens=2000)
    log.close()
    lines = strict_lines(path)
    assert [(line["current_steps"], line["loss"]) for line in lines] == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0), (5, 50.0)]
    assert lines[3]["remaining_time"] == "0:00:20"  # two steps left, at this start's own speed
    assert lines[3]["throughput"] == 50.0


def test_a_fresh_run_starts_an_empty_file(tmp_path: Path) -> None:
    for _ in range(2):
        with RunLog(tmp_path, 2, console=quiet()) as log:
            log.log(1, {"loss": 1.0})
    assert len(strict_lines(tmp_path / "trainer_log.jsonl")) == 1


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    console = quiet()
    with RunLog(tmp_path / "x", 2, TrackerOptions(["tensorboard"]), is_main=False, console=console) as log:
        assert log.log(1, {"loss": 1.0})["loss"] == 1.0
    assert not (tmp_path / "x").exists() and console.file.getvalue() == ""


def test_a_metric_may_not_take_the_name_of_a_field(tmp_path: Path) -> None:
    with RunLog(tmp_path, 2, console=quiet()) as log, pytest.raises(ValueError, match="percentage"):
        log.log(1, {"percentage": 1.0})


def test_tensorboard_receives_every_finite_scalar(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with RunLog(tmp_path, 3, TrackerOptions(["tensorboard"]), console=quiet()) as log:
        for step, loss in ((1, 3.0), (2, math.nan), (3, 1.0)):
            log.log(step, {"loss": loss, "lr": 0.5})
    events = EventAccumulator(str(tmp_path / "runs"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 3.0), (3, 1.0)]
    assert [e.step for e in events.Scalars("lr")] == [1, 2, 3]


def test_trackers_that_cannot_be_used_are_named_before_anything_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PACKAGES, "mlflow", "a_package_that_nobody_has")
    problems = check_report_to(["tensorboard", "mlflow", "tensorbored", "none"])
    assert len(problems) == 2 and "package a_package_that_nobody_has" in problems[0] and "tensorbored is not known" in problems[1]
    with pytest.raises(ValueError, match="package a_package_that_nobody_has"):
        RunLog(tmp_path, 2, TrackerOptions(["tensorboard", "mlflow"]), console=quiet())
    assert list(tmp_path.iterdir()) == []


def test_a_failing_tracker_does_not_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    from accelerate.tracking import TensorBoardTracker

    def broken(self: TensorBoardTracker, values: dict, step: int) -> None:
        if step == 2:
            raise OSError("no space left on device")

    monkeypatch.setattr(TensorBoardTracker, "log", broken)
    with caplog.at_level(logging.WARNING), RunLog(tmp_path, 3, TrackerOptions(["tensorboard"]), console=quiet()) as log:
        for step in (1, 2, 3):
            log.log(step, {"loss": 2.0})
    assert [r.message for r in caplog.records if "tensorboard failed at step 2" in r.message and "no space" in r.message].__len__() == 1
    assert len(strict_lines(tmp_path / "trainer_log.jsonl")) == 3


def test_times() -> None:
    assert [format_time(s) for s in (0, 59.9, 3600, 90061, -3)] == ["0:00:00", "0:00:59", "1:00:00", "1 day, 1:01:01", "0:00:00"]


def test_lines_with_unicode_separators_survive(tmp_path: Path) -> None:
    text = "a\u2028b\u0085c\u2029d 😀"
    with RunLog(tmp_path, 1, console=quiet()) as log:
        log.log(1, {"note": text})
    assert next(read_lines(tmp_path / "trainer_log.jsonl"))["note"] == text


def test_a_broken_line_in_the_middle_is_an_error_with_its_number(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"a": 1}\n{"a": \n{"a": 3}\n')
    with pytest.raises(ValueError, match="line 2"):
        list(read_lines(tmp_path / "x.jsonl"))


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_atomically(tmp_path / "a.json", "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(tmp_path / "a.json", "new \ud800")
    assert (tmp_path / "a.json").read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_plain_walks_everything() -> None:
    assert plain({1: (True, None, {"x": float("inf")}), "p": Path("a")}) == {"1": [True, None, {"x": None}], "p": "a"}
