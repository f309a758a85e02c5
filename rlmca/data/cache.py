"""Tokenised rows on disk: made once, read by every process through memory maps, never taken for other ones.

A cache is a folder: `cache.json` with its key and, for each set, three NumPy arrays. It is written under another name
and renamed, so a folder of that name is always whole: a process that is killed leaves a `…partial-…` folder that nobody
reads, and of two that write at once one is first and the other takes what is there. The key names everything the
tokens depend on; a cache with another key is refused.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

import rlmca
from rlmca.data.encoders import Encoder
from rlmca.data.errors import DataError, Dropped, DroppedRow
from rlmca.data.info import DatasetEntry, resolve
from rlmca.data.options import DataOptions
from rlmca.data.sources import source_files
from rlmca.data.supervised import Dataset

FILE = "cache.json"
FORMAT = 1
TrainEval = tuple[Dataset, dict[str, Dataset]]


def cache_key(options: DataOptions, encoder: Encoder, seed: int) -> dict[str, str]:
    """What the tokens depend on, by name; long values as digests. Reads every source file once."""
    names = dict.fromkeys([*options.dataset, *options.eval_dataset])
    entries = [resolve([name], options.dataset_dir)[0] for name in names]
    key: dict[str, Any] = {
        **encoder.signature(),
        "dataset": list(options.dataset),
        "eval_dataset": list(options.eval_dataset),
        "eval_on_each_dataset": options.eval_on_each_dataset,
        "max_samples": options.max_samples,
        "val_size": options.val_size,
        "mix_strategy": options.mix_strategy,
        "interleave_probs": list(options.interleave_probs),
        "dataset_info.json": [_described(entry) for entry in entries],
        "data files": [_digest(entry) for entry in entries],
        "version of rlmca": rlmca.__version__,
    }
    draws = options.val_size or options.mix_strategy != "concat" or any(entry.num_samples for entry in entries)
    key["seed"] = seed if draws else None
    return {name: _short(value) for name, value in key.items()}


def load_or_make(path: Path, key: Mapping[str, str], make: Callable[[], TrainEval], *, overwrite: bool = False) -> tuple[TrainEval, bool]:
    """(the rows, whether they were made here): from the cache at `path`, or made and written there.

    DataError for a folder that is no cache, or one of other rows: it names what differs.
    """
    if not overwrite and path.exists():
        return read_cache(path, key), False
    if overwrite and path.exists() and not (path / FILE).is_file():
        raise DataError(f"tokenized_path: {path} is no cache of tokenised rows, and overwrite_cache deletes none but those")
    made = make()
    partial = path.with_name(f"{path.name}.partial-{uuid.uuid4().hex[:8]}")
    try:
        _write(partial, key, made)
        rows = read_cache(partial)  # its maps stay valid whatever becomes of the name
        if overwrite and path.exists():
            old = path.with_name(f"{partial.name}-old")  # a name of its own: one that was left by a killed run is in nobody's way
            with contextlib.suppress(FileNotFoundError):  # another process that overwrites was first
                path.rename(old)
                shutil.rmtree(old)
        try:
            partial.rename(path)
        except OSError:
            if not (path / FILE).is_file():
                raise
            return read_cache(path, key), False  # another process was first
    except OSError as error:
        raise DataError(f"tokenized_path: {path} cannot be written: {error}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return rows, True


def read_cache(path: Path, key: Mapping[str, str] | None = None) -> TrainEval:
    """The rows of a cache, memory-mapped; with a `key` only when it was written under the same one."""
    try:
        state = json.loads((path / FILE).read_text(encoding="utf-8"))
        written = dict(state["key"])
    except (OSError, ValueError, KeyError, TypeError):
        raise DataError(f"tokenized_path: {path} holds no tokenised rows of rlmca; name a folder that is not there yet") from None
    if key is not None and (written != dict(key) or state.get("format") != FORMAT):
        other = [name for name in {**key, **written} if key.get(name) != written.get(name)] or ["format"]
        raise DataError(
            f"tokenized_path: {path} was made with another {', another '.join(other)}: "
            "name another folder, or write overwrite_cache: true to make it anew"
        )
    try:
        sets = {name: _read_set(path / part["folder"], part) for name, part in state["sets"].items()}
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"tokenized_path: {path} is damaged ({error}); write overwrite_cache: true to make it anew") from None
    return sets.pop("train"), {name.removeprefix("eval:"): rows for name, rows in sets.items()}


def _write(folder: Path, key: Mapping[str, str], made: TrainEval) -> None:
    train, evals = made
    folder.mkdir(parents=True)
    parts = {}
    for place, (name, rows) in enumerate({"train": train, **{f"eval:{name}": rows for name, rows in evals.items()}}.items()):
        (folder / str(place)).mkdir()
        for what, values in rows.arrays.items():
            with (folder / str(place) / f"{what}.npy").open("wb") as file:
                np.save(file, values)
                file.flush()
                os.fsync(file.fileno())
        dropped = [[row.dataset, row.index, row.reason] for row in rows.dropped]
        parts[name] = {"folder": str(place), "rows": len(rows), "truncated": rows.truncated, "dropped": dropped}
    (folder / FILE).write_text(json.dumps({"format": FORMAT, "key": dict(key), "sets": parts}), encoding="utf-8")


def _read_set(folder: Path, part: Mapping[str, Any]) -> Dataset:
    starts, ids, mask = (np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in ("starts", "ids", "mask"))
    if len(starts) != part["rows"] + 1 or len(ids) != len(mask) or len(ids) != int(starts[-1]):
        raise ValueError(f"{folder} has not the rows that {FILE} promises")
    dropped = Dropped([DroppedRow(*row) for row in part["dropped"]])
    return Dataset.from_arrays(starts, ids, mask, dropped, part["truncated"])


def _described(entry: DatasetEntry) -> dict[str, Any]:
    return {
        "name": entry.name,
        "hub": entry.hub,
        "subset": entry.subset,
        "split": entry.split,
        "folder": entry.folder,
        "num_samples": entry.num_samples,
        "formatting": entry.formatting,
        "columns": dict(entry.columns),
        "tags": dict(entry.tags),
    }


def _digest(entry: DatasetEntry) -> str:
    """Of the bytes of all files; a set of the hub is known by its name alone."""
    digest = xxhash.xxh3_128()
    for file in source_files(entry.path) if entry.path is not None else []:
        digest.update(file.name.encode())
        with file.open("rb") as opened:
            while block := opened.read(1 << 24):
                digest.update(block)
    return digest.hexdigest()


def _short(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=False)
    return text if len(text) <= 80 else hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
