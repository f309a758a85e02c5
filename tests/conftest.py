"""What every test gets: a fixed seed, hypothesis without chance, and `--whole` for whole sweeps."""

from __future__ import annotations

import os
import random
import zlib
from collections.abc import Iterator

import hypothesis
import pytest

hypothesis.settings.register_profile("quick", derandomize=True, deadline=None, max_examples=25)
hypothesis.settings.register_profile("whole", derandomize=True, deadline=None, max_examples=300)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("rlmca")
    group.addoption("--whole", action="store_true", help="run whole sweeps (`make test-all`)")
    group.addoption("--test-seed", type=int, default=0, help="seed that every test starts from, mixed with its name")


def pytest_configure(config: pytest.Config) -> None:
    hypothesis.settings.load_profile("whole" if config.getoption("--whole") else "quick")


def pytest_report_header(config: pytest.Config) -> str:
    names = ("PYTHONHASHSEED", "OMP_NUM_THREADS")
    environment = ", ".join(f"{name}={os.environ.get(name, 'not set')}" for name in names)
    return f"rlmca: --test-seed={config.getoption('--test-seed')}, whole={config.getoption('--whole')}, {environment}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--whole"):
        return
    sweeps = [item for item in items if item.get_closest_marker("whole")]
    if sweeps:
        config.hook.pytest_deselected(items=sweeps)
        items[:] = [item for item in items if not item.get_closest_marker("whole")]


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
