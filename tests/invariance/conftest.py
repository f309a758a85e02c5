"""Models, references and one-process numbers, made once a session; at its end, the random layouts and the largest differences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from tests.helpers.models import save_model
from tests.helpers.ranks import rank_pool
from tests.invariance.compare import Difference, Numbers
from tests.invariance.draws import how_to_repeat, seed_of_this_run
from tests.invariance.numbers import FAMILIES, MIXTURES, make_batch, numbers_on_rank
from tests.invariance.reference import transformers_numbers
from tests.invariance.table import EXPERTS, layouts

COMPARED = {
    "float64": "layouts in float64 and one process",
    "one process in float64": "one process in float64 and Transformers",
    "float32": "layouts in float32 and Transformers",
}


@dataclass
class Report:
    """What the end of the session tells."""

    seed: int | None = None
    drawn: list[str] = field(default_factory=list)
    seen: dict[str, list[tuple[Difference, str]]] = field(default_factory=lambda: {what: [] for what in COMPARED})
    """What was compared, a key of COMPARED -> largest differences, and where."""

    def lines(self) -> list[str]:
        random = [] if self.seed is None else [how_to_repeat(self.seed), f"  {', '.join(self.drawn)}"]
        found = []
        for what, seen in self.seen.items():
            if seen:
                (absolute, at), (relative, over) = max((d.absolute, w) for d, w in seen), max((d.relative, w) for d, w in seen)
                found.append(f"{COMPARED[what]} differ by {absolute:.1e} ({at}), by {relative:.1e} of a tensor's largest entry ({over})")
        return random + found


REPORT = pytest.StashKey[Report]()


@pytest.fixture(scope="session")
def report(request: pytest.FixtureRequest) -> Report:
    return request.config.stash.setdefault(REPORT, Report())


@pytest.fixture(scope="session")
def random_seed(report: Report) -> int:
    """The seed of this run's random layouts."""
    report.seed = seed_of_this_run()
    return report.seed


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    report = config.stash.get(REPORT, None)
    if report is None:
        return
    terminalreporter.section("layout invariance")
    for line in report.lines():
        terminalreporter.line(line)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: save_model(family, tmp_path_factory.mktemp(family), **sizes) for family, sizes in {**FAMILIES, **MIXTURES}.items()}


@pytest.fixture(scope="session")
def numbers_of_transformers() -> Callable[..., Numbers]:
    """(family, dtype, with the routers' losses) -> numbers."""
    made: dict[tuple[str, torch.dtype, bool], Numbers] = {}

    def get(family: str, dtype: torch.dtype, balanced: bool = False) -> Numbers:
        if (family, dtype, balanced) not in made:
            made[family, dtype, balanced] = transformers_numbers(family, make_batch(), dtype, balanced=balanced)
        return made[family, dtype, balanced]

    return get


@pytest.fixture(scope="session")
def numbers_of_one_process(models: dict[str, Path]) -> Callable[..., Numbers]:
    """(family, with the routers' losses) -> numbers of one process in float64."""
    made: dict[tuple[str, bool], Numbers] = {}

    def get(family: str, balanced: bool = False) -> Numbers:
        if (family, balanced) not in made:
            layout = layouts(EXPERTS)[int(balanced)]
            made[family, balanced] = rank_pool(1).run(numbers_on_rank, models[family], layout, torch.float64)[0]
        return made[family, balanced]

    return get
