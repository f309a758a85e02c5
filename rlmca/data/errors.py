"""The one error of this room and the list of rows that were left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

EXAMPLES_SHOWN = 5


class DataError(ValueError):
    """A data set, tokenizer or template that cannot be used; the message says what, where and what to write instead."""


class BadRow(Exception):
    """Raised while one row is read: the row is dropped and counted under `reason`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class DroppedRow:
    """One row that was left out: its data set, its 0-based position in the source and why."""

    dataset: str
    index: int
    reason: str


@dataclass
class Dropped:
    """Every row that was left out, in the order in which it was met."""

    rows: list[DroppedRow] = field(default_factory=list)

    def add(self, dataset: str, index: int, reason: str) -> None:
        self.rows.append(DroppedRow(dataset, index, reason))

    def extend(self, other: Dropped) -> None:
        self.rows.extend(other.rows)

    def counts(self) -> Counter[str]:
        """reason -> number of rows."""
        return Counter(row.reason for row in self.rows)

    def indices(self, reason: str, dataset: str | None = None) -> list[int]:
        """Positions dropped for `reason`, of one data set or of all."""
        return [row.index for row in self.rows if row.reason == reason and dataset in (None, row.dataset)]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[DroppedRow]:
        return iter(self.rows)

    def describe(self) -> str:
        """One line: every reason with its count and the first few row numbers."""
        parts = []
        for reason, count in self.counts().most_common():
            shown = self.indices(reason)[:EXAMPLES_SHOWN]
            more = ", …" if count > len(shown) else ""
            parts.append(f"{count} × {reason} (row {', '.join(map(str, shown))}{more})")
        return "; ".join(parts) if parts else "none"
