"""Rewards for the shape of a reply: `length`, `think`, `repetition`, `overlong`, `length_bonus`. The figures are MiniMind's and DAPO's."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlmca.rewards.base import Reward, Verdict, each
from rlmca.rewards.pool import CheckPool
from rlmca.rewards.text import thought_of

if TYPE_CHECKING:
    from rlmca.types import Sample

_WORD = re.compile(r"\w+|[^\w\s]")


@dataclass(frozen=True)
class LengthOptions:
    """Characters, both ends inside."""

    minimum: int = 20
    maximum: int = 800

    def __post_init__(self) -> None:
        _check_range(self.minimum, self.maximum)


@dataclass(frozen=True)
class ThinkOptions:
    """Characters of the thought, both ends inside."""

    minimum: int = 20
    maximum: int = 300

    def __post_init__(self) -> None:
        _check_range(self.minimum, self.maximum)


@dataclass(frozen=True)
class RepetitionOptions:
    """`n`: words of a gram. `scale`: of the share of grams seen before. `cap`: largest penalty."""

    n: int = 3
    scale: float = 1.0
    cap: float = 0.5

    def __post_init__(self) -> None:
        if self.n < 1 or not self.scale > 0 or not self.cap > 0:
            raise ValueError(f"n {self.n} must be at least 1, scale {self.scale} and cap {self.cap} above 0")


@dataclass(frozen=True)
class OverlongOptions:
    """Tokens. `max_tokens`: max_new_tokens of the run when not set."""

    max_tokens: int | None = None
    buffer: int = 128
    penalty: float = 1.0

    def __post_init__(self) -> None:
        if self.max_tokens is None:
            raise ValueError("option 'max_tokens' is missing: the longest reply in tokens")
        if not 0 < self.buffer <= self.max_tokens:
            raise ValueError(f"buffer {self.buffer} must be between 1 and max_tokens {self.max_tokens}")
        if not self.penalty > 0:
            raise ValueError(f"penalty {self.penalty} must be above 0; it is subtracted")


@dataclass(frozen=True)
class LengthBonusOptions:
    """`characters`: the length that gets the whole bonus of 1."""

    characters: int = 1000

    def __post_init__(self) -> None:
        if self.characters < 1:
            raise ValueError(f"characters {self.characters} must be at least 1")


def length(options: LengthOptions, pool: CheckPool) -> Reward:
    """+0.5 when the reply, white space at its ends removed, has `minimum` to `maximum` characters, else -0.5 (MiniMind)."""
    return _of_text(lambda reply: 0.5 if options.minimum <= len(reply.strip()) <= options.maximum else -0.5)


def think(options: ThinkOptions, pool: CheckPool) -> Reward:
    """+1 when the thought has `minimum` to `maximum` characters, else -0.5; +0.25 for exactly one `</think>`, else -0.25 (MiniMind).

    A reply without the closing tag has no thought: -0.75.
    """

    def score(reply: str) -> float:
        inside = options.minimum <= len(thought_of(reply)) <= options.maximum
        return (1.0 if inside else -0.5) + (0.25 if reply.count("</think>") == 1 else -0.25)

    return _of_text(score)


def repetition(options: RepetitionOptions, pool: CheckPool) -> Reward:
    """-min(cap, scale x share of n-grams that were seen before) (MiniMind)."""
    return _of_text(lambda reply: -min(options.cap, options.scale * duplicate_share(reply, options.n)))


def duplicate_share(text: str, n: int) -> float:
    """1 - different n-grams / n-grams; 0 when there is none. Words are lower-cased runs of letters and digits; every other
    character that is no white space is a word of its own. Scripts without spaces make long words."""
    words = _WORD.findall(text.lower())
    grams = len(words) - n + 1
    if grams < 1:
        return 0.0
    return 1 - len(set(zip(*(words[start:] for start in range(n)), strict=False))) / grams


def overlong(options: OverlongOptions, pool: CheckPool) -> Reward:
    """DAPO's soft punishment (arXiv:2503.14476, eq. 13), of the number of sampled tokens L: 0 up to max_tokens - buffer, then
    falling in a straight line to -penalty at max_tokens, and -penalty beyond."""
    assert options.max_tokens is not None
    start = options.max_tokens - options.buffer

    def score(samples: Sequence[Sample]) -> list[Verdict]:
        over = [max(0, len(sample.reply_ids) - start) for sample in samples]
        return [-options.penalty * min(1.0, tokens / options.buffer) if tokens else 0.0 for tokens in over]

    return score


def length_bonus(options: LengthBonusOptions, pool: CheckPool) -> Reward:
    """min(characters of the reply / 1000, 1)."""
    return _of_text(lambda reply: min(len(reply) / options.characters, 1.0))


def _of_text(rule: Callable[[str], float]) -> Reward:
    def score(samples: Sequence[Sample]) -> list[Verdict]:
        return each(lambda sample: rule(sample.reply), samples)

    return score


def _check_range(minimum: int, maximum: int) -> None:
    if not 0 <= minimum <= maximum:
        raise ValueError(f"minimum {minimum} must be at least 0 and at most maximum {maximum}")
