"""What a reward is: a callable from samples to one verdict each."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:  # the checking processes import this package, and have no use for torch
    from rlmca.types import Sample


@dataclass(frozen=True)
class Failure:
    """Why a sample got no score. `error`: invalid. `timeout`: the check was stopped, which counts as a wrong answer (0)."""

    kind: Literal["error", "timeout"]
    cause: str
    """Type of the exception, or the limit: failures of one cause are logged once."""
    detail: str = ""
    """Traceback text."""

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """The failure that an exception is."""
        return cls("error", type(error).__name__, "".join(traceback.format_exception(error)))


Verdict = float | None | Failure
"""A score; None, "this cannot be judged", which is invalid; or a failure."""


class Reward(Protocol):
    """Scores samples, one verdict each and in their order."""

    def __call__(self, samples: Sequence[Sample]) -> list[Verdict]: ...


class Spec(Protocol):
    """One entry of the `rewards` key (`config.RewardSpec`)."""

    @property
    def name(self) -> str: ...
    @property
    def weight(self) -> float: ...
    @property
    def options(self) -> Mapping[str, Any]: ...


def each(score: Callable[[Sample], Verdict], samples: Sequence[Sample]) -> list[Verdict]:
    """`score` of every sample; an exception is that sample's failure alone."""
    verdicts: list[Verdict] = []
    for sample in samples:
        try:
            verdicts.append(score(sample))
        except Exception as error:
            verdicts.append(Failure.of(error))
    return verdicts


def answer_of(sample: Sample, reward: str) -> str:
    """The row's ground truth as text. Raises ValueError when the row has none."""
    answer = sample.row.get("answer")
    if answer is None:
        raise ValueError(f"reward {reward}: the data row has no `answer`; its columns are {', '.join(map(str, sample.row)) or 'none'}")
    return str(answer).strip()
