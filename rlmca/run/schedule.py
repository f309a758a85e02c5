"""After which optimizer steps a run logs, evaluates and saves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Strategy = Literal["no", "steps", "epoch"]


@dataclass(frozen=True)
class StepSchedule:
    """Steps count from 1 and are named after they are done; the last one always logs.

    An interval below 1 is a share of the run, as in Transformers. A strategy "steps" or "epoch" also acts on the last
    step: the end of a run is always evaluated and saved under it. `eval_steps` None means `logging_steps`.
    """

    total_steps: int
    steps_per_epoch: int
    logging_steps: float = 1
    save_strategy: Strategy = "steps"
    save_steps: float = 500
    eval_strategy: Strategy = "no"
    eval_steps: float | None = None

    def __post_init__(self) -> None:
        if self.total_steps < 1 or self.steps_per_epoch < 1:
            raise ValueError(f"a run of {self.total_steps} steps, {self.steps_per_epoch} an epoch, makes no optimizer step")
        for name in ("logging_steps", "save_steps", "eval_steps"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} is {value}: write a positive number (below 1: a share of the run)")
        for name in ("save_strategy", "eval_strategy"):
            if getattr(self, name) not in ("no", "steps", "epoch"):
                raise ValueError(f"{name} is {getattr(self, name)!r}: write no, steps or epoch")

    def epoch(self, step: int) -> float:
        """Epochs done after `step` steps."""
        return step / self.steps_per_epoch

    def should_log(self, step: int) -> bool:
        """True when step `step` writes a log line."""
        return self._due(step, "steps", self.logging_steps)

    def should_eval(self, step: int) -> bool:
        """True when the model is evaluated after step `step`."""
        return self._due(step, self.eval_strategy, self.eval_steps if self.eval_steps is not None else self.logging_steps)

    def should_save(self, step: int) -> bool:
        """True when a checkpoint is written after step `step`."""
        return self._due(step, self.save_strategy, self.save_steps)

    def _due(self, step: int, strategy: Strategy, interval: float) -> bool:
        if strategy == "no":
            return False
        if step == self.total_steps:
            return True
        return step % (self.steps_per_epoch if strategy == "epoch" else self.every(interval)) == 0

    def every(self, interval: float) -> int:
        """An interval in whole steps; below 1 it is a share of the run, rounded up."""
        return int(interval) if interval >= 1 else max(1, -int(-interval * self.total_steps // 1))
