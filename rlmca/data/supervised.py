"""Supervised rows: token ids and targets, kept in three flat arrays."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import numpy as np

from rlmca.data.errors import BadRow, DataError, Dropped
from rlmca.data.loading import nothing_left, read_conversations, report
from rlmca.data.options import DataOptions, Hub, Log, no_log
from rlmca.data.template import ChatTemplate, Encoded


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
        for array in (self._starts, self._ids, self._mask):
            digest.update(np.ascontiguousarray(array).tobytes())
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
        return Dataset([self[i] for i in rows])


def load_supervised(
    options: DataOptions,
    template: ChatTemplate,
    log: Log = no_log,
    *,
    names: Sequence[str] | None = None,
    seed: int = 42,
    hub: Hub | None = None,
) -> Dataset:
    """The rows of all named data sets (`options.dataset` unless `names` says otherwise), one after the other.

    A row longer than `cutoff_len` keeps its first `cutoff_len` tokens exactly; if no target is among them it is
    dropped and counted. DataError when a source cannot be read or nothing of a data set is usable.
    """
    if options.train_on_prompt and options.mask_history:
        raise DataError("train_on_prompt and mask_history exclude each other: set one of them")
    if options.cutoff_len < 2:
        raise DataError(f"cutoff_len must be at least 2, not {options.cutoff_len}")
    rows: list[Encoded] = []
    everything = Dropped()
    truncated = 0
    for name in options.dataset if names is None else names:
        dropped = Dropped()
        entry, conversations, first = read_conversations(name, options, need_reply=True, dropped=dropped, seed=seed, hub=hub)
        encoded = template.encode(conversations, train_on_prompt=options.train_on_prompt, mask_history=options.mask_history)
        kept, cut = 0, 0
        for conversation, row in zip(conversations, encoded, strict=True):
            if isinstance(row, BadRow):
                dropped.add(name, conversation.index, row.reason)
                continue
            if len(row.ids) > options.cutoff_len:
                row = Encoded(row.ids[: options.cutoff_len], row.mask[: options.cutoff_len])
                if not any(row.mask):
                    dropped.add(name, conversation.index, f"no token of the reply within cutoff_len {options.cutoff_len}")
                    continue
                cut += 1
            rows.append(row)
            kept += 1
        if not kept:
            raise nothing_left(entry, first, dropped)
        log(report(entry, kept, dropped, f" ({cut} cut to {options.cutoff_len} tokens)" if cut else ""))
        everything.extend(dropped)
        truncated += cut
    if not rows:
        raise DataError("no data set is named: set dataset")
    return Dataset(rows, everything, truncated)


def load_train_eval(
    options: DataOptions, template: ChatTemplate, log: Log = no_log, *, seed: int = 42, hub: Hub | None = None
) -> tuple[Dataset, dict[str, Dataset]]:
    """(training rows, evaluation sets by name).

    Evaluation rows are those of `eval_dataset` (one set, or one for each name with `eval_on_each_dataset`), or else
    `val_size` rows of the training data, drawn by `seed`: a count from 1 upwards, a share below 1. {} without either.
    """
    evals = list(options.eval_dataset)
    if evals and options.val_size:
        raise DataError("val_size and eval_dataset exclude each other: set one of them")
    train = load_supervised(options, template, log, seed=seed, hub=hub)
    if evals and options.eval_on_each_dataset:
        return train, {name: load_supervised(options, template, log, names=[name], seed=seed, hub=hub) for name in evals}
    if evals:
        return train, {"eval": load_supervised(options, template, log, names=evals, seed=seed, hub=hub)}
    if not options.val_size:
        return train, {}
    held, kept = split_rows(len(train), options.val_size, seed)
    rest = train.take(kept)
    rest.dropped, rest.truncated = train.dropped, train.truncated
    return rest, {"eval": train.take(held)}


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
