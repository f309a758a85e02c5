"""Looking at a rollout while it runs."""

from __future__ import annotations

from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from rlmca.observe.console import console
from rlmca.types import Sample


def print_samples(samples: Sequence[Sample], step: int) -> None:
    """Print the first group of a rollout: the prompt, its replies, their reward parts and advantages."""
    group = [s for s in samples if s.group == samples[0].group]
    messages = group[0].row.get("messages") or []
    prompt = "\n".join(f"{m.get('role')}: {m.get('content')}" for m in messages)
    table = Table(title=f"step {step}: {escape(prompt)}", title_justify="left")
    for column in ("reply", "finish", "reward", "parts", "advantage"):
        table.add_column(column)
    for s in group:
        parts = ", ".join(f"{name} {'invalid' if value is None else f'{value:g}'}" for name, value in s.reward_parts.items())
        reward = "invalid" if s.reward is None else f"{s.reward:g}"
        table.add_row(escape(s.reply), s.finish, reward, parts, f"{s.advantage:+.3f}")
    console().print(table)
