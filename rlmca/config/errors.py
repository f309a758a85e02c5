"""The one exception of configuration: every problem that was found, not only the first."""

from __future__ import annotations

from collections.abc import Iterable


class ConfigError(Exception):
    """All problems of a configuration. `errors` holds one sentence each; `str()` numbers them."""

    def __init__(self, errors: str | Iterable[str]) -> None:
        self.errors: list[str] = [errors] if isinstance(errors, str) else list(errors)
        super().__init__(str(self))

    def __str__(self) -> str:
        if len(self.errors) == 1:
            return self.errors[0]
        return "\n".join(f"{number}. {error}" for number, error in enumerate(self.errors, start=1))


class LateError(ConfigError):
    """A mistake of the user that only the running stage could see; something was started by then."""
