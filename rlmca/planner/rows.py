"""How many rows the data sets of a run have, without tokenising them."""

from __future__ import annotations

import math

from rlmca.config import RunConfig
from rlmca.data import Dropped
from rlmca.data.errors import BadRow
from rlmca.data.info import resolve
from rlmca.data.loading import nothing_left, read_conversations, read_records
from rlmca.data.pairs import read_pairs
from rlmca.data.sources import source_files
from rlmca.data.texts import read_texts

LARGE_FILE_BYTES = 64 << 20


def count_rows(cfg: RunConfig, *, read_large: bool = False) -> dict[str, int | None]:
    """Readable rows of every training set (stage pt: texts); None for sets on the hub, streamed ones and, without `read_large`,
    for files above 64 MiB.

    Rows that only the tokenizer can judge (no target left after truncation, prompt too long) are counted here and may be dropped later.
    DataError, with the columns and the reasons, for a set of which no row is readable.
    """
    counts: dict[str, int | None] = {}
    for name in cfg.data.dataset:
        entry = resolve([name], cfg.data.dataset_dir)[0]
        size = sum(file.stat().st_size for file in source_files(entry.path)) if entry.path is not None else 0
        if entry.hub is not None or cfg.data.streaming or (size > LARGE_FILE_BYTES and not read_large):
            counts[name] = None
            continue
        dropped = Dropped()
        if cfg.stage == "pt":
            counts[name] = _count_texts(cfg, name, dropped)
            continue
        seed = cfg.train.seed
        if cfg.stage == "dpo":
            entry, pairs, first = read_pairs(name, cfg.data, dropped=dropped, seed=seed, hub=None)
            counts[name] = len(pairs)
        else:
            need_reply = cfg.stage == "sft"
            entry, conversations, first = read_conversations(name, cfg.data, need_reply=need_reply, dropped=dropped, seed=seed, hub=None)
            counts[name] = len(conversations)
        if not counts[name]:
            raise nothing_left(entry, first, dropped)
    return counts


def _count_texts(cfg: RunConfig, name: str, dropped: Dropped) -> int:
    entry, records, first = read_records(name, cfg.data, seed=cfg.train.seed, hub=None)
    for (index, _), text in zip(records, read_texts(entry, records), strict=True):
        if isinstance(text, BadRow):
            dropped.add(name, index, text.reason)
    if len(dropped) == len(records):
        raise nothing_left(entry, first, dropped)
    return len(records) - len(dropped)


def training_rows(cfg: RunConfig, counts: dict[str, int | None]) -> int | None:
    """Rows left for training after `val_size`; None when a set was not counted, or its rows do not say it."""
    if cfg.stage == "pt" or (cfg.data.mix_strategy != "concat" and len(counts) > 1):
        return None  # tokens decide how many rows a text has, the mixture how often a row comes
    known = [count for count in counts.values() if count is not None]
    if len(known) < len(counts):
        return None
    rows, held = sum(known), cfg.data.val_size
    return rows - (int(held) if held >= 1 else math.ceil(rows * held))
