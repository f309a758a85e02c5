"""All rewards of a run together: parts, weights, invalid samples."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlmca.rewards.base import Failure, Reward, Spec, Verdict
from rlmca.rewards.pool import CheckPool
from rlmca.rewards.registry import build_reward, modules_of

if TYPE_CHECKING:
    from rlmca.config.rewards import RewardsConfig
    from rlmca.types import Sample

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Part:
    """One reward of the set: the name of its column, its weight, its function."""

    name: str
    weight: float
    reward: Reward


class RewardError(RuntimeError):
    """An invalid score where `strict` allows none."""


class RewardSet:
    """Scores samples with every part and adds the valid parts up by weight.

    A part that gives None or raises is *invalid* for that sample: left out of the sum, counted, logged once
    for each kind of failure, never 0. A sample without any valid part of nonzero weight has reward None. A check that
    was stopped for its time counts 0 and is counted in `timeouts`. With `strict`, an invalid score raises
    `RewardError`.
    """

    def __init__(self, parts: Sequence[Part], pool: CheckPool, *, strict: bool = False) -> None:
        self.parts = tuple(parts)
        self.strict = strict
        self.errors = 0
        """Invalid scores (one for each part and sample) of the last `score` call."""
        self.timeouts = 0
        """Checks stopped for their time in the last `score` call."""
        self._pool = pool
        self._logged: set[tuple[str, str]] = set()

    @property
    def names(self) -> tuple[str, ...]:
        """The keys of `Sample.reward_parts`, in order."""
        return tuple(part.name for part in self.parts)

    def score(self, samples: Sequence[Sample]) -> None:
        """Fills `reward_parts` and `reward` of every sample; sets `errors` and `timeouts`.

        Raises ValueError, before any sample is changed, when a function returns another number of values
        than it got samples, or something that is no number.
        """
        verdicts = {part.name: self._verdicts(part, samples) for part in self.parts}
        failed: Counter[str] = Counter()
        for at, sample in enumerate(samples):
            sample.reward_parts = {name: self._value(name, column[at], failed) for name, column in verdicts.items()}
            valid = [part.weight * value for part in self.parts if part.weight and (value := sample.reward_parts[part.name]) is not None]
            sample.reward = math.fsum(valid) if valid else None
        self.errors, self.timeouts = failed["error"], failed["timeout"]
        if samples and all(sample.reward is None for sample in samples):
            log.warning("rewards: none of %d samples has a valid reward; all are left out of the update", len(samples))

    def close(self) -> None:
        """Ends the checking processes."""
        self._pool.close()

    def __enter__(self) -> RewardSet:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _verdicts(self, part: Part, samples: Sequence[Sample]) -> list[Verdict]:
        verdicts = part.reward(samples)
        if len(verdicts) != len(samples):
            raise ValueError(f"reward {part.name} returned {len(verdicts)} values for {len(samples)} samples")
        return verdicts

    def _value(self, name: str, verdict: Verdict, failed: Counter[str]) -> float | None:
        if isinstance(verdict, (int, float)):
            if math.isfinite(verdict):
                return float(verdict)
            verdict = Failure("error", f"the score is {verdict}")
        if verdict is None:
            verdict = Failure("error", "the function returned None")
        failed[verdict.kind] += 1
        if self.strict and verdict.kind == "error":
            raise RewardError(f"reward {name}: {verdict.cause}; reward_strict ends the run at the first invalid score\n{verdict.detail}")
        if (name, verdict.cause) not in self._logged:
            self._logged.add((name, verdict.cause))
            fate = "the score is invalid and left out" if verdict.kind == "error" else "the score is 0"
            log.warning("reward %s: %s; %s (said once for this kind)\n%s", name, verdict.cause, fate, verdict.detail)
        return None if verdict.kind == "error" else 0.0


def rewards_of(cfg: RewardsConfig, max_new_tokens: int) -> RewardSet:
    """The rewards of a run as its configuration says."""
    return build_rewards(cfg.rewards, cfg.reward_workers, cfg.reward_timeout, strict=cfg.reward_strict, max_new_tokens=max_new_tokens)


def build_rewards(
    specs: Sequence[Spec], workers: int = 2, timeout: float = 5.0, *, strict: bool = False, max_new_tokens: int | None = None
) -> RewardSet:
    """The rewards of a run; no process is left running by this.

    workers, timeout: processes of the pool for checks that may hang, seconds for each check. Two rewards of
    one name get columns `name` and `name_2`. max_new_tokens: the `max_tokens` of `overlong` where it says none. Raises
    ValueError for an unknown name or option, a weight that is not finite, or weights that are all zero.
    """
    if not specs:
        raise ValueError("there is no reward; write for example rewards: [{name: exact}]")
    for spec in specs:
        if not math.isfinite(spec.weight):
            raise ValueError(f"reward {spec.name!r}: weight {spec.weight} must be a finite number")
    if not any(spec.weight for spec in specs):
        raise ValueError("all reward weights are 0, so no sample would have a reward; give one a weight")
    pool = CheckPool(workers, timeout, list(dict.fromkeys(module for spec in specs for module in modules_of(spec.name, spec.options))))
    parts: list[Part] = []
    for spec in specs:
        column = spec.name.rpartition(":")[2]
        taken = {part.name for part in parts}
        number = next(n for n in range(1, len(specs) + 1) if (column if n == 1 else f"{column}_{n}") not in taken)
        options = dict(spec.options)
        if spec.name == "overlong" and max_new_tokens is not None:
            options = {"max_tokens": max_new_tokens, "buffer": max(1, max_new_tokens // 5), **options}
        parts.append(Part(column if number == 1 else f"{column}_{number}", float(spec.weight), build_reward(spec.name, options, pool)))
    return RewardSet(parts, pool, strict=strict)
