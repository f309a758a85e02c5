"""Running mean and variance of a stream of rewards."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass
class RunningMoments:
    """Count, mean and sum of squared deviations of everything seen, joined batch by batch (Chan, Golub and LeVeque 1983):
    never E[x^2] - E[x]^2, which loses all digits of values far from zero."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def update(self, values: Iterable[float | None]) -> None:
        """Adds a batch; `None` and nan are invalid and left out."""
        seen = [float(v) for v in values if v is not None and not math.isnan(v)]
        if any(math.isinf(v) for v in seen):
            raise ValueError("a reward is infinite; a reward must be a finite number, or None when it is invalid")
        if not seen:
            return
        mean = math.fsum(seen) / len(seen)
        squares = math.fsum((v - mean) ** 2 for v in seen)
        apart, total = mean - self.mean, self.count + len(seen)
        self.squares += squares + apart**2 * self.count * len(seen) / total
        self.mean += apart * len(seen) / total
        self.count = total

    @property
    def std(self) -> float:
        """Over n - 1; 0 for fewer than two values."""
        return math.sqrt(self.squares / (self.count - 1)) if self.count > 1 else 0.0

    def normalise(self, value: float, eps: float = 1e-8) -> float:
        """(value - mean) / (std + eps) once two values differ; before that the value less the mean."""
        return (value - self.mean) / (self.std + eps) if self.std > 0 else value - self.mean

    def state_dict(self) -> dict[str, float]:
        """What a resumed run needs, exactly."""
        return {"count": self.count, "mean": self.mean, "squares": self.squares}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """The counterpart of `state_dict`."""
        self.count, self.mean, self.squares = int(state["count"]), float(state["mean"]), float(state["squares"])
