"""What the command line prints: errors, notes, results, the version, help."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlmca.config import FOREIGN, ConfigError, LateError, RunConfig, describe, keys


def errors(error: ConfigError) -> None:
    """All errors of a configuration on standard error, numbered, without a traceback."""
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True)
    count = len(error.errors)
    what = "the run ended" if isinstance(error, LateError) else "nothing was started"
    console.print(Text(f"{count} error{'s' if count > 1 else ''}, {what}:", style="bold red"))
    for number, text in enumerate(error.errors, start=1):
        console.print(Text(f"  {number}. {text}"), soft_wrap=True)


def notes(cfg: RunConfig) -> None:
    """The keys without effect, in one note."""
    if cfg.notes:
        from rich.console import Console
        from rich.text import Text

        Console(stderr=True).print(Text("note: " + "\n      ".join(cfg.notes)), soft_wrap=True)


def message(text: str) -> None:
    """A line on standard error."""
    from rich.console import Console
    from rich.text import Text

    Console(stderr=True).print(Text(text), soft_wrap=True)


def results(title: str, values: Mapping[str, Any]) -> None:
    """The single numbers and texts of a result as a table."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, show_header=False, title_justify="left")
    for name, value in values.items():
        if isinstance(value, (str, int, float)):
            table.add_row(Text(name), Text(f"{value:.6g}" if isinstance(value, float) else str(value), overflow="fold"))
    if table.row_count:
        Console().print(table)


def version() -> None:
    """The version of this program."""
    import rlmca

    print(f"rlmca {rlmca.__version__}")


def help_text(usage: str, names: Sequence[str]) -> None:
    """The commands and all keys, or the documentation of some keys."""
    if not names:
        print(usage)
        sections: dict[str, list[str]] = {}
        for key in keys().values():
            sections.setdefault(key.section, []).append(key.name)
        for section, members in sections.items():
            print(f"{section} keys: {', '.join(members)}\n")
        idle = sorted(name for name, foreign in FOREIGN.items() if foreign.kind == "no_effect")
        print(f"known keys without effect: {', '.join(idle)}\n")
        print(f"{len(FOREIGN) - len(idle)} more keys of other programs are refused with a reason; rlmca-cli help KEY tells it")
        return
    wrong: list[str] = []
    for name in names:
        try:
            print("\n".join(describe(name)))
        except ConfigError as error:
            wrong += error.errors
    if wrong:
        raise ConfigError(wrong)
