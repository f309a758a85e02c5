from __future__ import annotations

import random
import statistics
from collections import defaultdict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlmca.algorithms import assign_advantages, group_advantages
from rlmca.types import Sample


def oracle(rewards: list[float | None], groups: list[int], std: str, eps: float) -> list[float]:
    """Straight from the definition, with the statistics module."""
    members = defaultdict(list)
    for reward, group in zip(rewards, groups, strict=True):
        if reward is not None:
            members[group].append(reward)
    out = []
    for reward, group in zip(rewards, groups, strict=True):
        peers = members[group]
        if reward is None or len(peers) < 2 or max(peers) == min(peers):
            out.append(0.0)
            continue
        scale = {"population": statistics.pstdev, "sample": statistics.stdev}[std](peers) + eps if std != "none" else 1.0
        out.append((reward - statistics.fmean(peers)) / scale)
    return out


@given(
    rows=st.lists(st.tuples(st.one_of(st.none(), st.integers(-8, 8).map(lambda n: n / 4)), st.integers(0, 4)), min_size=1, max_size=40),
    std=st.sampled_from(["population", "sample", "none"]),
)
def test_equals_the_definition(rows: list[tuple[float | None, int]], std: str) -> None:
    rewards, groups = [r for r, _ in rows], [g for _, g in rows]
    assert group_advantages(rewards, groups, std=std).tolist() == pytest.approx(oracle(rewards, groups, std, 1e-6), abs=1e-12)  # type: ignore[arg-type]


def test_public_conventions_of_the_standard_deviation() -> None:
    rewards, groups = [1.0, 0.0, 0.0, 1.0], [0] * 4
    assert group_advantages(rewards, groups, std="population").tolist() == pytest.approx([1, -1, -1, 1], abs=1e-5)
    assert group_advantages(rewards, groups, std="sample").tolist() == pytest.approx([0.866, -0.866, -0.866, 0.866], abs=1e-3)
    assert group_advantages(rewards, groups, std="none").tolist() == [0.5, -0.5, -0.5, 0.5]


@pytest.mark.parametrize("std", ["population", "sample", "none"])
def test_constant_up_to_rounding_is_exactly_zero(std: str) -> None:
    exact = torch.full((7,), 0.7)
    rounded = torch.tensor([0.7, 0.1 + 0.6, 0.3 + 0.4, 0.7, 1.4 / 2, 0.2 + 0.5, 0.7], dtype=torch.float64)
    ulps = torch.tensor([0.7] * 6 + [0.7 + 1.2e-7])
    for rewards in (exact, rounded, ulps):
        assert group_advantages(rewards, [0] * 7, std=std).tolist() == [0.0] * 7  # type: ignore[arg-type]
    assert group_advantages([0.7, 0.70001], [0, 0], std=std)[1] > 0  # type: ignore[arg-type]


def test_order_and_ids_do_not_matter() -> None:
    rewards, groups = [1.0, 5.0, 3.0, 2.0, 9.0], [7, -2, 7, 100, -2]
    want = dict(zip(zip(rewards, groups, strict=True), group_advantages(rewards, groups).tolist(), strict=True))
    rows = list(want)
    random.Random(0).shuffle(rows)
    got = group_advantages([r for r, _ in rows], [g for _, g in rows]).tolist()
    assert got == pytest.approx([want[row] for row in rows], abs=1e-12)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="reward 1 is infinite"):
        group_advantages([1.0, float("inf")], [0, 0])
    with pytest.raises(ValueError, match="one length"):
        group_advantages([1.0, 2.0], [0])
    with pytest.raises(ValueError, match="'unbiased' is unknown; write population, sample or none"):
        group_advantages([1.0], [0], std="unbiased")  # type: ignore[arg-type]
    assert group_advantages([], []).shape == (0,)


def sample(reward: float | None, group: int, reply: list[int]) -> Sample:
    return Sample([1], reply, [0.0] * len(reply), [0] * len(reply), "stop", reward=reward, group=group)


def test_assign_sets_samples_and_clips() -> None:
    samples = [sample(0.0, 0, [3]), sample(None, 0, [3]), sample(4.0, 0, [3]), sample(2.0, 1, [3])]
    assign_advantages(samples, std="none", clip=1.5)
    assert [s.advantage for s in samples] == [-1.5, 0.0, 1.5, 0.0]
