"""What every test gets: a fixed seed, hypothesis without chance, and `--whole` for whole sweeps.

Without `--whole`, a serial test (it starts processes) runs a sample of its cases, drawn by `--test-seed` from the test's
name: two cores would need hours for all of them. A test that is named with its case always runs.
"""

from __future__ import annotations

import os
import random
import sys
import zlib
from collections import defaultdict
from collections.abc import Iterator

import hypothesis
import pytest

hypothesis.settings.register_profile("quick", derandomize=True, deadline=None, max_examples=25)
hypothesis.settings.register_profile("whole", derandomize=True, deadline=None, max_examples=300)

SERIAL_CASES = 2
"""Cases of one serial test that run without `--whole`; `@pytest.mark.cases(n)` on the test gives another number."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("rlmca")
    group.addoption("--whole", action="store_true", help="run whole sweeps (`make test-all`)")
    group.addoption("--test-seed", type=int, default=0, help="seed that every test starts from, mixed with its name")


def pytest_configure(config: pytest.Config) -> None:
    hypothesis.settings.load_profile("whole" if config.getoption("--whole") else "quick")


def pytest_report_header(config: pytest.Config) -> str:
    names = ("PYTHONHASHSEED", "OMP_NUM_THREADS")
    environment = ", ".join(f"{name}={os.environ.get(name, 'not set')}" for name in names)
    seed, whole = config.getoption("--test-seed"), config.getoption("--whole")
    shown = "all cases" if whole else f"at most {SERIAL_CASES} cases of a serial test, drawn by the seed (--whole: all)"
    return f"rlmca: --test-seed={seed}, whole={whole}, {environment}; {shown}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--whole"):
        return
    sweeps = {item for item in items if item.get_closest_marker("whole")}
    sweeps |= _beyond_the_sample([item for item in items if item not in sweeps], config.getoption("--test-seed"))
    if sweeps:
        config.hook.pytest_deselected(items=[item for item in items if item in sweeps])
        items[:] = [item for item in items if item not in sweeps]


def _beyond_the_sample(items: list[pytest.Item], seed: int) -> set[pytest.Item]:
    """The cases of serial tests that are left to the whole run."""
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("serial"):
            cases[item.nodeid.partition("[")[0]].append(item)
    left: set[pytest.Item] = set()
    for name, found in cases.items():
        marker = found[0].get_closest_marker("cases")
        limit = int(marker.args[0]) if marker else SERIAL_CASES
        if len(found) > limit:
            left |= set(found) - set(random.Random(f"{seed} {name}").sample(found, limit))
    return left


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Ends the pools of ranks with the folder of tests that used them: even without work their process groups poll."""
    ranks = sys.modules.get("tests.helpers.ranks")
    if ranks is not None and (nextitem is None or nextitem.path.parent != item.path.parent):
        ranks.close_pools()


@pytest.fixture
def whole(request: pytest.FixtureRequest) -> bool:
    """True when the run asks for whole sweeps; tests with a choice of sizes take the larger then."""
    return bool(request.config.getoption("--whole"))


@pytest.fixture(autouse=True)
def _seeded(request: pytest.FixtureRequest) -> None:
    """Seeds Python, NumPy and torch from `--test-seed` and the test's name, so order and selection change nothing."""
    import numpy
    import torch

    seed = request.config.getoption("--test-seed") + zlib.crc32(request.node.name.encode())
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """One local Ray cluster for all tests of the session that start ranks in it; see `rlmca.workers.cluster.connect`."""
    import contextlib

    os.environ["RAY_DEDUP_LOGS"] = "0"
    import ray

    from rlmca.config import Environment, make_config
    from rlmca.workers.cluster import connect

    cfg = make_config({"model_name_or_path": "m", "dataset": "d", "output_dir": "o"}, env=Environment(use_mca=True))
    with contextlib.ExitStack() as stack:
        assert not ray.is_initialized()
        connect(stack, cfg, 4)
        yield
