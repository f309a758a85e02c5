"""Reward `exact`: the reply is the answer, character by character."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlmca.rewards.base import Reward, Verdict, answer_of, each
from rlmca.rewards.pool import CheckPool

if TYPE_CHECKING:
    from rlmca.types import Sample


@dataclass(frozen=True)
class ExactOptions:
    """`exact` has no options."""


def exact(options: ExactOptions, pool: CheckPool) -> Reward:
    """1 when the reply, white space at its ends removed, equals the row's `answer` as text, else 0."""

    def score(samples: Sequence[Sample]) -> list[Verdict]:
        return each(lambda sample: float(sample.reply.strip() == answer_of(sample, "exact")), samples)

    return score
