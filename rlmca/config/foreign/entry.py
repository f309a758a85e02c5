"""A key that another program knows and this one does not honour: what is said about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import yaml

OFF: tuple[Any, ...] = (None, False, "", [], {})


@dataclass(frozen=True)
class Foreign:
    """`kind` refused: an error unless the value is in `accepted` (it asks for what is done anyway).

    `kind` no_effect: accepted with a note. `elsewhere` marks a key that is accepted inside additional_configs.
    """

    name: str
    kind: Literal["refused", "no_effect"]
    reason: str
    instead: str = ""
    accepted: tuple[Any, ...] = OFF
    elsewhere: bool = False

    def accepts(self, value: Any) -> bool:
        """True when the value asks for nothing that would not happen anyway."""
        if isinstance(value, str):
            value = value.strip()
            if value.lower() in {"true", "false", "null"} or value.replace(".", "").isdecimal():
                value = yaml.safe_load(value.lower())
        return any(value == good and isinstance(value, bool) == isinstance(good, bool) for good in self.accepted)

    def sentence(self, value: Any) -> str:
        """The error or the note for a value."""
        text = f"{self.name}: {self.reason}"
        return f"{text}; {self.instead}" if self.instead else text


def refuse(names: str, reason: str, instead: str = "", *accepted: Any, elsewhere: bool = False) -> Mapping[str, Foreign]:
    """Refused names (separated by blanks) with one reason; `accepted` values, besides off ones, pass."""
    return {name: Foreign(name, "refused", reason, instead, (*OFF, *accepted), elsewhere) for name in names.split()}


def always(names: str, reason: str, instead: str) -> Mapping[str, Foreign]:
    """Switches that are on whatever is written: false is refused too."""
    return {name: Foreign(name, "refused", reason, instead, (None, "", True)) for name in names.split()}


def no_effect(names: str, reason: str) -> Mapping[str, Foreign]:
    """Names (separated by blanks) that change nothing, with the reason."""
    return {name: Foreign(name, "no_effect", reason) for name in names.split()}
