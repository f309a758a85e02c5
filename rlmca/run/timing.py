"""Where the time of a step goes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Stopwatch:
    """Wall seconds of the named phases of one step, and of the whole step since the watch was made.

    `carried` are seconds that belong to a step but come after its figures are written (writing them); they are
    counted to the next step, as `time_log`.
    """

    def __init__(self, carried: float = 0.0) -> None:
        self._start = time.perf_counter() - carried
        self._phases: dict[str, float] = {"log": carried}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Time a phase; one that runs several times adds up."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._phases[phase] = self._phases.get(phase, 0.0) + time.perf_counter() - start

    def seconds(self) -> dict[str, float]:
        """`time_<phase>` of every phase and `time_step`, all so far."""
        return {f"time_{name}": value for name, value in self._phases.items()} | {"time_step": time.perf_counter() - self._start}
