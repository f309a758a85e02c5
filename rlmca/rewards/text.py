"""Reading replies: fenced blocks and thoughts. Everything here takes time in proportion to the text."""

from __future__ import annotations

from collections.abc import Collection


def last_block(text: str, languages: Collection[str]) -> str | None:
    """The content of the last complete Markdown fence that names one of `languages` (lower case); "" among them: or names none."""
    found: str | None = None
    inside: str | None = None
    lines: list[str] = []
    for line in text.splitlines():
        mark = line.strip()
        if inside is None and mark.startswith("```"):
            inside, lines = mark[3:].strip().lower(), []
        elif inside is not None and mark == "```":
            if inside in languages:
                found = "\n".join(lines)
            inside = None
        elif inside is not None:
            lines.append(line)
    return found


def thought_of(text: str) -> str:
    """What stands before the first `</think>`, an opening `<think>` and white space at the ends left out; "" without the tag."""
    before, closed, _ = text.partition("</think>")
    return before.strip().removeprefix("<think>").strip() if closed else ""


def after_thought(text: str) -> str:
    """What follows the last `</think>`, or the whole text."""
    return text.rpartition("</think>")[2]
