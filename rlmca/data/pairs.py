"""Preference pairs: rows with a chosen and a rejected reply become two token rows that go through everything together.

Each side is the whole conversation with its own last reply, rendered, masked and cut exactly as a supervised row is; the
last reply and its end-of-turn marker are the targets. A pair is kept or left out whole.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from rlmca.data.errors import BadRow, DataError, Dropped
from rlmca.data.formats import Conversation, convert_rows
from rlmca.data.info import PAIR_COLUMNS, DatasetEntry
from rlmca.data.loading import nothing_left, read_records, report
from rlmca.data.options import DataOptions, Hub, Log, no_log
from rlmca.data.supervised import Dataset, split_rows
from rlmca.data.template import ChatTemplate, Encoded
from rlmca.types import Batch, batch_of_examples

Sides = tuple[Conversation, Conversation]
"""The conversation with its chosen reply, and with its rejected one."""


class Pair(NamedTuple):
    """Token rows of one pair."""

    chosen: Encoded
    rejected: Encoded


class Pairs(Sequence[Pair]):
    """Pairs of token rows. What was left out is in `dropped`; `truncated` counts the pairs of which a side was cut."""

    def __init__(self, pairs: Sequence[Pair], dropped: Dropped | None = None, truncated: int = 0) -> None:
        self.rows = Dataset([side for pair in pairs for side in pair], dropped, truncated)
        """Rows 2 n and 2 n + 1 are pair n."""

    @property
    def dropped(self) -> Dropped:
        return self.rows.dropped

    @property
    def truncated(self) -> int:
        return self.rows.truncated

    @property
    def fingerprint(self) -> str:
        """Changes with any id, target or border, and is never that of single rows."""
        return f"pairs {self.rows.fingerprint}"

    @property
    def num_tokens(self) -> int:
        return self.rows.num_tokens

    @property
    def num_targets(self) -> int:
        return self.rows.num_targets

    @property
    def lengths(self) -> list[int]:
        """Tokens of the longer side of each pair."""
        own = self.rows.lengths
        return [max(own[at], own[at + 1]) for at in range(0, len(own), 2)]

    def __len__(self) -> int:
        return len(self.rows) // 2

    def __getitem__(self, index):  # type: ignore[no-untyped-def]  # one pair, or a list of them for a slice
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        at = index + len(self) if index < 0 else index
        if not 0 <= at < len(self):
            raise IndexError(f"pair {index} of {len(self)}")
        return Pair(self.rows[2 * at], self.rows[2 * at + 1])

    def __iter__(self) -> Iterator[Pair]:
        return (self[i] for i in range(len(self)))

    def take(self, numbers: Sequence[int]) -> Pairs:
        """The pairs with these numbers, in this order."""
        return Pairs([self[i] for i in numbers])


def batch_of_pairs(pairs: Sequence[Pair]) -> Batch:
    """A `Batch` of two rows a pair, chosen first, with the pair's number in `unit_B`."""
    rows = [side for pair in pairs for side in pair]
    batch = batch_of_examples([row.ids for row in rows], [row.mask for row in rows])
    return batch.replace(unit_B=torch.arange(len(pairs)).repeat_interleave(2))


def read_pairs(
    name: str, options: DataOptions, *, dropped: Dropped, seed: int, hub: Hub | None
) -> tuple[DatasetEntry, list[Sides], Mapping[str, Any]]:
    """(entry, both sides of every readable pair, first raw row) of one data set; other rows go to `dropped`."""
    entry, records, first = read_records(name, options, seed=seed, hub=hub, ranking=True)
    if entry.ranking is None:  # no entry names the columns
        entry = replace(entry, ranking=True, columns={**entry.columns, **{column: column for column in PAIR_COLUMNS}})
    found: list[Sides] = []
    for index, record in records:
        try:
            chosen, rejected = (_side(entry, index, record, column) for column in PAIR_COLUMNS)
            if chosen.reply == rejected.reply:
                raise BadRow("chosen and rejected are equal")
            found.append((chosen, rejected))
        except BadRow as bad:
            dropped.add(name, index, bad.reason)
    return entry, found, first


