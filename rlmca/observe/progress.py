"""Progress bars: one per long thing, on the main rank, and only when somebody is looking at a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from rlmca.observe.console import console as run_console


class Bar:
    """Handle of a running bar; every method is a no-op when the bar is not shown."""

    def __init__(self, shown: tuple[Progress, TaskID] | None) -> None:
        self._shown = shown

    @property
    def shown(self) -> bool:
        """True when the bar is on the terminal."""
        return self._shown is not None

    def advance(self, steps: float = 1) -> None:
        """`steps` more are done."""
        if self._shown is not None:
            self._shown[0].advance(self._shown[1], steps)

    def describe(self, text: str) -> None:
        """Changes the text in front of the bar."""
        if self._shown is not None:
            self._shown[0].update(self._shown[1], description=text)


@contextmanager
def progress(
    total: float | None, description: str, *, start: int = 0, is_main: bool = True, console: Console | None = None
) -> Iterator[Bar]:
    """A bar of `total` steps (None: unknown), of which `start` are done already.

    Lines printed through the same console (by default rich's own) appear above the bar.
    """
    console = console or run_console()
    if not (is_main and console.is_terminal):
        yield Bar(None)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bars:
        yield Bar((bars, bars.add_task(description, total=total, completed=start)))
