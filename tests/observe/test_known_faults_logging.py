"""Known faults of logging: a loss plot that stays blank or is missing (row K2)."""

from __future__ import annotations

import io
import logging
import math
from pathlib import Path

import pytest
from rich.console import Console

from rlmca.observe.log import RunLog
from rlmca.observe.plots import draw, plot_all, series, smoothed


def log_of(folder: Path, **columns: list[float]) -> None:
    with RunLog(folder, 10, console=Console(file=io.StringIO())) as log:
        for step, values in enumerate(zip(*columns.values(), strict=True), start=1):
            log.log(step, dict(zip(columns, values, strict=True)))


CASES = {
    "rl": {"loss": [0.1, -0.2, 0.3, 0.0], "reward": [0.0, 0.5, 0.7, 1.0]},
    "sft_without_eval": {"loss": [3.0, 2.0, 1.5, 1.2]},
    "one_point": {"loss": [3.0]},
    "nan_inside": {"loss": [3.0, math.nan, 2.0, math.inf, 1.0]},
}


@pytest.mark.parametrize("case", CASES)
def test_points_drawn_are_the_finite_points_logged(tmp_path: Path, case: str) -> None:
    log_of(tmp_path, **CASES[case])
    for name, values in CASES[case].items():
        want = [(step, value) for step, value in enumerate(values, start=1) if math.isfinite(value)]
        steps, drawn = series(tmp_path / "trainer_log.jsonl", name)
        line = draw(name, steps, drawn).axes[0].lines[0]
        assert list(zip(line.get_xdata(), line.get_ydata(), strict=True)) == want
    files = plot_all(tmp_path, list(CASES[case]))
    assert [file.name for file in files] == [f"training_{name}.png" for name in CASES[case]]
    assert all(file.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" for file in files)


def test_one_point_is_visible(tmp_path: Path) -> None:
    """A line through a single point draws no pixel: it needs a marker."""
    assert draw("loss", [1], [3.0]).axes[0].lines[0].get_marker() not in (None, "None", "")


def test_absent_metrics_give_no_file_and_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log_of(tmp_path, loss=[1.0, 2.0], broken=[math.nan, math.nan])
    with caplog.at_level(logging.WARNING):
        files = plot_all(tmp_path, ["loss", "eval_loss", "reward", "broken"])
    assert [file.name for file in files] == ["training_loss.png"]
    assert sorted(path.name for path in tmp_path.glob("*.png")) == ["training_loss.png"]
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["no plot of eval_loss, reward, broken"]


def test_no_log_at_all_is_a_warning_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert plot_all(tmp_path, ["loss"]) == []
    assert len(caplog.records) == 1


def test_names_with_slashes_become_file_names(tmp_path: Path) -> None:
    log_of(tmp_path, **{"reward/exact": [0.0, 1.0], "pass@4": [0.1, 0.2]})
    assert [file.name for file in plot_all(tmp_path, ["reward/exact", "pass@4"])] == ["training_reward_exact.png", "training_pass@4.png"]


def test_the_smoothed_curve_is_the_moving_average() -> None:
    assert smoothed([1.0, 3.0, 3.0], weight=0.5) == [1.0, 2.0, 2.5]
    assert smoothed([], weight=0.5) == []
    constant = smoothed([2.0] * 100)
    assert max(constant) == pytest.approx(2.0) == min(constant)
