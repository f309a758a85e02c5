"""How several sets become one: behind each other, or interleaved as `datasets.interleave_datasets` does it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic, TypeVar

import numpy as np

T = TypeVar("T")

STOPPING = {
    "interleave_under": "first_exhausted",
    "interleave_over": "all_exhausted",
    "interleave_once": "all_exhausted_without_replacement",
}
_DRAWS = 1000
"""Sources are drawn in blocks of this size, since `datasets` does: the same seed then gives the same order."""


def mix(sets: Sequence[Sequence[int]], strategy: str, probabilities: Sequence[float] | None, seed: int) -> list[int]:
    """Row numbers of several sets in the order of the mixture; some are left out or repeated as the strategy has it."""
    if strategy == "concat" or len(sets) == 1:
        return [row for rows in sets for row in rows]
    from datasets import Dataset, interleave_datasets

    tables = [Dataset.from_dict({"row": list(rows)}) for rows in sets]
    chances = list(probabilities) if probabilities else None
    return list(interleave_datasets(tables, probabilities=chances, seed=seed, stopping_strategy=STOPPING[strategy])["row"])


def mix_streams(
    sources: Sequence[Callable[[], Iterable[T]]], strategy: str, probabilities: Sequence[float] | None, seed: int
) -> Iterator[T]:
    """One pass over the mixture of sources whose lengths are not known; each can be opened again.

    The order is that of `mix` but for round-robin `interleave_over`, which here ends with the round in which the last
    source is first exhausted, the same rule in other words.
    """
    if strategy == "concat" or len(sources) == 1:
        for source in sources:
            yield from source()
        return
    streams = [_Ahead(source) for source in sources]
    finished = [stream.empty for stream in streams]
    kind = STOPPING[strategy]
    drawable = [not probabilities or probabilities[place] > 0 for place in range(len(streams))]
    watched = [place for place in range(len(streams)) if drawable[place]]
    round_robin = not probabilities
    for turn, place in enumerate(_turns(len(streams), probabilities, seed)):
        at_border = not round_robin or turn % len(streams) == 0
        done = [finished[other] for other in watched]
        if at_border and (any(done) if kind == "first_exhausted" else all(done)):
            return
        if finished[place] and (kind == "all_exhausted_without_replacement" or streams[place].empty):
            continue
        yield streams[place].next()
        finished[place] = finished[place] or streams[place].passed


def _turns(sources: int, probabilities: Sequence[float] | None, seed: int) -> Iterator[int]:
    if not probabilities:
        while True:
            yield from range(sources)
    random = np.random.default_rng(seed)
    while True:
        yield from (int(place) for place in random.choice(sources, size=_DRAWS, p=list(probabilities)))


class _Ahead(Generic[T]):
    """An endless source that knows when it has just given its last row; it then begins again."""

    def __init__(self, source: Callable[[], Iterable[T]]) -> None:
        self._source = source
        self._rows = iter(source())
        self.passed = False
        self._coming = next(self._rows, None)
        self.empty = self._coming is None

    def next(self) -> T:
        row = self._coming
        assert row is not None
        self._coming = next(self._rows, None)
        if self._coming is None:
            self.passed = True
            self._rows = iter(self._source())
            self._coming = next(self._rows, None)
        return row
