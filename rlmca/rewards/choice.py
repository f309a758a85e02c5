"""Reward `choice`: the letter of a multiple choice."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlmca.rewards.base import Reward, Verdict, each
from rlmca.rewards.math import last_box
from rlmca.rewards.pool import CheckPool
from rlmca.rewards.text import after_thought

if TYPE_CHECKING:
    from rlmca.types import Sample

_SAID = re.compile(r"answer[\s*_]{0,8}(?:is\b[\s*_]{0,8}:?|:)[\s*_]{0,8}", re.IGNORECASE)
_TEXT = re.compile(r"\\(?:text|mathrm|mathbf|textbf)\s?\{([^{}]{0,300})\}")
_MARKED = re.compile(r"(?:option|choice)?\s?[(\[]([A-Za-z])[)\]]", re.IGNORECASE)
_BARE = re.compile(r"(?:option |choice )?([A-Z])(?:[.:),]|\s*$)")
_ALONE = re.compile(r"(?:option |choice )?([a-zA-Z])[.):]?", re.IGNORECASE)
_LONGEST = 2000


@dataclass(frozen=True)
class ChoiceOptions:
    """`column`: the row's column with the texts of the options (a list, or a mapping of letters), when there is one."""

    column: str = "options"


def choice(options: ChoiceOptions, pool: CheckPool) -> Reward:
    """1 when the letter that the reply chooses is the row's `answer`, else 0.

    Read after the last `</think>`: the last \\boxed{B}; else what the last "answer is (B)" or "answer: B" says; else a
    last line that is only a letter. The text of an option counts as its letter. `answer` is a letter, the text of an
    option, or a whole number: the place of the option, counted from 0.
    """

    def score(sample: Sample) -> Verdict:
        texts = option_texts(sample.row.get(options.column), options.column)
        return float(chosen(sample.reply, texts) == right_letter(sample.row, texts))

    def scores(samples: Sequence[Sample]) -> list[Verdict]:
        return each(score, samples)

    return scores


def option_texts(value: Any, column: str) -> dict[str, str]:
    """Letter -> text; empty without a column. Raises ValueError for a column that holds no options."""
    if value is None:
        return {}
    if isinstance(value, str):
        value = json.loads(value)
    if isinstance(value, Mapping):
        return {str(letter).strip().upper(): str(text) for letter, text in value.items() if text is not None}
    if not isinstance(value, (list, tuple)) or not 0 < len(value) <= 26:
        raise ValueError(f"reward choice: column {column!r} must hold 1 to 26 options, or letters and their options")
    return dict(zip(string.ascii_uppercase, map(str, value), strict=False))


def right_letter(row: Mapping[str, Any], texts: Mapping[str, str]) -> str:
    """The letter of the row's `answer`. Raises ValueError when it names no option."""
    answer = row.get("answer")
    if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < (len(texts) or 26):
        return list(texts or string.ascii_uppercase)[answer]
    letter = letter_of(str(answer), texts) if answer is not None else None
    if letter is None:
        known = f"the options {', '.join(texts)}" if texts else "a letter (the row has no options)"
        raise ValueError(f"reward choice: the row's answer {answer!r} is none of {known}")
    return letter


def chosen(reply: str, texts: Mapping[str, str]) -> str | None:
    """The letter that a reply chooses, None without any."""
    said = after_thought(reply)
    box = last_box(said)
    if box is not None:
        return letter_of(box, texts)
    answers = list(_SAID.finditer(said))
    if answers:
        return letter_of(said[answers[-1].end() :].partition("\n")[0], texts)
    last = said.strip().rpartition("\n")[2]
    if len(last) > _LONGEST:
        return None
    bare = _ALONE.fullmatch(_bare(last)) or _MARKED.fullmatch(_bare(last))
    return _known(bare[1], texts) if bare else None


def letter_of(text: str, texts: Mapping[str, str]) -> str | None:
    """ "B", "(b)", "B. Paris", "(B) because ...", or the text of an option as a letter."""
    said = _bare(_TEXT.sub(r"\1", text[:_LONGEST]))
    alone = _ALONE.fullmatch(said) or _MARKED.fullmatch(said)
    if alone and (letter := _known(alone[1], texts)):
        return letter
    for letter, option in texts.items():
        if _plain(said) == _plain(option):
            return letter
    found = _MARKED.match(said) or _BARE.match(said)
    return _known(found[1], texts) if found else None


def _known(letter: str, texts: Mapping[str, str]) -> str | None:
    letter = letter.upper()
    return letter if not texts or letter in texts else None


def _bare(text: str) -> str:
    return text.strip().removesuffix(".").strip("*$_`").strip()


def _plain(text: str) -> str:
    return " ".join(text.strip().strip(".\"'").casefold().split())