def _side(entry: DatasetEntry, index: int, raw: Any, side: str) -> Conversation:
    """The row with the reply of one side behind its prompt, read as any conversation is. BadRow when it is none."""
    column = entry.columns[side]
    if isinstance(raw, Mapping) and (column not in raw or raw[column] is None):
        raise BadRow(f"no column {column!r}" if column not in raw else f"column {column!r} is null")
    if entry.formatting == "alpaca":
        entry = replace(entry, columns={**entry.columns, "response": column})
    elif isinstance(raw, Mapping):
        messages = str(entry.columns["messages"])
        turns, reply = _list(raw.get(messages), messages), _list(raw[column], column)
        if len(reply) != 1:
            raise BadRow(f"column {column!r} holds {len(reply)} messages, not one")
        raw = {**raw, messages: [*turns, reply[0]]}
    lost = Dropped()
    if read := convert_rows(entry, [(index, raw)], need_reply=True, dropped=lost):
        return read[0]
    reason = lost.rows[0].reason
    raise BadRow(f"empty {side} reply" if reason == "empty reply" else reason)


def _list(value: Any, column: str | None) -> list[Any]:
    """Messages: a list, one by itself, or either as JSON text (files of tables)."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise BadRow(f"column {column!r} is text, not a message") from None
    if isinstance(value, Mapping):
        return [value]
    if not isinstance(value, list):
        raise BadRow(f"column {column!r} holds no messages")
    return value


def load_pairs(
    options: DataOptions,
    template: ChatTemplate,
    log: Log = no_log,
    *,
    names: Sequence[str] | None = None,
    seed: int = 42,
    hub: Hub | None = None,
) -> Pairs:
    """The pairs of all named data sets (`options.dataset` unless `names` says otherwise), one after the other.

    A side longer than `cutoff_len` keeps its first `cutoff_len` tokens; if that leaves a side without a target, or both
    sides alike, the pair is dropped and counted. DataError when a source cannot be read or nothing of a data set is usable.
    """
    if options.cutoff_len < 2:
        raise DataError(f"cutoff_len must be at least 2, not {options.cutoff_len}")
    everything, pairs, truncated = Dropped(), list[Pair](), 0
    for name in options.dataset if names is None else names:
        dropped = Dropped()
        entry, sides, first = read_pairs(name, options, dropped=dropped, seed=seed, hub=hub)
        encoded = [template.encode([pair[side] for pair in sides], mask_history=True) for side in (0, 1)]
        kept, cut = 0, 0
        for (conversation, _), *both in zip(sides, *encoded, strict=True):
            try:
                pair = Pair(*(_fitting(row, options.cutoff_len) for row in both))
                if pair.chosen.ids == pair.rejected.ids:
                    raise BadRow(f"chosen and rejected are the same tokens (cutoff_len {options.cutoff_len})")
            except BadRow as bad:
                dropped.add(name, conversation.index, bad.reason)
                continue
            cut += any(len(row.ids) > options.cutoff_len for row in both if isinstance(row, Encoded))
            pairs.append(pair)
            kept += 1
        if not kept:
            raise nothing_left(entry, first, dropped)
        log(report(entry, kept, dropped, f" ({cut} cut to {options.cutoff_len} tokens)" if cut else "").replace(" rows", " pairs", 1))
        everything.extend(dropped)
        truncated += cut
    if not pairs:
        raise DataError("no data set is named: set dataset")
    return Pairs(pairs, everything, truncated)


def _fitting(row: Encoded | BadRow, cutoff_len: int) -> Encoded:
    if isinstance(row, BadRow):
        raise row
    if len(row.ids) <= cutoff_len:
        return row
    row = Encoded(row.ids[:cutoff_len], row.mask[:cutoff_len])
    if not any(row.mask):
        raise BadRow(f"no token of a reply within cutoff_len {cutoff_len}")
    return row


def load_train_eval_pairs(
    options: DataOptions, template: ChatTemplate, log: Log = no_log, *, seed: int = 42, hub: Hub | None = None
) -> tuple[Pairs, dict[str, Pairs]]:
    """(training pairs, evaluation sets by name), chosen as `load_train_eval` chooses rows."""
    evals = list(options.eval_dataset)
    if evals and options.val_size:
        raise DataError("val_size and eval_dataset exclude each other: set one of them")
    train = load_pairs(options, template, log, seed=seed, hub=hub)
    if evals and options.eval_on_each_dataset:
        return train, {name: load_pairs(options, template, log, names=[name], seed=seed, hub=hub) for name in evals}
    if evals:
        return train, {"eval": load_pairs(options, template, log, names=evals, seed=seed, hub=hub)}
    if not options.val_size:
        return train, {}
    held, kept = split_rows(len(train), options.val_size, seed)
    rest = train.take(kept)
    rest.rows.dropped, rest.rows.truncated = train.dropped, train.truncated
    return rest, {"eval": train.take(held)}
