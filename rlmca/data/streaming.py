"""Training rows read one after the other while training, in bounded memory and in an order that can be taken up again.

The order of a pass is a pure function of the sources, the seed and the pass's number: records of the mixture go into a
buffer, and a seeded draw takes one out. So a position is three numbers (pass, draws done, rows of the last draw taken),
and a resumed run reads the sources up to there again, without tokenising what it skips.
"""

from __future__ import annotations

import collections
import functools
import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np

from rlmca.data.encoders import Encoder, Outcome
from rlmca.data.errors import DataError, Dropped
from rlmca.data.info import DatasetEntry, resolve
from rlmca.data.loading import check_ranking, first_object, nothing_left, seen_entry
from rlmca.data.mixing import mix_streams
from rlmca.data.options import DataOptions, Hub, Log, no_log
from rlmca.data.sources import iter_rows, source_files
from rlmca.data.supervised import Dataset
from rlmca.data.template import Encoded

Record = tuple[int, int, Any]
"""(set, position in it, raw record)"""
_PEEK = 100
"""Records among which the first object is looked for, to see the format of a set given as a path."""


class RowStream:
    """Endless token rows: `next_rows` gives those of a step. `held` first usable rows are kept for evaluation, in `held_out`.

    With `capacity` a step has as many rows as fit into so many tokens (packs), else `batch_size` rows.
    """

    def __init__(
        self,
        options: DataOptions,
        encoder: Encoder,
        *,
        batch_size: int,
        capacity: int | None = None,
        buffer_size: int = 16384,
        held: int = 0,
        seed: int = 42,
        hub: Hub | None = None,
        log: Log = no_log,
    ) -> None:
        self.options, self.encoder, self.hub, self.log = options, encoder, hub, log
        self.batch_size, self.capacity, self.buffer_size, self.seed = batch_size, capacity, buffer_size, seed
        self.dropped = Dropped()
        self._entries = [self._entry(name) for name in options.dataset]
        if not self._entries:
            raise DataError("no data set is named: set dataset")
        self._skipped, self.held_out = self._hold_out(held)
        self.passes, self._draws, self._taken = 0, 0, 0
        self._records = self._shuffled(0)
        self._pending: list[Encoded] = []
        self._usable, self._cut = 0, 0
        self._found = False
        """Whether any record of this pass gave a row: sources may change while they are read again and again."""

    @property
    def epochs(self) -> float:
        """Whole passes over the data so far; the length of a pass is not known."""
        return float(self.passes)

    def next_rows(self) -> list[Encoded]:
        """The rows of the next step."""
        rows: list[Encoded] = []
        tokens = 0
        while self.capacity is not None or len(rows) < self.batch_size:
            row = self._peek()
            tokens += len(row.ids)
            if self.capacity is not None and rows and tokens > self.capacity:
                break
            rows.append(row)
            self._pending.pop(0)
            self._taken += 1
        return rows

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps; plain numbers and text."""
        return {"passes": self.passes, "draws": self._draws, "taken": self._taken, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Continue where `state` was saved; on other data, or another order of it, start anew with a warning."""
        mine = self._identity()
        other = [key for key in mine if state.get(key) != mine[key]]
        if other:
            difference = ", ".join(f"{key} was {state.get(key)!r} and is {mine[key]!r}" for key in other)
            warnings.warn(f"the saved data position belongs to other data or another order: {difference}; data starts at 0", stacklevel=2)
            return False
        self.passes, self._draws, taken = int(state["passes"]), int(state["draws"]), int(state["taken"])
        self._records = self._shuffled(self.passes)
        self._pending, self._taken = [], 0
        drawn = collections.deque(itertools.islice(self._records, self._draws), maxlen=1)
        if drawn:  # the last draw always had rows, and some of them may be left
            self._pending, self._taken = list(self._encode(drawn[0]).rows)[taken:], taken
            self._found = True
        return True

    def _identity(self) -> dict[str, Any]:
        options = self.options
        return {
            "stream": [f"{entry.where} {_part(entry)} {entry.described_columns()} {_size(entry)}" for entry in self._entries],
            "mixture": [options.mix_strategy, *options.interleave_probs],
            "max_samples": options.max_samples,
            "held_out": self._skipped,
            "buffer_size": self.buffer_size,
            "seed": self.seed,
            "cutoff_len": options.cutoff_len,
        }

    # ---- rows

    def _peek(self) -> Encoded:
        while not self._pending:
            record = next(self._records, None)
            if record is None:
                self._end_pass()
                continue
            self._draws, self._taken = self._draws + 1, 0
            outcome = self._encode(record)
            if outcome.rows:
                self._found = True
                self._usable, self._cut = self._usable + len(outcome.rows), self._cut + outcome.cut
                self._pending = list(outcome.rows)
            else:
                self.dropped.add(self._entries[record[0]].name, outcome.index, outcome.reason)
        return self._pending[0]

    def _end_pass(self) -> None:
        if not self._found:
            if not self._draws and self._skipped:
                raise DataError(f"val_size holds out every row of {', '.join(self.options.dataset)}: lower it")
            entry = self._entries[0]
            raise nothing_left(entry, first_object(r for _, _, r in itertools.islice(self._mixture(), _PEEK)), self.dropped)
        dropped = f", {len(self.dropped)} dropped: {self.dropped.describe()}" if len(self.dropped) else ""
        cut = f" ({self._cut} cut to {self.options.cutoff_len} tokens)" if self._cut else ""
        self.log(f"{', '.join(self.options.dataset)}: pass {self.passes + 1} read, {self._usable} rows{cut}{dropped}")
        self.passes, self._draws, self._taken, self._cut = self.passes + 1, 0, 0, 0
        self._usable, self._found = 0, False
        self.dropped = Dropped()
        self._records = self._shuffled(self.passes)

    def _encode(self, record: Record) -> Outcome:
        place, index, raw = record
        return self.encoder.encode(self._entries[place], [(index, raw)])[0]

    # ---- records

    def _entry(self, name: str) -> DatasetEntry:
        entry = resolve([name], self.options.dataset_dir)[0]
        check_ranking(entry, False)
        if entry.formatting is not None:
            return entry
        return seen_entry(entry, first_object(itertools.islice(iter_rows(entry, self.hub, lazy=True), _PEEK)))

    def _source(self, place: int) -> Iterator[Record]:
        entry = self._entries[place]
        limits = [limit for limit in (entry.num_samples, self.options.max_samples) if limit is not None]
        rows = iter_rows(entry, self.hub, lazy=True)
        for index, raw in enumerate(itertools.islice(rows, min(limits, default=None))):
            yield place, index, raw

    def _mixture(self) -> Iterator[Record]:
        sources = [functools.partial(self._source, place) for place in range(len(self._entries))]
        return mix_streams(sources, self.options.mix_strategy, self.options.interleave_probs, self.seed)

    def _shuffled(self, number: int) -> Iterator[Record]:
        """The records of pass `number` in their order: the buffer is filled, then each draw makes room for the next record."""
        records = itertools.islice(self._mixture(), self._skipped, None)
        if self.buffer_size == 1:
            yield from records
            return
        random = np.random.RandomState(np.array([self.seed % 2**32, self.seed // 2**32 % 2**32, number], dtype=np.uint32))
        buffer: list[Record] = []
        for record in records:
            if len(buffer) < self.buffer_size:
                buffer.append(record)
                continue
            at = int(random.randint(self.buffer_size))
            yield buffer[at]
            buffer[at] = record
        for at in random.permutation(len(buffer)):
            yield buffer[at]

    def _hold_out(self, held: int) -> tuple[int, Dataset | None]:
        """(records read, rows) until `held` records gave rows: the first ones of the mixture, before any shuffling."""
        if not held:
            return 0, None
        rows: list[Encoded] = []
        dropped, found, read = Dropped(), 0, 0
        for read, record in enumerate(self._mixture(), 1):
            outcome = self._encode(record)
            rows += outcome.rows
            found += bool(outcome.rows)
            if not outcome.rows:
                dropped.add(self._entries[record[0]].name, outcome.index, outcome.reason)
            if found == held:
                return read, Dataset(rows, dropped)
        raise DataError(f"val_size {held} holds out more rows than the {found} usable ones of {', '.join(self.options.dataset)}")


def _part(entry: DatasetEntry) -> str:
    """Which rows of the source are meant."""
    own = {"subset": entry.subset, "split": entry.split, "folder": entry.folder} if entry.hub is not None else {}
    return " ".join(f"{key} {value}" for key, value in {**own, "num_samples": entry.num_samples}.items() if value is not None)


def _size(entry: DatasetEntry) -> str:
    """The bytes of each file, in the order in which they are read."""
    files = source_files(entry.path) if entry.path is not None else []
    return f"({' + '.join(str(file.stat().st_size) for file in files)} bytes)" if files else ""
