"""Which groups make a rollout: the arithmetic of dynamic sampling, over-sampling and the curriculum, on rewards written down."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlmca.config import ConfigError, Environment, LateError, batch_plan, make_config
from rlmca.config.gathering import GatheringConfig
from rlmca.data import ShuffledOrder
from rlmca.rl.curriculum import Curriculum
from rlmca.rl.gather import Gathered, gather
from rlmca.types import Sample

MIXED, ALIKE = (1.0, 0.0), (1.0, 1.0)


class Table:
    """Rewards of the two replies to every prompt; keeps what was asked for."""

    def __init__(self, *rewards: Sequence[float | None]) -> None:
        self.rewards = rewards
        self.asked: list[list[int]] = []
        self.places: list[int] = []

    def __call__(self, rows: Sequence[int], first: int) -> list[Sample]:
        self.asked.append(list(rows))
        self.places += range(first, first + len(rows))
        return [
            Sample([1, row], [2], [0.0], [0], "stop", group=p, k=k, reward=reward, reward_parts={"right": reward})
            for p, row in enumerate(rows)
            for k, reward in enumerate(self.rewards[row])
        ]


def in_file_order(table: Table) -> ShuffledOrder:
    return ShuffledOrder(len(table.rewards), 2, 0, shuffle=False)


def run(
    table: Table, order: ShuffledOrder | None = None, curriculum: Curriculum | None = None, groups: int = 2, **options: Any
) -> Gathered:
    return gather(table, order or in_file_order(table), GatheringConfig(**options), curriculum, groups=groups, step=7)


def rows_of(gathered: Gathered) -> list[int]:
    return [s.prompt_ids[1] for s in gathered.samples if s.k == 0]


def test_groups_that_score_alike_are_replaced_by_the_next_prompts() -> None:
    table = Table(ALIKE, MIXED, ALIKE, (0.7 * 7, 4.9), MIXED, MIXED)  # 4.9 twice, up to rounding
    order = in_file_order(table)
    found = run(table, order, dynamic_sampling=True)
    assert table.asked == [[0, 1], [2], [3], [4]], "a refill asks for as many prompts as are missing"
    assert table.places == [0, 1, 2, 3, 4], "no two prompts of a rollout share a place, so no two replies a seed"
    assert rows_of(found) == [1, 4] and [s.group for s in found.samples] == [0, 0, 1, 1]
    assert order.position == 5 and found.generated_tokens == 10
    expected = {"drawn_batches": 4, "drawn_prompts": 5, "dropped_alike": 3, "dropped_invalid": 0, "dropped_surplus": 0}
    assert {name: found.metrics[name] for name in expected} == expected
    assert found.metrics["drawn_reward"] == pytest.approx((2 + 1 + 2 + 9.8 + 1) / 10)


def test_the_bound_is_named_with_what_was_seen() -> None:
    with pytest.raises(LateError) as error:
        run(Table(MIXED, ALIKE, (None, None), ALIKE), dynamic_sampling=True, dynamic_sampling_max_batches=3)
    text = str(error.value)
    assert "1 of the 2 groups of step 7" in text and "dynamic_sampling_max_batches 3 batches" in text
    assert "2 of 4 groups have replies that all score alike" in text
    assert "1 have no valid reward" in text and "dynamic_sampling: false" in text


def test_an_empty_reply_is_no_difference() -> None:
    """Known fault D9: an empty reply with reward 10 beside a peer with 0 carries no signal, and its group is replaced."""

    class WithEmpty(Table):
        def __call__(self, rows: Sequence[int], first: int) -> list[Sample]:
            samples = super().__call__(rows, first)
            for sample in samples:
                if sample.reward == 10.0:
                    sample.reply_ids, sample.reply_logp, sample.versions = [], [], []
            return samples

    assert rows_of(run(WithEmpty((10.0, 0.0), MIXED, MIXED), dynamic_sampling=True)) == [1, 2]


def test_oversampling_keeps_the_first_whole_groups_in_their_order() -> None:
    table = Table((1.0, None), ALIKE, MIXED, MIXED)
    found = run(table, oversample=1.5)
    assert table.asked == [[0, 1, 2]] and rows_of(found) == [1, 2]
    assert found.metrics["dropped_surplus"] == 1
    assert rows_of(run(Table((1.0, None), ALIKE, (None, 1.0)), oversample=1.5)) == [0, 1], "incomplete groups fill up"
    both = run(Table(ALIKE, MIXED, ALIKE, MIXED, MIXED, MIXED), oversample=1.5, dynamic_sampling=True)
    assert rows_of(both) == [1, 3] and both.metrics["drawn_prompts"] == 5 and both.metrics["dropped_surplus"] == 1


def test_without_options_the_order_is_read_as_it_is() -> None:
    order, twin = ShuffledOrder(5, 3, 1), ShuffledOrder(5, 3, 1)
    for _ in range(4):
        found = run(Table(*[ALIKE] * 5), order, groups=3)
        assert rows_of(found) == twin.next()[1] and found.metrics == {}


@given(st.integers(2, 12), st.integers(1, 6), st.integers(0, 9), st.floats(1, 3), st.data())
def test_no_prompt_comes_twice_unless_all_have_come(num: int, groups: int, seed: int, oversample: float, data: st.DataObject) -> None:
    alike = data.draw(st.lists(st.booleans(), min_size=num, max_size=num))
    table = Table(*[ALIKE if flag else MIXED for flag in alike])
    order = ShuffledOrder(num, groups, seed)
    order.position = data.draw(st.integers(0, 3 * num))
    try:
        found = run(table, order, groups=groups, dynamic_sampling=True, oversample=oversample)
    except LateError:
        found = None
    flat = [row for asked in table.asked for row in asked]
    for at in range(0, len(flat), num):
        assert len(set(flat[at : at + num])) == len(flat[at : at + num])
    assert table.places == list(range(len(flat)))
    if found is not None:
        assert len(rows_of(found)) == groups and not any(alike[row] for row in rows_of(found))


def test_a_batch_larger_than_the_data_is_an_error_never_an_empty_prompt() -> None:
    """Known fault R7: ask for 4, have 3."""
    values = {"stage": "grpo", "model_name_or_path": "m", "dataset": "d", "output_dir": "o", "rewards": "exact", "rollout_batch_size": 4}
    cfg = make_config({**values, "mini_batch_size": 4}, env=Environment(use_mca=True))
    with pytest.raises(ConfigError, match="3 prompts make no step with global batch 4"):
        batch_plan(cfg, 1, 3)
    curriculum = Curriculum(4, 0.1, 0.9)
    run(Table(ALIKE, MIXED, MIXED, MIXED), curriculum=curriculum, groups=4)
    with pytest.raises(LateError, match=r"leaves 3 of 4 prompts .* rollout_batch_size 4: 1 are above curriculum_range \[0.1, 0.9\]"):
        run(Table(ALIKE, MIXED, MIXED, MIXED), curriculum=curriculum, groups=4)


def test_a_curriculum_leaves_out_what_is_too_easy_or_too_hard() -> None:
    table, curriculum = Table(ALIKE, MIXED, (0.0, 0.0), MIXED, (0.5, None), (None, None)), Curriculum(6, 0.1, 0.9)
    order = in_file_order(table)
    found = run(table, order, curriculum, groups=4)
    assert rows_of(found) == [0, 1, 2, 3] and curriculum.rates == {0: 1.0, 1: 0.5, 2: 0.0, 3: 0.5}
    assert found.metrics["pass_rate"] == 0.5 and found.metrics["curriculum_left"] == 4 / 6
    assert rows_of(run(table, order, curriculum, groups=4)) == [4, 5, 1, 3], "new prompts are used, 0 and 2 are passed over"
    assert curriculum.rates[4] == 0.0, "a score of 0.5 is not right, and an invalid one says nothing"
    assert 5 not in curriculum.rates and curriculum.left == 3
    table.rewards = (ALIKE, ALIKE, ALIKE, MIXED, ALIKE, MIXED)
    run(table, order, curriculum, groups=3)
    assert curriculum.rates[1] == 0.75, "half of 0.5 and half of 1: the newest rollout counts as much as all before it"


def test_the_curriculum_goes_on_where_it_was_saved() -> None:
    curriculum = Curriculum(4, 0.1, 0.9, "data")
    run(Table(ALIKE, (1.0, 0.1), MIXED, MIXED), curriculum=curriculum, groups=3)
    state = json.loads(json.dumps(curriculum.state_dict()))
    again, other = Curriculum(4, 0.1, 0.9, "data"), Curriculum(4, 0.1, 0.9, "other data")
    again.load_state_dict(state)
    other.load_state_dict(state)
    assert again.rates == curriculum.rates and again.left == 3
    assert other.rates == {} and other.left == 4


@pytest.mark.parametrize(("groups", "oversample", "asked"), [(10, 1.1, 11), (3, 1.5, 5), (7, 1.0, 7), (4, 1.01, 5)])
def test_oversampling_asks_for_whole_prompts(groups: int, oversample: float, asked: int) -> None:
    table = Table(*[MIXED] * 20)
    run(table, groups=groups, oversample=oversample)
    assert [len(rows) for rows in table.asked] == [asked]


def test_a_curriculum_that_runs_dry_inside_a_rollout_says_so() -> None:
    table = Table(*[(0.0, 0.0)] * 4)
    with pytest.raises(LateError, match=r"leaves 0 of 4 prompts for step 7.*4 below"):
        run(table, curriculum=Curriculum(4, 0.05, 0.95), dynamic_sampling=True)


def test_a_prompt_that_left_the_curriculum_does_not_stand_for_one_that_was_not_asked_yet() -> None:
    def orders() -> Iterator[list[int]]:  # one row was read before; the next epoch begins with the first of the other three
        for seed in range(1000):
            order = ShuffledOrder(4, 2, seed)
            rows = order.take(5)
            if rows[4] == rows[1]:
                yield [seed, *rows]

    seed, before, kept, *gone, _ = next(orders())
    table = Table(*(MIXED if row in (before, kept) else ALIKE for row in range(4)))
    order = ShuffledOrder(4, 2, seed)
    order.take(1)
    found = run(table, order, Curriculum(4, 0.05, 0.95), groups=2, dynamic_sampling=True, oversample=1.5)
    assert table.asked[0] == [kept, *gone] and rows_of(found) == [kept, before]
