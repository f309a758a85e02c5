"""What supervised rows and prompts share: names → entries → raw rows → conversations, with everything dropped counted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from rlmca.data.errors import DataError, Dropped
from rlmca.data.formats import Conversation, convert_rows
from rlmca.data.info import TEXT_COLUMN, DatasetEntry, resolve, with_formatting
from rlmca.data.options import DataOptions, Hub
from rlmca.data.reasoning import make_reasoning
from rlmca.data.sources import read_rows, source_files


def check_sources(options: DataOptions, *, ranking: bool = False) -> list[str]:
    """Every problem of the named data sets that shows without reading a row (names, entries, files); [] when fine.

    `ranking`: preference pairs are wanted.
    """
    errors: list[str] = []
    for name in dict.fromkeys([*options.dataset, *options.eval_dataset]):
        try:
            for entry in resolve([name], options.dataset_dir):
                check_ranking(entry, ranking)
                if entry.path is not None:
                    source_files(entry.path)
                if entry.procedural is not None:
                    make_reasoning(entry.procedural)
        except DataError as error:
            errors += [line for line in str(error).split("\n") if line not in errors]
    return errors


def check_ranking(entry: DatasetEntry, wanted: bool) -> None:
    """Raises DataError for preference pairs where conversations are wanted, and the other way round."""
    if entry.ranking and not wanted:
        raise DataError(
            f"data set {entry.name!r} has ranking: true, and pairs are for stage dpo alone; an entry without it for the same file, with "
            "columns: {response: chosen} where the chosen replies are text, reads them as conversations"
        )
    if wanted and (entry.ranking is False or entry.procedural is not None):
        raise DataError(
            f"data set {entry.name!r} has no pairs, which stage dpo compares: its entry in dataset_info.json needs ranking: true and "
            "columns chosen and rejected"
        )


def read_conversations(
    name: str, options: DataOptions, *, need_reply: bool, dropped: Dropped, seed: int, hub: Hub | None
) -> tuple[DatasetEntry, list[Conversation], Mapping[str, Any]]:
    """(entry, conversations, first raw row) of one data set, after `num_samples` and `max_samples`."""
    entry, rows, first = read_records(name, options, seed=seed, hub=hub)
    return entry, convert_rows(entry, rows, need_reply=need_reply, dropped=dropped), first


def read_records(
    name: str, options: DataOptions, *, seed: int, hub: Hub | None, ranking: bool = False
) -> tuple[DatasetEntry, list[tuple[int, Any]], Mapping[str, Any]]:
    """(entry, (position, record) of every row, first raw row) of one data set, after `num_samples` and `max_samples`.

    DataError when the set holds preference pairs and `ranking` is false, or the other way round.
    """
    entry = resolve([name], options.dataset_dir)[0]
    records = read_rows(entry, hub)
    first = first_object(records)
    entry = seen_entry(entry, first)
    check_ranking(entry, ranking)
    rows = list(enumerate(records))
    if entry.num_samples is not None:
        rows = [rows[i] for i in _sample(len(rows), entry.num_samples, seed)]
    if options.max_samples is not None:
        if options.max_samples < 1:
            raise DataError(f"max_samples must be at least 1, not {options.max_samples}")
        rows = rows[: options.max_samples]
    return entry, rows, first


def nothing_left(entry: DatasetEntry, first: Mapping[str, Any], dropped: Dropped) -> DataError:
    """The error for a data set of which no row is usable: its source, the columns looked for, those found, the reasons."""
    found = f"; the first row has: {', '.join(map(str, first))}" if first else "; no row is an object"
    columns = f" (columns {entry.described_columns()}{found})" if entry.columns else ""
    return DataError(f"no usable row in data set {entry.name!r}, {entry.where}{columns}; dropped: {dropped.describe()}")


def report(entry: DatasetEntry, kept: int, dropped: Dropped, extra: str = "") -> str:
    """One log line for a data set that was read."""
    text = f"{entry.name}: {kept} rows{extra}"
    return f"{text}, {len(dropped)} dropped: {dropped.describe()}" if len(dropped) else text


def first_object(records: Iterable[Any]) -> Mapping[str, Any]:
    """The first record that is an object; {} when there is none."""
    return next((row for row in records if isinstance(row, Mapping)), {})


def seen_entry(entry: DatasetEntry, first: Mapping[str, Any]) -> DatasetEntry:
    """The entry with its format; that of a set given as a path is seen from its first row."""
    if entry.formatting is not None:
        return entry
    if "messages" in first:
        return with_formatting(entry, "openai")
    if "conversations" in first:
        return with_formatting(entry, "sharegpt")
    plain = TEXT_COLUMN in first and "instruction" not in first
    return with_formatting(entry, "alpaca", TEXT_COLUMN if plain else None)


def _sample(have: int, want: int, seed: int) -> Sequence[int]:
    """`want` of `have` row numbers, seeded: all of them as often as they fit, then a random rest, in random order."""
    random = np.random.RandomState(seed % 2**32)
    numbers = [random.permutation(have) for _ in range(-(-want // have))]
    return np.concatenate(numbers)[:want].tolist()
