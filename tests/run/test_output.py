"""The small files of a run, and who may write where."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from rlmca.config import RunConfig, TrainConfig
from rlmca.observe.log import RunLog
from rlmca.run.output import OutputDirError, prepare_output_dir, write_json, write_results, write_trainer_state


def cfg(path: Path | None, **changes: object) -> RunConfig:
    return replace(RunConfig(), train=replace(TrainConfig(), output_dir="" if path is None else str(path), **changes))


def test_a_new_folder_is_made_by_the_main_rank_alone(tmp_path: Path) -> None:
    assert not prepare_output_dir(cfg(tmp_path / "a" / "b"), is_main=False).exists()
    assert prepare_output_dir(cfg(tmp_path / "a" / "b")).is_dir()


@pytest.mark.parametrize("name", ("model.safetensors", "train_results.json"))
def test_results_of_another_run_are_not_overwritten_unasked(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("{}")
    with pytest.raises(OutputDirError, match=f"{name}.*overwrite_output_dir: true"):
        prepare_output_dir(cfg(tmp_path))
    prepare_output_dir(cfg(tmp_path, overwrite_output_dir=True))
    prepare_output_dir(cfg(tmp_path), resuming=True)
    assert (tmp_path / name).exists()


def test_a_run_that_was_killed_early_can_start_again(tmp_path: Path) -> None:
    (tmp_path / "trainer_log.jsonl").write_text("")
    prepare_output_dir(cfg(tmp_path))


def test_a_file_or_no_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputDirError, match="is a file"):
        prepare_output_dir(cfg(tmp_path / "file"))
    with pytest.raises(OutputDirError, match="not set"):
        prepare_output_dir(cfg(None))


def test_json_is_strict(tmp_path: Path) -> None:
    write_json(tmp_path / "x.json", {"a": math.nan, "b": [math.inf, 1.5]})
    assert json.loads((tmp_path / "x.json").read_text(), parse_constant=pytest.fail) == {"a": None, "b": [None, 1.5]}


def test_results_of_all_splits_are_gathered(tmp_path: Path) -> None:
    write_results(tmp_path, "train", {"train_loss": 1.0, "epoch": 2.0})
    write_results(tmp_path, "eval", {"eval_loss": 0.5, "epoch": 3.0})
    assert json.loads((tmp_path / "train_results.json").read_text()) == {"train_loss": 1.0, "epoch": 2.0}
    assert json.loads((tmp_path / "all_results.json").read_text()) == {"train_loss": 1.0, "eval_loss": 0.5, "epoch": 3.0}


def test_the_trainer_state_reads_like_transformers_own(tmp_path: Path) -> None:
    from transformers import TrainerState

    with RunLog(tmp_path, 4, console=Console(file=io.StringIO())) as log:
        log.log(1, {"loss": 2.0, "lr": 0.1}, epoch=0.5)
        log.log(2, {"loss": 1.0, "lr": 0.2}, epoch=1.0)
    write_trainer_state(tmp_path, step=2, total_steps=4, epoch=1.0, extra={"best_metric": 0.5})
    state = TrainerState.load_from_json(str(tmp_path / "trainer_state.json"))
    assert (state.global_step, state.max_steps, state.epoch, state.best_metric) == (2, 4, 1.0, 0.5)
    assert [(e["step"], e["loss"], e["learning_rate"]) for e in state.log_history] == [(1, 2.0, 0.1), (2, 1.0, 0.2)]
