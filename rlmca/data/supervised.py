"""Supervised rows: token ids and targets, kept in three flat arrays."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from rlmca.data.encoders import ConversationEncoder, Encoder
from rlmca.data.errors import DataError, Dropped
from rlmca.data.loading import nothing_left, read_records, report
from rlmca.data.mixing import mix
from rlmca.data.options import DataOptions, Hub, Log, no_log
from rlmca.data.template import ChatTemplate, Encoded

Array = np.ndarray[Any, np.dtype[Any]]


class Dataset(Sequence[Encoded]):
    """Rows of (ids, mask); `mask[t]` says that token t is a target. What was left out is in `dropped`.

    `truncated` counts the rows that were cut to the length limit.
    """

    def __init__(self, rows: Sequence[Encoded], dropped: Dropped | None = None, truncated: int = 0) -> None:
        lengths = np.fromiter((len(row.ids) for row in rows), dtype=np.int64, count=len(rows))
        self._starts = np.concatenate(([0], np.cumsum(lengths)))
        total = int(self._starts[-1])
        self._ids = np.fromiter((i for row in rows for i in row.ids), dtype=np.int32, count=total)
        self._mask = np.fromiter((m for row in rows for m in row.mask), dtype=np.bool_, count=total)
        self.dropped = dropped if dropped is not None else Dropped()
        self.truncated = truncated

    @classmethod
    def from_arrays(cls, starts: Array, ids: Array, mask: Array, dropped: Dropped | None = None, truncated: int = 0) -> Dataset:
        """Row r is `ids[starts[r] : starts[r + 1]]`; the arrays (int64, int32, bool) are kept as they are, memory-mapped ones too."""
        made = cls([], dropped, truncated)
        made._starts, made._ids, made._mask = starts, ids, mask
        return made

    @property
    def arrays(self) -> dict[str, Array]:
        """The arguments of `from_arrays` that hold the rows."""
        return {"starts": self._starts, "ids": self._ids, "mask": self._mask}

    @property
    def examples(self) -> Sequence[Encoded]:
        """The rows themselves."""
        return self

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row."""
        return np.diff(self._starts).tolist()

    @property
    def num_tokens(self) -> int:
        return int(self._starts[-1])

    @property
    def num_targets(self) -> int:
        return int(self._mask.sum())

    @property
    def fingerprint(self) -> str:
        """Changes with any id, target or row border: tells a resumed run that it reads the same data."""
        digest = hashlib.blake2b(digest_size=16)
        for values in (self._starts, self._ids, self._mask):
            digest.update(np.ascontiguousarray(values).data)
        return digest.hexdigest()

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, index):  # type: ignore[no-untyped-def]  # one row, or a list of them for a slice
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        at = index + len(self) if index < 0 else index
        if not 0 <= at < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        cut = slice(int(self._starts[at]), int(self._starts[at + 1]))
        return Encoded(self._ids[cut].tolist(), self._mask[cut].tolist())

    def __iter__(self) -> Iterator[Encoded]:
        return (self[i] for i in range(len(self)))

    def take(self, rows: Sequence[int]) -> Dataset:
        """The rows with these numbers, in this order; `dropped` and `truncated` stay with the whole."""
        chosen = np.asarray(rows, dtype=np.int64)
        lengths = np.diff(self._starts)[chosen]
        starts = np.concatenate(([0], np.cumsum(lengths)))
        places = np.arange(int(starts[-1])) + np.repeat(self._starts[chosen] - starts[:-1], lengths)
        return Dataset.from_arrays(starts, self._ids[places], self._mask[places])


class _Rows:
    """Rows while they are collected, a few bytes a token."""

    def __init__(self) -> None:
        self._lengths, self._ids, self._mask = array("q"), array("i"), bytearray()

    def add(self, row: Encoded) -> None:
        self._lengths.append(len(row.ids))
        self._ids.extend(row.ids)
        self._mask.extend(row.mask)

    def __len__(self) -> int:
        return len(self._lengths)

    def dataset(self, dropped: Dropped, truncated: int) -> Dataset:
        starts = np.concatenate(([0], np.cumsum(np.asarray(self._lengths, dtype=np.int64))))
        ids = np.frombuffer(self._ids, dtype=np.int32) if self._ids else np.zeros(0, np.int32)
        return Dataset.from_arrays(starts, ids, np.frombuffer(self._mask, dtype=np.bool_), dropped, truncated)


def load_supervised(
    options: DataOptions,
    template: ChatTemplate,
    log: Log = no_log,
    *,
    names: Sequence[str] | None = None,
    seed: int = 42,
    hub: Hub | None = None,
) -> Dataset:
    """The conversations of all named data sets (`options.dataset` unless `names` says otherwise), one after the other.

    A row longer than `cutoff_len` keeps its first `cutoff_len` tokens exactly; if no target is among them it is
    dropped and counted. DataError when a source cannot be read or nothing of a data set is usable.
    """
    return load_rows(options, ConversationEncoder(options, template), log, names=names, seed=seed, hub=hub)


