"""Reward `hybrid`: rules first, the judge where they abstain."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rlmca.rewards.base import Failure, Reward, Verdict
from rlmca.rewards.judge import JudgeOptions, judge
from rlmca.rewards.pool import CheckPool

if TYPE_CHECKING:
    from rlmca.types import Sample

Build = Callable[[str, Mapping[str, Any], CheckPool], Reward]


@dataclass(frozen=True)
class HybridOptions:
    """`rules`: names, or {name, options}, asked in this order. `judge`: the options of `judge`.

    `judge_below`: a rule's score below it is no verdict either, so that the judge is asked about what the rule did not accept.
    """

    rules: tuple[dict | str, ...] = ()
    judge: dict = field(default_factory=dict)
    judge_below: float | None = None

    def __post_init__(self) -> None:
        if not self.rules:
            raise ValueError("option 'rules' is missing, for example rules: [math]")
        for rule in self.rules:
            if isinstance(rule, dict) and (not isinstance(rule.get("name"), str) or set(rule) - {"name", "options"}):
                raise ValueError(
                    f"option 'rules': {rule!r} must be a name or {{name, options}}; rules have no weights, the first verdict counts"
                )

    def specs(self) -> list[tuple[str, dict[str, Any]]]:
        """(name, options) of each rule."""
        return [(rule, {}) if isinstance(rule, str) else (rule["name"], dict(rule.get("options") or {})) for rule in self.rules]


def hybrid(options: HybridOptions, pool: CheckPool, build: Build, judge_options: JudgeOptions) -> Reward:
    """The verdict of the first rule that does not abstain (gives None, or fails), else the judge's.

    A check that was stopped for its time is a verdict: 0. Each rule sees only the samples that those before it left over.
    """
    steps = [(build(name, given, pool), options.judge_below) for name, given in options.specs()] + [(judge(judge_options, pool), None)]

    def score(samples: Sequence[Sample]) -> list[Verdict]:
        verdicts: list[Verdict] = [None] * len(samples)
        left = list(range(len(samples)))
        for reward, below in steps:
            if not left:
                break
            found = reward([samples[at] for at in left])
            if len(found) != len(left):
                raise ValueError(f"a rule of reward hybrid returned {len(found)} values for {len(left)} samples")
            for at, verdict in zip(left, found, strict=True):
                verdicts[at] = verdict
            left = [at for at, verdict in zip(left, found, strict=True) if abstains(verdict, below)]
        return verdicts

    return score


def abstains(verdict: Verdict, below: float | None = None) -> bool:
    """Whether the next one is asked."""
    if isinstance(verdict, Failure):
        return verdict.kind == "error" or (below is not None and below > 0)
    return verdict is None or (below is not None and verdict < below)
