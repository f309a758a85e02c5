"""Reward `format`: the reply keeps to a pattern, or to a row of tags."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import regex  # type: ignore[import-untyped]

from rlmca.rewards.base import Failure, Reward, Verdict, each
from rlmca.rewards.pool import CheckPool

if TYPE_CHECKING:
    from rlmca.types import Sample


@dataclass(frozen=True)
class FormatOptions:
    """Either a `pattern` that the whole reply must match (`.` matches line ends too), or `tags`, in this order."""

    pattern: str | None = None
    tags: tuple[str, ...] = ("think", "answer")

    def __post_init__(self) -> None:
        if self.pattern is not None:
            try:
                regex.compile(self.pattern)
            except regex.error as error:
                raise ValueError(f"pattern {self.pattern!r} is no regular expression: {error}") from None
        elif not self.tags or len(set(self.tags)) != len(self.tags) or not all(tag.strip() for tag in self.tags):
            raise ValueError(f"tags {list(self.tags)} must be names, at least one and each once")


def format_reward(options: FormatOptions, pool: CheckPool) -> Reward:
    """1 when the reply has the format, else 0.

    Tags: the reply is `<think>...</think> <answer>...</answer>` (by default) with nothing but white space
    around the blocks, every tag exactly once, and the last block not blank. A pattern that backtracks for
    longer than the limit of a check counts as a timeout.
    """
    pattern = regex.compile(options.pattern, regex.DOTALL) if options.pattern is not None else None

    def check(sample: Sample) -> Verdict:
        if pattern is None:
            return float(has_tags(sample.reply, options.tags))
        try:
            return float(pattern.fullmatch(sample.reply.strip(), timeout=pool.timeout) is not None)
        except TimeoutError:
            return Failure("timeout", f"the pattern of `format` took more than {pool.timeout:g} s")

    def score(samples: Sequence[Sample]) -> list[Verdict]:
        return each(check, samples)

    return score


def has_tags(text: str, tags: Sequence[str]) -> bool:
    """Whether `text` is exactly the tagged blocks, in order; see `format_reward`."""
    if any(text.count(mark) != 1 for tag in tags for mark in (f"<{tag}>", f"</{tag}>")):
        return False
    rest, content = text, ""
    for tag in tags:
        before, _, rest = rest.partition(f"<{tag}>")
        content, closed, rest = rest.partition(f"</{tag}>")
        if before.strip() or not closed:
            return False
    return not rest.strip() and bool(content.strip())
