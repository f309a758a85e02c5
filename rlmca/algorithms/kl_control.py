"""A KL coefficient that follows a target (Ziegler et al. 2019, arXiv 1909.08593, section 2.2)."""

from __future__ import annotations

import math
from dataclasses import dataclass

ERROR_BOUND = 0.2


def adapted_kl_coef(coef: float, measured: float, *, target: float, steps: float = 1.0, horizon: float = 10.0) -> float:
    """The coefficient after a rollout whose mean KL was `measured`: coef * (1 + e * steps / horizon).

    e = clip(measured / target - 1, -0.2, 0.2). The paper's K = 0.1 for each update is steps / horizon = 1 / 10; systems
    that count samples write the samples of a rollout and a horizon of 10000. A `measured` that is no finite number says
    nothing and changes nothing.
    """
    if not math.isfinite(measured):
        return coef
    error = min(max(measured / target - 1, -ERROR_BOUND), ERROR_BOUND)
    return coef * (1 + error * steps / horizon)


@dataclass
class AdaptiveKl:
    """The coefficient in use; `coef` alone is state."""

    coef: float
    target: float
    horizon: float = 10.0

    def __post_init__(self) -> None:
        if not self.target > 0:
            raise ValueError(f"kl_target {self.target} must be positive; leave it out for a fixed coefficient")
        if not self.coef > 0:
            raise ValueError(f"kl_coef {self.coef} with kl_target {self.target}: an adaptive coefficient is multiplied, so start above 0")
        if not self.horizon > ERROR_BOUND:
            raise ValueError(f"KL horizon {self.horizon} must exceed {ERROR_BOUND}: shorter, the coefficient could turn negative")

    def update(self, measured: float) -> float:
        """Adapts to the mean KL of a rollout; returns the coefficient for the next."""
        self.coef = adapted_kl_coef(self.coef, measured, target=self.target, horizon=self.horizon)
        return self.coef

    def state_dict(self) -> dict[str, float]:
        """What a resumed run needs."""
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """The counterpart of `state_dict`."""
        self.coef = float(state["coef"])
