"""Preference pairs: LLaMA-Factory's formats, masks of the reply alone, pairs kept or dropped whole."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from rlmca.data import ChatTemplate, DataError, Pairs, batch_of_pairs, load_prompts, load_supervised, load_train_eval_pairs
from rlmca.data.loading import check_sources
from rlmca.data.pairs import load_pairs
from tests.helpers.datafiles import write_set
from tests.helpers.tokenizers import tiny_tokenizer

SHAREGPT = {"ranking": True, "formatting": "sharegpt", "columns": {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"}}
ALPACA = {"ranking": True, "columns": {"prompt": "instruction", "query": "input", "chosen": "good", "rejected": "bad"}}


@pytest.fixture(scope="module")
def template() -> ChatTemplate:
    return ChatTemplate(tiny_tokenizer())


def human(text: str) -> dict[str, str]:
    return {"from": "human", "value": text}


def gpt(text: str) -> dict[str, str]:
    return {"from": "gpt", "value": text}


def row(chosen: Any, rejected: Any, turns: list[Any] | None = None) -> dict[str, Any]:
    return {"conversations": turns if turns is not None else [human("What is 1 + 1 ?")], "chosen": chosen, "rejected": rejected}


def targets(template: ChatTemplate, side: Any) -> str:
    return str(template.tokenizer.decode([i for i, m in zip(side.ids, side.mask, strict=True) if m]))


def check_sides(template: ChatTemplate, pairs: Pairs, messages: list[dict[str, str]], chosen: str, rejected: str) -> None:
    """Ids are those of the whole conversation as Transformers renders it; targets are the last reply and its end of turn."""
    for side, reply in zip(pairs[0], (chosen, rejected), strict=True):
        whole = [*messages, {"role": "assistant", "content": reply}]
        assert side.ids == template.tokenizer.apply_chat_template(whole, return_dict=False)
        assert targets(template, side) == f"{reply}<|im_end|>"


def test_sharegpt_openai_and_alpaca_give_whole_conversations(template: ChatTemplate, tmp_path: Path) -> None:
    turns = [{"from": "system", "value": "Be short."}, human("Hi"), gpt("Hello"), human("What is 1 + 1 ?")]
    messages = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "What is 1 + 1 ?"},
    ]
    options = write_set(tmp_path, [row(gpt("2"), gpt("3, I think"), turns)], **SHAREGPT)
    check_sides(template, load_pairs(options, template), messages, "2", "3, I think")
    sides = {"chosen": {"role": "assistant", "content": "2"}, "rejected": [{"role": "assistant", "content": "4"}]}
    options = write_set(tmp_path, [{"messages": messages, **sides}], name="o", file="o.jsonl", ranking=True, formatting="openai")
    check_sides(template, load_pairs(options, template), messages, "2", "4")
    rows = [{"instruction": "What is", "input": "1 + 1 ?", "good": "2", "bad": "5", "output": 7}]
    options = write_set(tmp_path, rows, name="a", file="a.jsonl", **ALPACA)
    check_sides(template, load_pairs(options, template), [{"role": "user", "content": "What is\n1 + 1 ?"}], "2", "5")


BAD = [
    (row(gpt("same"), gpt("same")), "chosen and rejected are equal"),
    (row(gpt(" "), gpt("3")), "empty chosen reply"),
    (row(gpt("2"), gpt("")), "empty rejected reply"),
    (row(gpt("2"), None), "column 'rejected' is null"),
    ({"conversations": [human("x")], "chosen": gpt("2")}, "no column 'rejected'"),
    (row("2", gpt("3")), "chosen"),
    (row(gpt("2"), [gpt("3"), gpt("4")]), "column 'rejected' holds 2 messages, not one"),
    (row(gpt("2"), human("3")), "turns do not alternate"),
    (row(gpt("2"), gpt("3"), [human("a"), gpt("b")]), "turns do not alternate"),
    (row({"from": "nobody", "value": "2"}, gpt("3")), "unknown role 'nobody'"),
    (row(gpt("2"), gpt("3"), []), "the first turn is not the user's"),
    ("text", "the row is a str, not an object"),
]


@pytest.mark.parametrize(("bad", "reason"), BAD, ids=[reason for _, reason in BAD])
def test_a_bad_pair_is_dropped_whole_with_its_row_and_reason(bad: Any, reason: str, template: ChatTemplate, tmp_path: Path) -> None:
    lines: list[str] = []
    options = write_set(tmp_path, [row(gpt("2"), gpt("3")), bad, row(gpt("2"), gpt("4"))], **SHAREGPT)
    pairs = load_pairs(options, template, lines.append)
    assert len(pairs) == 2 and [(d.index, reason in d.reason) for d in pairs.dropped] == [(1, True)], pairs.dropped.describe()
    assert lines[0].startswith("toy: 2 pairs, 1 dropped")


def test_a_set_without_a_usable_pair_is_an_error_with_the_columns(template: ChatTemplate, tmp_path: Path) -> None:
    options = write_set(tmp_path, [row(gpt("2"), gpt("2"))], **SHAREGPT)
    with pytest.raises(DataError, match="no usable row in data set 'toy'.*chosen=chosen, rejected=rejected.*are equal"):
        load_pairs(options, template)


def test_both_sides_are_cut_by_the_same_rule(template: ChatTemplate, tmp_path: Path) -> None:
    long = "yes " * 30
    rows = [row(gpt("2"), gpt(long)), row(gpt(long + "a"), gpt(long + "b")), row(gpt("2"), gpt("3"), [human("word " * 60)])]
    options = write_set(tmp_path, rows, **SHAREGPT)
    whole = load_pairs(options, template)[0]
    pairs = load_pairs(dataclasses.replace(options, cutoff_len=40), template)
    assert len(pairs) == 1 and pairs.truncated == 1
    assert pairs[0].chosen == whole.chosen and len(whole.rejected.ids) > 40
    assert pairs[0].rejected.ids == whole.rejected.ids[:40] and pairs[0].rejected.mask == whole.rejected.mask[:40]
    assert {d.index: d.reason.split(" (")[0] for d in pairs.dropped} == {
        1: "chosen and rejected are the same tokens",
        2: "no token of a reply within cutoff_len 40",
    }


def test_rows_of_a_pair_stand_together_in_a_batch(template: ChatTemplate, tmp_path: Path) -> None:
    options = write_set(tmp_path, [row(gpt("2"), gpt("3 ?")), row(gpt("1 2 3"), gpt("4"))], **SHAREGPT)
    pairs = load_pairs(options, template)
    batch = batch_of_pairs(list(pairs))
    assert batch.unit_B is not None and batch.unit_B.tolist() == [0, 0, 1, 1]
    for n, pair in enumerate(pairs):
        for side, at in zip(pair, (2 * n, 2 * n + 1), strict=True):
            assert batch.ids_BT[at, : len(side.ids)].tolist() == side.ids
            assert batch.mask_BT[at].nonzero()[:, 0].tolist() == [t for t, m in enumerate(side.mask) if m]
    assert int(batch.mask_BT.sum()) == pairs.num_targets and isinstance(batch.ids_BT, torch.Tensor)


def test_held_out_pairs_are_taken_from_the_training_set(template: ChatTemplate, tmp_path: Path) -> None:
    options = write_set(tmp_path, [row(gpt(str(n)), gpt("no")) for n in range(10)], **SHAREGPT)
    train, evals = load_train_eval_pairs(dataclasses.replace(options, val_size=0.2), template, seed=1)
    texts = [targets(template, pair.chosen) for pair in [*train, *evals["eval"]]]
    assert (len(train), len(evals["eval"])) == (8, 2) and len(set(texts)) == 10
    assert train.fingerprint != evals["eval"].fingerprint


def test_a_file_by_its_path_is_read_with_the_usual_columns(template: ChatTemplate, tmp_path: Path) -> None:
    options = write_set(tmp_path, [{"instruction": "1 + 1 ?", "chosen": "2", "rejected": "3"}])
    path = str(tmp_path / "toy.jsonl")
    pairs = load_pairs(dataclasses.replace(options, dataset=[path]), template)
    assert targets(template, pairs[0].rejected) == "3<|im_end|>"


def test_pairs_and_conversations_are_not_taken_for_each_other(template: ChatTemplate, tmp_path: Path) -> None:
    ranking = write_set(tmp_path, [row(gpt("2"), gpt("3"))], name="pairs", **SHAREGPT)
    plain = write_set(tmp_path, [{"instruction": "1 + 1 ?", "output": "2"}], name="plain", file="plain.jsonl")
    for load in (load_supervised, lambda o, t: load_prompts(o, t, 100)):
        with pytest.raises(DataError, match="'pairs' has ranking: true, and pairs are for stage dpo alone"):
            load(ranking, template)  # type: ignore[operator]
    with pytest.raises(DataError, match="'plain' has no pairs, which stage dpo compares: its entry .* needs ranking: true"):
        load_pairs(plain, template)
    assert check_sources(ranking, ranking=True) == check_sources(plain) == []  # type: ignore[arg-type]
    assert len(check_sources(ranking)) == len(check_sources(plain, ranking=True)) == 1  # type: ignore[arg-type]


def test_the_entry_names_its_mistakes(template: ChatTemplate, tmp_path: Path) -> None:
    for entry, words in (
        ({"ranking": "yes"}, "ranking must be true or false"),
        ({"columns": {"chosen": "chosen"}}, "columns.chosen belongs to preference pairs: write ranking: true"),
        ({"ranking": True, "columns": {"kto_tag": "tag"}}, "columns.kto_tag is not in this version"),
    ):
        with pytest.raises(DataError, match=words):
            load_pairs(write_set(tmp_path, [row(gpt("2"), gpt("3"))], **entry), template)
