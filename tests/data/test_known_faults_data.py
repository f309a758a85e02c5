"""Known faults of comparable systems in data and templates, kind by kind."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from rlmca.data import ChatTemplate, DataError, Dataset, Encoded, ShuffledOrder, load_supervised, stop_ids
from rlmca.data.info import resolve
from rlmca.data.sources import read_rows
from rlmca.types import batch_of_examples
from tests.helpers.datafiles import write_set
from tests.helpers.tokenizers import STRICT, tiny_tokenizer

UNICODE = "one\u2028two\u0085three \u2029 \x0b\x0c\x1c\x1d\x1e 🙂 \u00e9 e\u0301"


def trained(dataset: Dataset, row: int) -> list[int]:
    ids, mask = dataset[row]
    return [i for i, m in zip(ids, mask, strict=True) if m]


# C1: rows dropped silently, a JSON line cut in two at a Unicode line separator


def c1_rows(good: str) -> list[bytes]:
    rows = [
        {"instruction": "a", "output": "b"},
        {"instruction": "a", "output": ""},
        {"instruction": "a", "output": None},
        {"instruction": "a"},
        {"instruction": "a", "output": {"text": "b"}},
        {"instruction": "a", "output": "b", "history": [["alone"]]},
        {"instruction": good, "output": good},
    ]
    return [json.dumps(row, ensure_ascii=False).encode() for row in rows]


@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"], ids=["", "bom"])
def test_c1_seven_rows_two_kept_five_dropped_with_reasons(tmp_path: Path, newline: bytes, bom: bytes) -> None:
    options = write_set(
        tmp_path,
        bom + newline.join(c1_rows(UNICODE)) + newline,
        columns={"prompt": "instruction", "response": "output", "history": "history"},
    )
    raw = read_rows(resolve(["toy"], tmp_path)[0])
    assert len(raw) == 7
    assert raw[6]["output"] == UNICODE
    said: list[str] = []
    template = ChatTemplate(tiny_tokenizer())
    dataset = load_supervised(options, template, said.append)
    assert len(dataset) == 2
    assert [(row.index, row.reason) for row in dataset.dropped] == [
        (1, "empty reply"),
        (2, "column 'output' is null"),
        (3, "no column 'output'"),
        (4, "column 'output' is a dict, not text"),
        (5, "column 'history' holds something that is not a pair of turns"),
    ]
    assert sum(dataset.dropped.counts().values()) == 5
    assert "2 rows" in said[0] and "5 dropped" in said[0] and "empty reply (row 1)" in said[0]
    assert template.tokenizer.decode(trained(dataset, 1)) == UNICODE + "<|im_end|>"


BAD_ROWS = [
    b"null",
    b"[]",
    b"3",
    b'"text"',
    b'{"instruction": "a", "output',
    b'{"instruction": "a", "output": "\xe2\x82"}',
    b'{"instruction": "\\ud800", "output": "b"}',
    b'{"instruction": 3, "output": "b"}',
    b'{"output": "b"}',
    b'{"instruction": "  ", "output": "b"}',
    b'{"instruction": "a", "output": " \\n"}',
    b"[" * 100000,
]


@pytest.mark.parametrize("row", BAD_ROWS, ids=range(len(BAD_ROWS)))
def test_c1_every_kind_of_bad_row_is_dropped_alone(tmp_path: Path, row: bytes) -> None:
    good = b'{"instruction": "a", "output": "b"}'
    options = write_set(tmp_path, b"\n".join([good, row, b"", good]))
    dataset = load_supervised(options, ChatTemplate(tiny_tokenizer()))
    assert len(dataset) == 2 and [r.index for r in dataset.dropped] == [1]


def test_c1_odd_turns_of_a_conversation(tmp_path: Path) -> None:
    turn = lambda who, text: {"from": who, "value": text}  # noqa: E731
    rows = [
        {"conversations": [turn("human", "a"), turn("gpt", "b"), turn("human", "c")]},
        {"conversations": [turn("human", "a"), turn("gpt", "b")]},
    ]
    dataset = load_supervised(write_set(tmp_path, rows, formatting="sharegpt"), ChatTemplate(tiny_tokenizer()))
    assert len(dataset) == 1
    assert [(r.index, r.reason) for r in dataset.dropped] == [(0, "the last turn has no reply (odd number of turns)")]


def test_c1_nothing_left_names_file_and_columns(tmp_path: Path) -> None:
    options = write_set(tmp_path, [{"question": "a", "answer": "b"}, {"question": "c", "answer": "d"}])
    with pytest.raises(DataError) as error:
        load_supervised(options, ChatTemplate(tiny_tokenizer()))
    text = str(error.value)
    assert str(tmp_path / "toy.jsonl") in text and "prompt=instruction" in text and "response=output" in text
    assert "the first row has: question, answer" in text and "2 × no column 'instruction' (row 0, 1)" in text


# C2: template errors, repeated system prompts, end tokens of old turns

C2 = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "3+4"}, {"role": "assistant", "content": "7"},
      {"role": "user", "content": "and 1"}, {"role": "assistant", "content": "8"}]  # fmt: skip


@pytest.mark.parametrize("system", [True, False])
@pytest.mark.parametrize("mask_history", [False, True])
def test_c2_conversation_is_rendered_whole(tmp_path: Path, mask_history: bool, system: bool) -> None:
    messages = C2 if system else C2[1:]
    tokenizer = tiny_tokenizer(STRICT)
    options = dataclasses.replace(write_set(tmp_path, [{"messages": messages}], formatting="openai"), mask_history=mask_history)
    dataset = load_supervised(options, ChatTemplate(tokenizer))
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    assert dataset[0].ids == tokenizer(whole, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(dataset[0].ids).count("<|im_start|>system") == 1
    assert tokenizer.decode(trained(dataset, 0)) == ("8<|im_end|>" if mask_history else "7<|im_end|>8<|im_end|>")


# C3: the mask shifted twice: the last prompt token trained, the end token not


def test_c3_targets_are_the_reply_and_its_end_token() -> None:
    dataset = Dataset([Encoded([11, 12, 13, 21, 22, 2], [False] * 3 + [True] * 3)])
    ids, mask = dataset[0]
    batch = batch_of_examples([ids], [mask])
    assert batch.ids_BT[batch.mask_BT].tolist() == [21, 22, 2] and int(batch.mask_BT.sum()) == 3


def test_c3_label_of_the_last_prompt_token_does_not_count(tmp_path: Path) -> None:
    dataset = load_supervised(write_set(tmp_path, [{"instruction": "3+4", "output": "7"}]), ChatTemplate(tiny_tokenizer()))
    ids, mask = dataset[0]
    assert trained(dataset, 0) == dataset[0].ids[-3:-1]  # the digit and <|im_end|>; the line feed behind it is not trained
    batch = batch_of_examples([ids], [mask])
    logp_TV = torch.log_softmax(torch.randn(len(ids), 500, generator=torch.Generator().manual_seed(0)), -1)

    def loss(labels: list[int]) -> float:
        return -sum(float(logp_TV[t - 1, label]) for t, label in enumerate(labels) if batch.mask_BT[0, t])

    first = mask.index(True)
    for at in range(len(ids)):
        changed = [*ids[:at], (ids[at] + 1) % 400, *ids[at + 1 :]]
        assert (loss(changed) == loss(ids)) == (not mask[at])
    assert not mask[first - 1]


# R1: the pad token is the eos token, and masking pads loses the stop token


def test_r1_pad_is_eos_and_the_stop_token_stays_a_target(tmp_path: Path) -> None:
    batch = batch_of_examples([[5, 6, 2], [5, 6, 7, 8, 2]], [[False, True, True], [False, True, True, True, True]])
    assert batch.ids_BT[0][batch.mask_BT[0]].tolist() == [6, 2]
    assert batch.length_B.tolist() == [3, 5]
    tokenizer = tiny_tokenizer(pad_token="<|im_end|>")
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    dataset = load_supervised(write_set(tmp_path, [{"instruction": "3+4", "output": "7"}]), ChatTemplate(tokenizer))
    assert trained(dataset, 0) == [*tokenizer("7", add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    assert stop_ids(tokenizer) == (tokenizer.eos_token_id,)


# H5: data repeated or skipped after a resume


def test_h5_resume_continues_and_every_row_is_read_once_an_epoch() -> None:
    whole = ShuffledOrder(10, 2, seed=3, fingerprint="a")
    batches = [whole.next() for _ in range(10)]
    rows = [row for _, batch in batches for row in batch]
    assert sorted(rows[:10]) == sorted(rows[10:]) == list(range(10)) and rows[:10] != rows[10:]
    assert [epoch for epoch, _ in batches] == [0] * 5 + [1] * 5

    stopped = ShuffledOrder(10, 2, seed=3, fingerprint="a")
    for _ in range(3):
        stopped.next()
    state = json.loads(json.dumps(stopped.state_dict()))
    resumed = ShuffledOrder(10, 2, seed=3, fingerprint="a")
    assert resumed.load_state_dict(state)
    assert [resumed.next() for _ in range(7)] == batches[3:]


@pytest.mark.parametrize(("num_rows", "fingerprint"), [(10, "b"), (4, "b"), (4, "a")])
def test_h5_resume_on_other_data_starts_at_zero_with_a_warning(num_rows: int, fingerprint: str) -> None:
    stopped = ShuffledOrder(10, 2, seed=3, fingerprint="a")
    for _ in range(3):
        stopped.next()
    other = ShuffledOrder(num_rows, 2, seed=3, fingerprint=fingerprint)
    with pytest.warns(UserWarning, match="starts at 0"):
        assert not other.load_state_dict(stopped.state_dict())
    fresh = ShuffledOrder(num_rows, 2, seed=3, fingerprint=fingerprint)
    assert [other.next() for _ in range(12)] == [fresh.next() for _ in range(12)]


def test_h5_unshuffled_rows_seven_to_ten_follow() -> None:
    order = ShuffledOrder(10, 2, seed=0, shuffle=False)
    for _ in range(3):
        order.next()
    resumed = ShuffledOrder(10, 4, seed=0, shuffle=False)
    assert resumed.load_state_dict(order.state_dict())
    assert resumed.next() == (0, [6, 7, 8, 9])
    assert np.isclose(resumed.epochs, 1.0)
