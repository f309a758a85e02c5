"""Lines for the person who watches the run; progress bars share this console."""

from __future__ import annotations

import rich
from rich.console import Console
from rich.markup import escape


def console() -> Console:
    """The console that the whole run prints to."""
    return rich.get_console()


def note(text: str) -> None:
    """One plain line."""
    console().print(escape(text), highlight=False, soft_wrap=True)
