"""A checkpoint at the end of the run: a finished run is not run again, an unfinished one writes what it owes."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlmca.config import BatchPlan, Environment, make_config
from rlmca.run.checkpoint import CheckpointError
from rlmca.run.output import OutputDirError, prepare_output_dir
from rlmca.run.session import Session


class Nothing:
    """A role and an order that keep nothing."""

    def save(self, path: Path) -> None: ...

    def load(self, path: Path) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        return True


def session(output: Path, steps: int) -> Session:
    values = {"model_name_or_path": "m", "dataset": "d", "output_dir": str(output), "max_steps": steps}
    plan = BatchPlan(8, 1, 1, 1, 1, 1, 1, 1, 8, steps)
    ranks: Any = SimpleNamespace(sizes=(1, 1, 1), loop=SimpleNamespace(is_main=True, barrier=lambda: None, any_rank=bool))
    return Session(make_config(values, env=Environment(use_mca=True)), plan, ranks, best_metric="loss", lower_is_better=True)


def test_a_finished_run_makes_no_step_and_says_so(tmp_path: Path) -> None:
    thing = Nothing()
    first = session(tmp_path, 2)
    with first:
        for step in first.steps():
            first.log(step, {"loss": 1.0, "lr": 0.1}, epoch=0.0, tokens=3)
            if first.should_save(step):
                first.save(step, thing, thing)
    before_results = session(tmp_path, 2)  # killed before its end was written
    before_results.restore(thing, thing)
    assert list(before_results.steps()) == []
    first.finish(seconds=1.0, plots=())
    results = json.loads((tmp_path / "train_results.json").read_text())
    for steps in (2, 1):
        with pytest.raises(CheckpointError, match=f"at step 2 and the run has {steps}.*raise max_steps"):
            session(tmp_path, steps).restore(thing, thing)
    assert json.loads((tmp_path / "train_results.json").read_text()) == results
    longer = session(tmp_path, 3)
    longer.restore(thing, thing)
    assert longer.step == 2


def test_an_output_dir_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    values = {"model_name_or_path": "m", "dataset": "d", "output_dir": str(tmp_path / "file" / "out")}
    with pytest.raises(OutputDirError, match="cannot be made"):
        prepare_output_dir(make_config(values, env=Environment(use_mca=True)))


def test_steps_that_move_nothing_are_said_aloud(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = session(tmp_path, 40)
    with run:
        for step in run.steps():
            run.log(step, {"loss": 1.0, "lr": 0.1, "skipped": float(4 <= step < 25), "overflow": 1.0}, epoch=0.0, tokens=3)
    lines = [line for line in capsys.readouterr().out.splitlines() if "no weight has moved" in line]
    assert len(lines) == 2 and "last 20 steps, up to step 23" in lines[1] and "loss scale" in lines[1]
