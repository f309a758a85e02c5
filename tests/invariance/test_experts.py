"""Every layout of experts computes the same, with and without the routers' losses; see `test_layouts.py`.

All in float64, where no rounding reaches the margin by which an expert is chosen. What the comparison says first when tokens
chose other experts is that they did. Random layouts as in `test_layouts.py`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.helpers.engine import Layout
from tests.helpers.ranks import rank_pool
from tests.invariance.compare import Difference, Numbers, assert_same, differences, largest
from tests.invariance.conftest import Report
from tests.invariance.draws import how_to_repeat, random_layout, sample
from tests.invariance.numbers import MIXTURES, make_batch, numbers_on_rank
from tests.invariance.reference import ISLANDS_OF_EXPERTS, smallest_margin, transformers_numbers
from tests.invariance.table import EXPERTS, balanced, kinds_of_experts, layouts

pytestmark = pytest.mark.serial
EXACT = Difference(absolute=1e-9, relative=1e-9)
CLOSE = Difference(absolute=1e-4, relative=1e-4)
RANDOM = 6
MARGIN = 1e-4
"""Least that a chosen expert's logit is ahead: far above rounding, also in float32."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """(layout, family), layouts outermost; what is not sampled is `whole`, and so is what takes eight processes.

    Every family is in the sample, each layout of it with the next family.
    """
    if "layout" not in metafunc.fixturenames:
        return
    table, cases = layouts(EXPERTS), []
    small = [layout for layout in table if layout.world <= 4]
    chosen = sample(small, 0, metafunc.config.getoption("--test-seed"), kinds_of_experts)
    for layout in table:
        sampled = list(MIXTURES)[chosen.index(layout) % len(MIXTURES)] if layout in chosen else None
        for family in MIXTURES:
            marks = [] if family == sampled else pytest.mark.whole
            cases.append(pytest.param(layout, family, id=f"{layout.name}-{family}", marks=marks))
    metafunc.parametrize(("layout", "family"), cases)


@pytest.mark.parametrize("family", MIXTURES)
def test_no_token_chooses_by_a_hair(family: str) -> None:
    """Else layouts would differ by which expert rounding favours: give the family another seed or another size."""
    assert smallest_margin(family, make_batch()) > MARGIN


@pytest.mark.parametrize("losses", [False, True], ids=["plain", "balanced"])
@pytest.mark.parametrize("family", MIXTURES)
def test_one_process_equals_transformers_in_float64(
    family: str,
    losses: bool,
    numbers_of_one_process: Callable[..., Numbers],
    numbers_of_transformers: Callable[..., Numbers],
    report: Report,
) -> None:
    expected = numbers_of_transformers(family, torch.float64, losses)
    for name, tensor in expected.items():
        assert tensor.abs().max() > 1e-4, f"{name}: zero would prove nothing"
    found, where = numbers_of_one_process(family, losses), f"one process ({family}, float64) against Transformers"
    report.seen["one process in float64"].append((assert_same(found, expected, EXACT, where), family))
    if losses:
        changed = differences(expected, {**expected, **numbers_of_transformers(family, torch.float64)})
        assert max(difference.relative for name, difference in changed.items() if "gradient" in name) > 0.1


@pytest.mark.parametrize("island", ISLANDS_OF_EXPERTS)
@pytest.mark.parametrize("family", MIXTURES)
def test_a_float32_island_in_transformers_is_seen(family: str, island: str, numbers_of_one_process: Callable[..., Numbers]) -> None:
    found = transformers_numbers(family, make_batch(), torch.float64, islands=[island])
    size = largest(differences(found, numbers_of_one_process(family)))
    assert not size.within(EXACT) and size.within(CLOSE)


@pytest.mark.cases(6)
def test_layout_computes_the_same(
    layout: Layout, family: str, models: dict[str, Path], numbers_of_one_process: Callable[..., Numbers], report: Report
) -> None:
    found = rank_pool(layout.world).run(numbers_on_rank, models[family], layout, torch.float64)[0]
    where = f"layout {layout.name} ({family}, float64) against one process"
    size = assert_same(found, numbers_of_one_process(family, balanced(layout)), EXACT, where)
    report.seen["float64"].append((size, f"{layout.name}, {family}"))


@pytest.mark.parametrize("number", [pytest.param(n, marks=pytest.mark.whole if n else []) for n in range(RANDOM)])
def test_random_layouts_agree(
    number: int, random_seed: int, models: dict[str, Path], numbers_of_one_process: Callable[..., Numbers], report: Report
) -> None:
    layout = random_layout(random_seed, number, experts=True)
    family = random.Random(f"{random_seed} {number} family of experts").choice(list(MIXTURES))
    report.drawn.append(f"{layout.name} ({family})")
    found = rank_pool(layout.world).run(numbers_on_rank, models[family], layout, torch.float64)[0]
    where = f"layout {layout.name} ({family}; {how_to_repeat(random_seed)}) in float64 against one process"
    size = assert_same(found, numbers_of_one_process(family, balanced(layout)), EXACT, where)
    report.seen["float64"].append((size, f"{layout.name}, {family}"))
