"""Progress bars appear on a terminal and nowhere else."""

from __future__ import annotations

import io

from rich.console import Console

from rlmca.observe.progress import progress


def run(terminal: bool, is_main: bool = True) -> str:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=100)
    with progress(4, "training", console=console, is_main=is_main) as bar:
        assert bar.shown == (terminal and is_main)
        for _ in range(4):
            bar.advance()
        bar.describe("saving")
    return console.file.getvalue()


def test_a_terminal_shows_the_bar() -> None:
    assert "saving" in run(terminal=True) and "4/4" in run(terminal=True)


def test_no_terminal_and_other_ranks_stay_quiet() -> None:
    assert run(terminal=False) == "" == run(terminal=True, is_main=False)
