"""Evaluation metrics against counting by hand."""

from __future__ import annotations

import itertools
import math

import pytest

from rlmca.run.evaluate import pass_at_k, summarise
from rlmca.types import Sample


def sample(group: int, value: float | None, length: int = 3, finish: str = "stop", **parts: float | None) -> Sample:
    return Sample(
        [1], [2] * length, [0.0] * length, [0] * length, finish, group=group, reward=value, reward_parts={"exact": value, **parts}
    )  # type: ignore[arg-type]


@pytest.mark.parametrize("n", (1, 2, 5, 6))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_reply(n: int) -> None:
    for right, k in itertools.product(range(n + 1), range(1, n + 1)):
        subsets = list(itertools.combinations([i < right for i in range(n)], k))
        assert pass_at_k(n, right, k) == pytest.approx(sum(any(s) for s in subsets) / len(subsets))
    with pytest.raises(ValueError, match="pass@"):
        pass_at_k(n, 0, n + 1)


def test_metrics_of_a_small_example() -> None:
    samples = [
        sample(0, 1.0, 2), sample(0, 0.0, 4), sample(0, 1.0, 2),
        sample(1, 0.5, 6, "length"), sample(1, None, 6, "length"), sample(1, 0.0, 4),
    ]  # fmt: skip
    got = summarise(samples)
    assert got["accuracy"] == pytest.approx((2 / 3 + 0) / 2)
    assert got["pass@1"] == pytest.approx(got["accuracy"])
    assert got["pass@2"] == pytest.approx((1.0 + 0) / 2) and got["pass@3"] == pytest.approx(0.5)
    assert "pass@4" not in got
    assert got["reward"] == got["reward/exact"] == pytest.approx(2.5 / 5)  # the invalid one is in no mean
    assert (got["invalid"], got["prompts"], got["replies"]) == (1.0, 2.0, 6.0)
    assert (got["length_mean"], got["length_max"], got["truncated"]) == (4.0, 6.0, pytest.approx(1 / 3))


def test_the_judge_is_the_first_part_or_the_one_named() -> None:
    samples = [sample(0, 1.0, format=0.0), sample(1, 0.0, format=1.0), sample(2, 0.0, format=1.0)]
    assert summarise(samples)["accuracy"] == pytest.approx(1 / 3)
    assert summarise(samples, judge="format")["accuracy"] == pytest.approx(2 / 3)
    with pytest.raises(KeyError):
        summarise(samples, judge="nosuch")


def test_groups_of_unequal_size_weigh_the_same() -> None:
    got = summarise([sample(0, 1.0), *[sample(1, 0.0) for _ in range(9)]])
    assert got["accuracy"] == 0.5 and not [name for name in got if name.startswith("pass@")]


def test_all_invalid_and_nothing() -> None:
    got = summarise([sample(0, None)])
    assert got["accuracy"] == 0.0 and math.isnan(got["reward"]) and got["invalid"] == 1.0
    with pytest.raises(ValueError, match="no samples"):
        summarise([])
