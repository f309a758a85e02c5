"""A curriculum by pass rate: prompts that turned out too easy or too hard for the policy are left out from then on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlmca.config import LateError
from rlmca.observe.console import note
from rlmca.run.evaluate import is_right
from rlmca.types import Sample

_NEW = 0.5
"""Weight of the newest rollout in a prompt's running pass rate: old replies are those of an older policy."""


class Curriculum:
    """The running pass rate of every prompt that was seen, and which prompts stay in use: those not seen yet, and those
    whose rate is inside [low, high].

    The pass rate of a rollout is the share of right replies (the first reward part is at least 1, as in `eval`) among
    those with a valid score; the running one is the first, then the mean of the running and the newest one.
    `fingerprint` names the data, so that rates are not applied to other prompts.
    """

    def __init__(self, num_prompts: int, low: float, high: float, fingerprint: str = "") -> None:
        self.num_prompts, self.low, self.high, self.fingerprint = num_prompts, low, high, fingerprint
        self.rates: dict[int, float] = {}
        self._out: set[int] = set()
        self._newest: list[float] = []

    @property
    def left(self) -> int:
        """Prompts in use."""
        return self.num_prompts - len(self._out)

    def admits(self, row: int) -> bool:
        """Whether the prompt stays in use."""
        return row not in self._out

    def check(self, needed: int, step: int) -> None:
        """LateError when fewer prompts are in use than rollout `step` needs. Starts the figures of that step."""
        self._newest = []
        if self.left < needed:
            raise self.too_few(needed, step)

    def too_few(self, needed: int, step: int) -> LateError:
        """What is said when the prompts in use do not suffice."""
        easy = sum(rate > self.high for rate in self.rates.values())
        hard = sum(rate < self.low for rate in self.rates.values())
        return LateError(
            f"curriculum: pass_rate leaves {self.left} of {self.num_prompts} prompts for step {step}, which needs rollout_batch_size "
            f"{needed}: {easy} are above curriculum_range [{self.low:g}, {self.high:g}] and {hard} below it; widen curriculum_range, "
            "add prompts, or write curriculum: none"
        )

    def observe(self, row: int, group: Sequence[Sample]) -> None:
        """Takes a scored group of the prompt into its rate; one without a valid score says nothing."""
        valid = [sample for sample in group if next(iter(sample.reward_parts.values()), sample.reward) is not None]
        if not valid:
            return
        rate = sum(map(is_right, valid)) / len(valid)
        self._newest.append(rate)
        before = self.rates.get(row)
        self._set(row, rate if before is None else (1 - _NEW) * before + _NEW * rate)

    def _set(self, row: int, rate: float) -> None:
        self.rates[row] = rate
        if not self.low <= rate <= self.high:
            self._out.add(row)
        else:
            self._out.discard(row)

    def metrics(self) -> dict[str, float]:
        """`pass_rate` of the prompts seen in this step, `curriculum_seen` and `curriculum_left`: shares of all prompts."""
        found = {"curriculum_seen": len(self.rates) / self.num_prompts, "curriculum_left": self.left / self.num_prompts}
        if self._newest:
            found["pass_rate"] = sum(self._newest) / len(self._newest)
        return found

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps; plain numbers and text."""
        return {"fingerprint": self.fingerprint, "prompts": list(self.rates), "rates": list(self.rates.values())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was saved; on other prompts every one counts as not seen, with a note."""
        if state["fingerprint"] != self.fingerprint:
            note("the saved pass rates belong to other prompts: the curriculum starts anew")
            return
        for row, rate in zip(state["prompts"], state["rates"], strict=True):
            self._set(row, rate)
