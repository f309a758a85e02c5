"""Looking at a rollout while it runs."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlmca.observe.console import console as run_console
from rlmca.types import Sample

LONGEST = 2000
"""Characters of a prompt or a reply that are shown: its beginning and its end."""


def print_samples(samples: Sequence[Sample], step: int, *, console: Console | None = None) -> None:
    """Print the first group of a rollout: the prompt, its replies as the reward functions see them, reward parts and advantages.

    Text stands as it is (thoughts and special tokens too), never as markup; what is not printable is written as its code.
    """
    if not samples:
        return
    group = [s for s in samples if s.group == samples[0].group]
    messages = group[0].row.get("messages") or []
    prompt = "\n".join(f"{m.get('role')}: {m.get('content')}" for m in messages)
    table = Table(title=Text(f"step {step}: {shown(prompt)}"), title_justify="left", show_lines=True)
    for column in ("reply", "finish", "reward", "parts", "advantage"):
        table.add_column(column)
    for s in group:
        parts = ", ".join(f"{name} {_number(value)}" for name, value in s.reward_parts.items())
        table.add_row(*map(Text, (shown(s.reply), s.finish, _number(s.reward), parts, f"{s.advantage:+.3f}")))
    (console or run_console()).print(table)


def shown(text: str) -> str:
    """The text with control characters as codes, and cut in its middle, with a note, where it is longer than `LONGEST`."""
    if len(text) > LONGEST:
        half = LONGEST // 2
        text = f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"
    return "".join(c if c in "\n\t" or c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def _number(value: float | None) -> str:
    return "invalid" if value is None else f"{value:g}"
