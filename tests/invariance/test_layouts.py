"""Every layout computes the same losses, gradients, log-probs and entropies.

`table.py` has the layouts. In float64 each is compared with one process, and one process with Transformers, whose float32
islands are patched away (`reference.py`); every tensor must agree within 1e-9, by itself and over its largest entry. In float32
each layout is compared with Transformers itself, within 1e-5, and 1e-4 of the largest entry: the float32 gradients of
Transformers are off by 1e-5 of it themselves.

Without `--whole` a sample of the table runs (`--test-seed` draws another one) that has every kind of parallelism, and a random
layout; with it, all layouts, and more random ones. Random layouts are new in each run. Their seed is printed at the end of the
session and in every failure: RLMCA_INVARIANCE_SEED=SEED has them again.
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
from tests.invariance.numbers import FAMILIES, make_batch, numbers_on_rank
from tests.invariance.reference import ISLANDS, transformers_numbers
from tests.invariance.table import layouts

pytestmark = pytest.mark.serial
EXACT = Difference(absolute=1e-9, relative=1e-9)
CLOSE = Difference(absolute=1e-5, relative=1e-4)
SAMPLE, RANDOM = 16, 6
FLOAT32 = ("qwen3_tied", "float32")
"""The one family whose layouts are compared in float32 too; `tests/engines` has the others."""
OfTransformers = Callable[[str, torch.dtype], Numbers]
OfOneProcess = Callable[[str], Numbers]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """(layout, family, precision), layouts outermost: a pool makes the groups of a layout once. What is not sampled is `whole`."""
    if "layout" not in metafunc.fixturenames:
        return
    table, cases = layouts(), []
    chosen = sample(table, SAMPLE, metafunc.config.getoption("--test-seed"))
    for layout in table:
        sampled = [FLOAT32, (list(FAMILIES)[chosen.index(layout) % len(FAMILIES)], "float64")] if layout in chosen else []
        for case in [*((family, "float64") for family in FAMILIES), FLOAT32]:
            marks = [] if case in sampled else pytest.mark.whole
            cases.append(pytest.param(layout, *case, id=f"{layout.name}-{case[0]}-{case[1]}", marks=marks))
    metafunc.parametrize(("layout", "family", "precision"), cases)


@pytest.mark.parametrize("family", FAMILIES)
def test_one_process_equals_transformers_in_float64(
    family: str, numbers_of_one_process: OfOneProcess, numbers_of_transformers: OfTransformers, report: Report
) -> None:
    expected = numbers_of_transformers(family, torch.float64)
    for name, tensor in expected.items():
        assert tensor.abs().max() > 1e-4, f"{name}: zero would prove nothing"
    size = assert_same(numbers_of_one_process(family), expected, EXACT, f"one process ({family}, float64) against Transformers")
    report.seen["one process in float64"].append((size, family))


@pytest.mark.parametrize("island", ISLANDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_float32_island_in_transformers_is_seen(family: str, island: str, numbers_of_one_process: OfOneProcess) -> None:
    found = transformers_numbers(family, make_batch(), torch.float64, islands=[island])
    size = largest(differences(found, numbers_of_one_process(family)))
    assert not size.within(EXACT) and size.within(CLOSE)


@pytest.mark.cases(12)
def test_layout_computes_the_same(
    layout: Layout,
    family: str,
    precision: str,
    models: dict[str, Path],
    numbers_of_one_process: OfOneProcess,
    numbers_of_transformers: OfTransformers,
    report: Report,
) -> None:
    found = rank_pool(layout.world).run(numbers_on_rank, models[family], layout, getattr(torch, precision))[0]
    where = f"layout {layout.name} ({family}, {precision})"
    if precision == "float64":
        size = assert_same(found, numbers_of_one_process(family), EXACT, f"{where} against one process")
    else:
        size = assert_same(found, numbers_of_transformers(family, torch.float32), CLOSE, f"{where} against Transformers")
    report.seen[precision].append((size, f"{layout.name}, {family}"))


@pytest.mark.parametrize("number", [pytest.param(n, marks=pytest.mark.whole if n else []) for n in range(RANDOM)])
def test_random_layouts_agree(
    number: int,
    random_seed: int,
    models: dict[str, Path],
    numbers_of_one_process: OfOneProcess,
    numbers_of_transformers: OfTransformers,
    report: Report,
) -> None:
    layout = random_layout(random_seed, number)
    family = random.Random(f"{random_seed} {number} family").choice(list(FAMILIES))
    report.drawn.append(f"{layout.name} ({family})")
    pool, where = rank_pool(layout.world), f"layout {layout.name} ({family}; {how_to_repeat(random_seed)})"
    exact, single = (pool.run(numbers_on_rank, models[family], layout, dtype)[0] for dtype in (torch.float64, torch.float32))
    size = assert_same(exact, numbers_of_one_process(family), EXACT, f"{where} in float64 against one process")
    report.seen["float64"].append((size, f"{layout.name}, {family}"))
    size = assert_same(single, numbers_of_transformers(family, torch.float32), CLOSE, f"{where} in float32 against Transformers")
    report.seen["float32"].append((size, f"{layout.name}, {family}"))
