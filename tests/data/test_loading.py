"""Supervised sets, prompts and the order of rows."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from rlmca.data import ChatTemplate, DataError, ShuffledOrder, load_prompts, load_supervised, load_tokenizer, load_train_eval
from rlmca.data.supervised import split_rows
from tests.helpers.datafiles import write_set
from tests.helpers.tokenizers import tiny_tokenizer

ROWS = [{"instruction": f"{i} + 1", "output": str(i + 1)} for i in range(20)]


@pytest.fixture(scope="module")
def template() -> ChatTemplate:
    return ChatTemplate(tiny_tokenizer())


def test_truncation_is_exact_to_the_token(tmp_path: Path, template: ChatTemplate) -> None:
    options = write_set(tmp_path, [{"instruction": "q", "output": "7" * 50}, {"instruction": "9" * 200, "output": "1"}, ROWS[0]])
    whole = load_supervised(options, template)
    cut = load_supervised(dataclasses.replace(options, cutoff_len=40), template)
    assert (whole.truncated, cut.truncated, len(cut)) == (0, 1, 2)
    assert cut[0].ids == whole[0].ids[:40] and cut[0].mask == whole[0].mask[:40]
    assert cut[1] == whole[2]
    assert [(row.index, row.reason) for row in cut.dropped] == [(1, "no token of the reply within cutoff_len 40")]
    exact = load_supervised(dataclasses.replace(options, cutoff_len=len(whole[0].ids)), template)
    assert exact[0] == whole[0]


def test_several_sets_samples_and_limits(tmp_path: Path, template: ChatTemplate) -> None:
    write_set(tmp_path, ROWS, name="a", file="a.jsonl", num_samples=30)
    options = write_set(tmp_path, ROWS[:3], name="b", file="b.jsonl")
    both = dataclasses.replace(options, dataset=["a", "b"])
    assert len(load_supervised(both, template)) == 33
    first, again, other = (load_supervised(both, template, names=["a"], seed=seed) for seed in (1, 1, 2))
    assert first.fingerprint == again.fingerprint != other.fingerprint
    plain = {tuple(row.ids) for row in load_supervised(dataclasses.replace(options, dataset=["b"]), template)}
    assert {tuple(row.ids) for row in first} >= plain  # 30 of 20: every row at least once
    assert len(load_supervised(dataclasses.replace(both, max_samples=2), template)) == 4


@pytest.mark.parametrize(("val_size", "count"), [(5.0, 5), (0.25, 5), (1.0, 1), (0.26, 6)])
def test_validation_split(tmp_path: Path, template: ChatTemplate, val_size: float, count: int) -> None:
    options = dataclasses.replace(write_set(tmp_path, ROWS), val_size=val_size)
    train, evals = load_train_eval(options, template, seed=3)
    assert len(evals["eval"]) == count
    whole = load_supervised(options, template)
    ids = lambda rows: sorted(row.ids for row in rows)  # noqa: E731
    assert ids([*train, *evals["eval"]]) == ids(whole)
    assert load_train_eval(options, template, seed=3)[1]["eval"].fingerprint == evals["eval"].fingerprint
    assert load_train_eval(options, template, seed=4)[1]["eval"].fingerprint != evals["eval"].fingerprint or count == 1


def test_evaluation_sets(tmp_path: Path, template: ChatTemplate) -> None:
    write_set(tmp_path, ROWS[:2], name="v", file="v.jsonl")
    write_set(tmp_path, ROWS[:3], name="w", file="w.jsonl")
    options = dataclasses.replace(write_set(tmp_path, ROWS), eval_dataset=["v", "w"])
    assert {name: len(rows) for name, rows in load_train_eval(options, template)[1].items()} == {"eval": 5}
    each = dataclasses.replace(options, eval_on_each_dataset=True)
    assert {name: len(rows) for name, rows in load_train_eval(each, template)[1].items()} == {"v": 2, "w": 3}
    with pytest.raises(DataError, match="exclude each other"):
        load_train_eval(dataclasses.replace(options, val_size=0.5), template)
    with pytest.raises(DataError, match="train_on_prompt and mask_history"):
        load_train_eval(dataclasses.replace(options, train_on_prompt=True, mask_history=True), template)


@pytest.mark.parametrize("val_size", [20, 0.99, 21, 2.5])
def test_a_split_that_leaves_nothing_is_an_error(val_size: float) -> None:
    with pytest.raises(DataError, match="val_size"):
        split_rows(20, val_size, 0)


def test_dataset_is_a_sequence_of_plain_lists(tmp_path: Path, template: ChatTemplate) -> None:
    dataset = load_supervised(write_set(tmp_path, ROWS), template)
    ids, mask = dataset.examples[-1]
    assert all(type(i) is int for i in ids) and all(type(m) is bool for m in mask) and len(ids) == len(mask)
    assert dataset.lengths == [len(row.ids) for row in dataset] and dataset.num_targets == sum(sum(row.mask) for row in dataset)
    assert dataset[3:5] == [dataset[3], dataset[4]]
    with pytest.raises(IndexError):
        dataset[20]


def test_prompts_are_dropped_when_too_long_never_cut(tmp_path: Path, template: ChatTemplate) -> None:
    rows = [
        {"instruction": "short", "input": "", "output": "", "answer": 7, "level": "easy"},
        {"instruction": "9" * 100, "input": "", "output": "", "answer": "x"},
        {"instruction": "no answer"},
        {"instruction": "with reply", "output": "the reply"},
        {"instruction": None},
    ]
    said: list[str] = []
    prompts = load_prompts(write_set(tmp_path, rows), template, 40, log=said.append)
    assert [prompt.row["instruction"] for prompt in prompts] == ["short", "no answer", "with reply"]
    assert [(row.index, row.reason) for row in prompts.dropped] == [
        (4, "column 'instruction' is null, not text"),
        (1, "prompt longer than max_prompt_len 40"),
    ]
    assert prompts[0].row["answer"] == 7 and prompts[0].row["level"] == "easy" and prompts[0].row["dataset"] == "toy"
    assert prompts[1].row["answer"] is None
    assert prompts[2].row["answer"] == prompts[2].row["response"] == "the reply"
    assert "2 dropped" in said[0]
    for prompt in prompts:
        expected = template.tokenizer.apply_chat_template(prompt.row["messages"], add_generation_prompt=True, return_dict=False)
        assert prompt.ids == expected
    with pytest.raises(DataError, match="max_prompt_len 3"):
        load_prompts(write_set(tmp_path, rows), template, 3)


def test_prompts_read_the_columns_that_the_entry_names(tmp_path: Path, template: ChatTemplate) -> None:
    rows = [{"problem": "1+1", "solution": "2", "kind": "sum"}]
    options = write_set(tmp_path, rows, columns={"prompt": "problem", "answer": "solution", "ability": "kind"})
    row = load_prompts(options, template, 100)[0].row
    assert (row["answer"], row["ability"], row["solution"]) == ("2", "sum", "2")


@given(st.integers(1, 30), st.integers(1, 40), st.integers(0, 2**40), st.booleans())
def test_order_reads_every_row_once_an_epoch(num_rows: int, batch_size: int, seed: int, shuffle: bool) -> None:
    order = ShuffledOrder(num_rows, batch_size, seed, shuffle)
    rows: list[int] = []
    while len(rows) < 3 * num_rows:
        epoch, batch = order.next()
        assert len(batch) == batch_size and epoch == len(rows) // num_rows
        rows += batch
    for epoch in range(3):
        part = rows[epoch * num_rows : (epoch + 1) * num_rows]
        assert sorted(part) == list(range(num_rows)) and (shuffle or part == list(range(num_rows)))


@given(st.integers(1, 20), st.integers(1, 7), st.integers(0, 9), st.integers(0, 2**32))
def test_order_resumes_at_any_batch(num_rows: int, batch_size: int, stop: int, seed: int) -> None:
    whole, part, resumed = (ShuffledOrder(num_rows, batch_size, seed) for _ in range(3))
    batches = [whole.next() for _ in range(12)]
    for _ in range(stop):
        part.next()
    assert resumed.load_state_dict(part.state_dict())
    assert [resumed.next() for _ in range(12 - stop)] == batches[stop:]


def test_batches_of_any_size_are_cut_from_one_sequence() -> None:
    whole, parts = ShuffledOrder(5, 4, 1), ShuffledOrder(5, 3, 1)
    assert [*whole.next()[1], *whole.take(9)] == [*parts.take(1), *parts.next()[1], *parts.take(0), *parts.take(9)]
    assert whole.state_dict() == parts.state_dict() and whole.epochs == 13 / 5


def test_order_depends_on_the_seed_and_refuses_nothing_to_order() -> None:
    assert ShuffledOrder(50, 50, 1).next() != ShuffledOrder(50, 50, 2).next() != ShuffledOrder(50, 50, 2**32 + 2).next()
    with pytest.raises(ValueError, match="at least 1"):
        ShuffledOrder(0, 2, 1)


@dataclasses.dataclass
class Model:
    model_name_or_path: str | None
    trust_remote_code: bool = False
    cache_dir: str | None = None
    model_revision: str = "main"
    hf_hub_token: str | None = None


def test_tokenizer_without_a_pad_token_pads_with_eos(tmp_path: Path) -> None:
    tiny_tokenizer(pad_token=None).save_pretrained(tmp_path / "plain")
    assert AutoTokenizer.from_pretrained(tmp_path / "plain").pad_token_id is None
    tokenizer = load_tokenizer(Model(str(tmp_path / "plain")))
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    tiny_tokenizer().save_pretrained(tmp_path / "padded")
    tokenizer = load_tokenizer(Model(str(tmp_path / "padded")))
    assert tokenizer.pad_token == "<|endoftext|>" and tokenizer.chat_template
    with pytest.raises(DataError, match="no tokenizer can be loaded"):
        load_tokenizer(Model(str(tmp_path)))
