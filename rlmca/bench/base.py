"""What a benchmark is, and how `key=value` becomes its options."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlmca.config import ConfigError


@dataclass(frozen=True)
class Bench:
    """A benchmark: its name, its options (an instance with the defaults) and what runs and prints it."""

    name: str
    options: Any
    run: Callable[[Any], dict[str, Any]]


def parse_extra(defaults: Any, extra: Sequence[str], where: str) -> Any:
    """`defaults` (a dataclass instance) with the items applied, `key=value`, `--key=value` or `--key value`; every mistake is named at
    once."""
    known = {field.name: getattr(defaults, field.name) for field in dataclasses.fields(defaults)}
    changes: dict[str, Any] = {}
    errors: list[str] = []
    for item in _joined(extra):
        key, equals, text = item.partition("=")
        if not equals or key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {near[0]}=... ?" if near else "."
            errors.append(f"{where}: {item!r} is no option{hint} Options: {', '.join(f'{k}={v}' for k, v in known.items())}")
            continue
        kind = type(known[key])
        try:
            changes[key] = Path(text) if isinstance(known[key], Path) else kind(text)
        except ValueError:
            errors.append(f"{where}: {key}={text!r} is not of type {kind.__name__}; for example {key}={known[key]}")
    if errors:
        raise ConfigError(errors)
    return dataclasses.replace(defaults, **changes)


def _joined(extra: Sequence[str]) -> list[str]:
    """The items as `key=value`."""
    items: list[str] = []
    rest = iter(extra)
    for item in rest:
        key = item.removeprefix("--")
        items.append(key if key == item or "=" in key else f"{key}={next(rest, '')}")
    return items
