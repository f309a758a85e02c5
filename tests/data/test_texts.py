"""Stage pt's rows: every token of a text but its first is a target exactly once."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import normalizers, processors

from rlmca.data import ChatTemplate, DataError, Dataset, load_train_eval
from rlmca.data.encoders import Encoder
from rlmca.data.supervised import load_rows
from rlmca.data.texts import TextEncoder
from tests.helpers.datafiles import Options, write_set
from tests.helpers.tokenizers import tiny_tokenizer

COLUMNS = {"prompt": "text"}


def load(options: Options, tokenizer: Any = None, template: str | None = None) -> Dataset:
    return load_rows(options, TextEncoder(options, tokenizer or tiny_tokenizer(), template))


def joined(rows: list[Any]) -> list[int]:
    """The text again, from pieces that begin with the last token of the one before."""
    ids = list(rows[0].ids)
    for row in rows[1:]:
        assert row.ids[0] == ids[-1]
        ids += row.ids[1:]
    return ids


@pytest.mark.parametrize("cutoff_len", [2, 5, 7, 11, 12, 1000])
def test_a_long_text_is_cut_into_rows_and_loses_nothing(tmp_path: Path, cutoff_len: int) -> None:
    tokenizer = tiny_tokenizer()
    text = "What is 3 + 4 = ? please"
    options = dataclasses.replace(write_set(tmp_path, [{"text": text}], columns=COLUMNS), cutoff_len=cutoff_len)
    rows = load(options, tokenizer)
    whole = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    assert joined(list(rows)) == whole and rows.num_targets == len(whole) - 1
    assert all(2 <= len(row.ids) <= cutoff_len and row.mask == [False] + [True] * (len(row.ids) - 1) for row in rows)
    assert not rows.dropped and rows.truncated == 0


def test_lines_of_a_text_file_are_texts_and_empty_ones_are_counted(tmp_path: Path) -> None:
    options = write_set(tmp_path, b"\xef\xbb\xbfone\r\n\ntwo \xe2\x80\xa8 three\n\xff\n  four", file="toy.txt")
    rows = load(options)
    decode = tiny_tokenizer().decode
    assert [decode(row.ids[:-1]) for row in rows] == ["one", "two \u2028 three", "  four"]
    assert [(row.index, row.reason) for row in rows.dropped] == [(1, "empty text"), (3, "not UTF-8")]
    by_path = load(dataclasses.replace(options, dataset=[str(tmp_path / "toy.txt")]))
    assert by_path.fingerprint == rows.fingerprint


def test_bad_texts_are_dropped_with_the_reason_and_none_left_is_an_error(tmp_path: Path) -> None:
    records = [{"text": "a"}, {"text": None}, {"text": 3}, {"other": "a"}, ["a"], {"text": " \n"}, {"text": "\ud800"}]
    options = write_set(tmp_path, b"\n".join(json.dumps(r).encode() for r in records), columns=COLUMNS)
    rows = load(options)
    assert len(rows) == 1 and [row.reason for row in rows.dropped] == [
        "column 'text' is null, not text",
        "column 'text' is a int, not text",
        "no column 'text'",
        "the row is a list, not an object",
        "empty text",
        "not valid Unicode",
    ]
    with pytest.raises(DataError, match="prompt=instruction.*the first row has: text"):
        load(write_set(tmp_path, [{"text": "a"}], name="wrong", file="wrong.jsonl"))
    chats = write_set(tmp_path, [{"messages": []}], name="chats", file="chats.jsonl", formatting="openai")
    with pytest.raises(DataError, match="formatting openai: stage pt reads texts"):
        load(chats)


def test_beginning_and_end_are_the_tokenizers_own(tmp_path: Path) -> None:
    options = write_set(tmp_path, [{"text": "one"}], columns=COLUMNS)
    tokenizer = tiny_tokenizer()
    tokenizer.bos_token = "<|endoftext|>"
    plain = load(options, tokenizer)[0].ids
    start = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", start)]
    )
    assert load(options, tokenizer)[0].ids == [start, *plain], "one bos where the tokenizer puts one, none where it does not"
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|end_of_text|>"]})
    assert load(options, tokenizer, "llama3")[0].ids[-1] == tokenizer.convert_tokens_to_ids("<|end_of_text|>") != plain[-1]


def test_texts_are_held_out_as_rows(tmp_path: Path) -> None:
    options = dataclasses.replace(write_set(tmp_path, [{"text": str(i)} for i in range(10)], columns=COLUMNS), val_size=3)
    tokenizer = tiny_tokenizer()
    encoder: Encoder = TextEncoder(options, tokenizer)
    train, evals = load_train_eval(options, ChatTemplate(tokenizer), encoder=encoder)
    assert (len(train), len(evals["eval"])) == (7, 3)


def test_a_text_of_which_the_tokenizer_leaves_nothing_is_dropped_and_counted(tmp_path: Path) -> None:
    """Its end alone would be a row without a target."""
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace("\u200b", "")
    rows = load(write_set(tmp_path, [{"text": "\u200b"}, {"text": "one"}], columns=COLUMNS), tokenizer)
    assert len(rows) == 1 and all(any(row.mask) for row in rows)
    assert [(row.index, row.reason) for row in rows.dropped] == [(0, "no token in the text")]