def load_rows(
    options: DataOptions,
    encoder: Encoder,
    log: Log = no_log,
    *,
    names: Sequence[str] | None = None,
    seed: int = 42,
    hub: Hub | None = None,
    sizes: list[int] | None = None,
) -> Dataset:
    """The rows that an encoder makes of all named data sets, one after the other; `sizes` is told the rows of each.

    Every row has a target: what has none is dropped and counted. DataError as in `load_supervised`.
    """
    rows, everything, truncated = _Rows(), Dropped(), 0
    for name in options.dataset if names is None else names:
        dropped, before, cut = Dropped(), len(rows), 0
        entry, records, first = read_records(name, options, seed=seed, hub=hub)
        for at in range(0, len(records), options.preprocessing_batch_size):
            for outcome in encoder.encode(entry, records[at : at + options.preprocessing_batch_size]):
                if not outcome.rows:
                    dropped.add(name, outcome.index, outcome.reason)
                cut += outcome.cut
                for row in outcome.rows:
                    rows.add(row)
        kept = len(rows) - before
        if not kept:
            raise nothing_left(entry, first, dropped)
        log(report(entry, kept, dropped, f" ({cut} cut to {options.cutoff_len} tokens)" if cut else ""))
        everything.extend(dropped)
        truncated += cut
        if sizes is not None:
            sizes.append(kept)
    if not len(rows):
        raise DataError("no data set is named: set dataset")
    return rows.dataset(everything, truncated)


def load_train_eval(
    options: DataOptions,
    template: ChatTemplate,
    log: Log = no_log,
    *,
    seed: int = 42,
    hub: Hub | None = None,
    encoder: Encoder | None = None,
) -> tuple[Dataset, dict[str, Dataset]]:
    """(training rows, evaluation sets by name); `encoder` says what rows are, conversations when it is None.

    Several training sets are put together as `mix_strategy` says. Evaluation rows are those of `eval_dataset`, or else
    `val_size` rows of the training data, drawn by `seed`: a count from 1 upwards, a share below 1. {} without either.
    A row that is held out is in no mixture.
    """
    encoder = encoder or ConversationEncoder(options, template)
    if options.eval_dataset and options.val_size:
        raise DataError("val_size and eval_dataset exclude each other: set one of them")
    sizes: list[int] = []
    train = load_rows(options, encoder, log, seed=seed, hub=hub, sizes=sizes)
    held, kept = split_rows(len(train), options.val_size, seed) if options.val_size else ([], list(range(len(train))))
    evals = {"eval": train.take(held)} if held else load_evals(options, encoder, log, seed=seed, hub=hub)
    strategy = options.mix_strategy if len(sizes) > 1 else "concat"
    if not held and strategy == "concat":
        return train, evals
    borders = np.searchsorted(kept, np.cumsum(sizes)[:-1])
    parts = [part.tolist() for part in np.split(np.asarray(kept), borders)]
    if strategy != "concat" and not all(parts):
        raise DataError(f"val_size {options.val_size} leaves nothing of data set {options.dataset[parts.index([])]!r} to mix: lower it")
    rest = train.take(mix(parts, strategy, options.interleave_probs, seed))
    rest.dropped, rest.truncated = train.dropped, train.truncated
    return rest, evals


def load_evals(options: DataOptions, encoder: Encoder, log: Log = no_log, *, seed: int = 42, hub: Hub | None = None) -> dict[str, Dataset]:
    """The rows of `eval_dataset`: one set, or one for each name with `eval_on_each_dataset`; {} without any."""
    names = list(options.eval_dataset)
    if names and options.eval_on_each_dataset:
        return {name: load_rows(options, encoder, log, names=[name], seed=seed, hub=hub) for name in names}
    return {"eval": load_rows(options, encoder, log, names=names, seed=seed, hub=hub)} if names else {}


def split_rows(num_rows: int, val_size: float, seed: int) -> tuple[list[int], list[int]]:
    """(held out, kept) row numbers, both ascending. DataError when nothing would be left on one side."""
    if val_size < 0 or (val_size > 1 and val_size != int(val_size)):
        raise DataError(f"val_size must be a share below 1 or a whole number of rows, not {val_size}")
    count = int(val_size) if val_size >= 1 else int(np.ceil(num_rows * val_size))
    if not 0 < count < num_rows:
        raise DataError(f"val_size {val_size} holds out {count} of {num_rows} rows: it must leave at least one row on both sides")
    held = sorted(np.random.RandomState(seed % 2**32).permutation(num_rows)[:count].tolist())
    inside = set(held)
    return held, [i for i in range(num_rows) if i not in inside]
