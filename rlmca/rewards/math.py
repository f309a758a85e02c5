"""Reward `math`: the final answer of the reply equals the row's answer as mathematics (math-verify)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from rlmca.rewards.base import Failure, Reward, Verdict, answer_of
from rlmca.rewards.math_check import equal
from rlmca.rewards.pool import CheckPool

if TYPE_CHECKING:
    from rlmca.types import Sample

_BOX = re.compile(r"\\f?box(?:ed)?\s*\{")
_ANSWER_IS = re.compile(r"answer\s++is\s*+:?\s*+(.+?)(?=\.(?:\s|$)|\n|$)", re.IGNORECASE)
_NUMBER = re.compile(r"[+-]?\d{1,60}(\.\d{1,60})?")


@dataclass(frozen=True)
class MathOptions:
    """`math` has no options."""


def math_reward(options: MathOptions, pool: CheckPool) -> Reward:
    """1 when the extracted answer equals the row's `answer`, 0 when it does not or there is none.

    Numbers, LaTeX, sets, intervals and units are understood. Equal texts and plain integers are decided at
    once; the rest is checked in the pool, each check bounded in time, without signals, so any thread may
    score. A check that is stopped counts 0. A row whose own answer cannot be read as mathematics is invalid.
    """

    def score(samples: Sequence[Sample]) -> list[Verdict]:
        verdicts: list[Verdict] = [0.0] * len(samples)
        hard: list[tuple[int, tuple[str, str]]] = []
        for at, sample in enumerate(samples):
            try:
                answer = answer_of(sample, "math")
            except ValueError as error:
                verdicts[at] = Failure.of(error)
                continue
            gold = extract_answer(answer) or _bare(answer)
            found = extract_answer(sample.reply)
            known = compare_plainly(gold, found)
            if known is None:
                hard.append((at, (gold, found or "")))
            else:
                verdicts[at] = float(known)
        for (at, _), outcome in zip(hard, pool.run(equal, [pair for _, pair in hard]), strict=True):
            verdicts[at] = outcome if isinstance(outcome, Failure) else float(outcome)
        return verdicts

    return score


def compare_plainly(gold: str, found: str | None) -> bool | None:
    """The verdict where no algebra is needed: nothing found, equal texts, two plain numbers; None: unknown."""
    if not found:
        return False
    if not gold:
        return None
    if gold == found:
        return True
    if _NUMBER.fullmatch(gold) and _NUMBER.fullmatch(found):
        if Fraction(gold) == Fraction(found):
            return True
        if "." not in gold and "." not in found:
            return False  # decimals are left to math-verify, which rounds
    return None


def extract_answer(text: str) -> str | None:
    r"""The final answer in a text: the last complete \boxed{...} (braces may nest), else what follows the last
    `####`, else what follows the last "answer is"; None without any of them."""
    box = last_box(text)
    if box is not None:
        return box
    _, mark, rest = text.rpartition("####")
    if mark:
        return _bare(rest.strip().split("\n", 1)[0])
    found = _ANSWER_IS.findall(text)
    return _bare(found[-1]) if found else None


def last_box(text: str) -> str | None:
    r"""The content of the last complete \boxed{...}, None without any."""
    limit = len(text)
    for match in reversed(list(_BOX.finditer(text))):
        content = _braced(text, match.end(), limit)
        if content is not None:
            return _bare(content)
        limit = match.start()  # what is open from here to the end holds any earlier one open too
    return None


def _braced(text: str, start: int, limit: int) -> str | None:
    depth, escaped = 1, False
    for at in range(start, limit):
        character = text[at]
        if escaped or character == "\\":
            escaped = not escaped
        elif character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
            if not depth:
                return text[start:at]
    return None


def _bare(text: str) -> str:
    """Without white space, dollar signs and the sentence's full stop at the ends."""
    return text.strip().strip("$*").strip().removesuffix(".").strip()
