"""Tokenised rows on disk: the same rows again, never those of other data, never half of them."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlmca.data import ChatTemplate, DataError, load_train_eval
from rlmca.data.cache import TrainEval, cache_key, load_or_make
from rlmca.data.encoders import ConversationEncoder, Encoder
from rlmca.data.texts import TextEncoder
from tests.helpers.datafiles import Options, write_set
from tests.helpers.tokenizers import THINKING, tiny_tokenizer

ROWS = [{"instruction": f"{i} + 1", "output": str(i + 1)} for i in range(20)]


def encoder_of(options: Options, **template: Any) -> ConversationEncoder:
    source = template.pop("source", None)
    tokenizer = tiny_tokenizer(source) if source else tiny_tokenizer()
    return ConversationEncoder(options, ChatTemplate(tokenizer, **template))


def make(options: Options, encoder: ConversationEncoder, seed: int = 1) -> TrainEval:
    return load_train_eval(options, encoder.template, seed=seed)


@pytest.fixture
def options(tmp_path: Path) -> Options:
    rows: list[Any] = [*ROWS, {"instruction": "bad", "output": ""}]
    return dataclasses.replace(write_set(tmp_path, rows), val_size=4)


def test_a_cache_gives_the_same_rows_without_making_them_again(options: Options, tmp_path: Path) -> None:
    encoder = encoder_of(options)
    fresh = make(options, encoder)
    key = cache_key(options, encoder, 1)
    written = load_or_make(tmp_path / "cache", key, lambda: make(options, encoder))
    assert written[1]

    def never() -> TrainEval:
        raise AssertionError("rows were made again")

    read = load_or_make(tmp_path / "cache", cache_key(options, encoder_of(options), 1), never)
    assert not read[1]
    for found in (written[0], read[0]):
        assert found[0].fingerprint == fresh[0].fingerprint and found[1]["eval"].fingerprint == fresh[1]["eval"].fingerprint
        assert [row.reason for row in found[0].dropped] == ["empty reply"] and list(found[0]) == list(fresh[0])
        assert all(isinstance(values, np.memmap) for values in found[0].arrays.values())
    assert [p.name for p in tmp_path.iterdir() if "partial" in p.name] == []


def test_every_change_that_could_change_tokens_is_refused_by_name(options: Options, tmp_path: Path) -> None:
    path = tmp_path / "cache"
    load_or_make(path, cache_key(options, encoder_of(options), 1), lambda: make(options, encoder_of(options)))
    longer = tiny_tokenizer()
    longer.add_tokens(["zzz"])
    changes: list[tuple[str, Options, Encoder]] = [
        ("tokenizer", options, ConversationEncoder(options, ChatTemplate(longer))),
        ("template", options, encoder_of(options, source=THINKING)),
        ("enable_thinking", options, encoder_of(options, enable_thinking=False)),
        ("default_system", options, encoder_of(options, default_system="be brief")),
        ("kind", options, TextEncoder(options, tiny_tokenizer())),
    ]
    for name, value in (
        ("cutoff_len", 64), ("train_on_prompt", True), ("mask_history", True), ("max_samples", 5), ("val_size", 3.0),
    ):  # fmt: skip
        other = dataclasses.replace(options, **{name: value})
        changes.append((name, other, encoder_of(other)))
    for name, other, encoder in changes:
        with pytest.raises(DataError, match=f"was made with another .*{name}"):
            load_or_make(path, cache_key(other, encoder, 1), lambda: make(options, encoder_of(options)))
    with pytest.raises(DataError, match="another seed"):
        load_or_make(path, cache_key(options, encoder_of(options), 2), lambda: make(options, encoder_of(options)))
    with (tmp_path / "toy.jsonl").open("a") as file:
        file.write('{"instruction": "more", "output": "rows"}\n')
    with pytest.raises(DataError, match="another data files.*overwrite_cache: true"):
        load_or_make(path, cache_key(options, encoder_of(options), 1), lambda: make(options, encoder_of(options)))
    key = cache_key(options, encoder_of(options), 1)
    renewed, made = load_or_make(path, key, lambda: make(options, encoder_of(options)), overwrite=True)
    assert made and len(renewed[0]) == 17 and not load_or_make(path, key, lambda: make(options, encoder_of(options)))[1]


def test_other_folders_are_neither_read_nor_deleted(options: Options, tmp_path: Path) -> None:
    path = tmp_path / "mine"
    path.mkdir()
    (path / "thesis.txt").write_text("years of work")
    key = cache_key(options, encoder_of(options), 1)
    for overwrite in (False, True):
        with pytest.raises(DataError, match="no cache of tokenised rows|holds no tokenised rows"):
            load_or_make(path, key, lambda: make(options, encoder_of(options)), overwrite=overwrite)
    assert (path / "thesis.txt").exists()
    load_or_make(tmp_path / "cache", key, lambda: make(options, encoder_of(options)))
    ids = tmp_path / "cache" / "0" / "ids.npy"
    ids.write_bytes(ids.read_bytes()[:200])
    with pytest.raises(DataError, match="is damaged"):
        load_or_make(tmp_path / "cache", key, lambda: make(options, encoder_of(options)))


def write_and(folder: str, options: Options, fate: str, gate: Any) -> None:
    """One process that writes the cache: at the same time as another, or killed before its folder has its name."""
    encoder = encoder_of(options)
    if fate == "killed":
        Path.rename = lambda self, target: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign,assignment,return-value]

    def both() -> TrainEval:
        made = make(options, encoder)
        gate.wait(60)
        return made

    load_or_make(Path(folder) / "cache", cache_key(options, encoder, 1), both)


@pytest.mark.serial
def test_a_killed_writer_leaves_no_cache_and_two_at_once_leave_one(options: Options, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")

    def run(*fates: str) -> list[int | None]:
        gate = context.Barrier(len(fates))
        processes = [context.Process(target=write_and, args=(str(tmp_path), options, fate, gate)) for fate in fates]
        for process in processes:
            process.start()
        for process in processes:
            process.join(120)
        return [process.exitcode for process in processes]

    assert run("killed") == [-signal.SIGKILL]
    assert not (tmp_path / "cache").exists() and list(tmp_path.glob("cache.partial-*"))
    assert run("whole", "whole") == [0, 0]
    encoder = encoder_of(options)
    (train, _), made = load_or_make(tmp_path / "cache", cache_key(options, encoder, 1), lambda: make(options, encoder))
    assert not made and train.fingerprint == make(options, encoder)[0].fingerprint
    assert len(list(tmp_path.glob("cache.partial-*"))) == 1, "the two that were not killed left none"


def test_a_cache_is_made_anew_beside_what_a_killed_writer_left(options: Options, tmp_path: Path) -> None:
    key = cache_key(options, encoder_of(options), 1)
    for name in ("cache.old", "cache"):
        load_or_make(tmp_path / name, key, lambda: make(options, encoder_of(options)))
    made = load_or_make(tmp_path / "cache", key, lambda: make(options, encoder_of(options)), overwrite=True)
    assert made[1] and (tmp_path / "cache.old").is_dir(), "a folder of a common name is nobody's to write to"
