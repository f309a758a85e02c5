"""Which steps log, evaluate and save."""

from __future__ import annotations

import pytest

from rlmca.run.schedule import StepSchedule


def due(schedule: StepSchedule, what: str) -> list[int]:
    return [step for step in range(1, schedule.total_steps + 1) if getattr(schedule, f"should_{what}")(step)]


def test_steps_and_the_end() -> None:
    schedule = StepSchedule(11, 4, logging_steps=2, save_steps=5, eval_strategy="steps", eval_steps=3)
    assert due(schedule, "log") == [2, 4, 6, 8, 10, 11]
    assert due(schedule, "save") == [5, 10, 11]
    assert due(schedule, "eval") == [3, 6, 9, 11]


def test_epochs() -> None:
    schedule = StepSchedule(10, 4, save_strategy="epoch", eval_strategy="epoch")
    assert due(schedule, "save") == due(schedule, "eval") == [4, 8, 10]
    assert schedule.epoch(6) == 1.5


def test_no_means_never() -> None:
    schedule = StepSchedule(10, 4, save_strategy="no")
    assert due(schedule, "save") == due(schedule, "eval") == []


def test_evaluation_follows_logging_when_it_has_no_interval() -> None:
    assert due(StepSchedule(6, 6, logging_steps=3, eval_strategy="steps"), "eval") == [3, 6]


def test_an_interval_below_one_is_a_share_of_the_run() -> None:
    assert due(StepSchedule(10, 10, save_steps=0.25), "save") == [3, 6, 9, 10]


@pytest.mark.parametrize(
    ("options", "match"),
    (({"total_steps": 0}, "no optimizer step"), ({"save_steps": 0}, "save_steps"), ({"eval_strategy": "best"}, "eval_strategy")),
)
def test_what_has_no_meaning_is_refused(options: dict, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        StepSchedule(**{"total_steps": 5, "steps_per_epoch": 5, **options})
