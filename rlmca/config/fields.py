"""How a key is declared: a dataclass field that carries its documentation, bounds and allowed values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Rule:
    """What a key accepts besides its type; `refused` gives, for a value that comes later, the reason."""

    doc: str
    choices: tuple[Any, ...] = ()
    refused: Mapping[str, str] = dataclasses.field(default_factory=dict)
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    split: bool = True
    """A list key given as text is split at commas, as in LLaMA-Factory."""
    secret: bool = False
    """Never printed and never written to a file."""

    def problem(self, value: Any) -> str | None:
        """What is wrong with a converted value, or None."""
        if isinstance(value, str) and value in self.refused:
            return self.refused[value]
        if self.choices and value not in self.choices:
            return f"{value!r} is not one of {', '.join(str(c) for c in self.choices)}"
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            if self.at_least is not None and value < self.at_least:
                return f"{value} is too small: at least {self.at_least}"
            if self.above is not None and value <= self.above:
                return f"{value} is too small: it must be above {self.above}"
            if self.at_most is not None and value > self.at_most:
                return f"{value} is too large: at most {self.at_most}"
            if self.below is not None and value >= self.below:
                return f"{value} is too large: it must be below {self.below}"
        return None


def option(default: Any, doc: str, **rule: Any) -> Any:
    """A dataclass field with a `Rule` in its metadata. Lists and dicts become fresh defaults."""
    metadata = {"rule": Rule(doc=doc, **rule)}
    if isinstance(default, (list, dict)):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    secret = bool(rule.get("secret", False))
    return dataclasses.field(default=default, metadata=metadata, repr=not secret, compare=not secret)
