"""Pairs out of scored replies: which are made, why others are not, and the set that is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlmca.cli.main import main
from rlmca.data import ChatTemplate
from rlmca.data.best_worst import PairRules, Reply, best_and_worst, pairs_of_rows, write_ranking_set
from rlmca.data.errors import Dropped
from rlmca.data.formats import convert_rows
from rlmca.data.info import resolve
from rlmca.data.pairs import load_pairs
from tests.helpers.datafiles import Options
from tests.helpers.tokenizers import tiny_tokenizer

REPLIES = [Reply("ok", 0.5), Reply("best", 1.0), Reply("worst", 0.0), Reply("cut", 0.9, truncated=True), Reply("lost", None)]


def texts(replies: list[Reply], **rules: Any) -> list[tuple[str, str]]:
    return [(chosen.text, rejected.text) for chosen, rejected in best_and_worst(replies, PairRules(**rules))[0]]


def test_the_best_and_the_worst_make_the_pair() -> None:
    assert texts(REPLIES) == [("best", "worst")]
    assert texts(REPLIES, pairs_per_prompt=3) == [("best", "worst")], "one of the three that are left has nobody beside it"
    more = [*REPLIES, Reply("fine", 0.8)]
    assert texts(more, pairs_per_prompt=2) == [("best", "worst"), ("fine", "ok")]


@pytest.mark.parametrize(
    ("replies", "rules", "expected"),
    [
        (REPLIES, {"min_margin": 1.0}, [("best", "worst")]),
        (REPLIES, {"min_margin": 1.1}, "margin below min_margin"),
        ([Reply("a", 1.0), Reply("b", 1.0)], {}, "all scores equal"),
        ([Reply("a", 1.0), Reply("a", 0.0)], {}, "fewer than two different valid replies"),
        ([Reply("a", 1.0), Reply("b", None)], {}, "fewer than two different valid replies"),
        (
            [Reply("long " * 9, 1.0), Reply("short", 0.0), Reply("medium text", 0.5)],
            {"max_length_ratio": 5},
            [("long " * 9, "medium text")],
        ),
        ([Reply("a", 1.0, truncated=True), Reply("b", 0.0)], {"keep_truncated": True}, "no pair within"),
        ([Reply("a", 1.0), Reply("b", 0.0, truncated=True)], {}, "no pair within"),
        ([Reply("a", 1.0), Reply("b", 0.0, truncated=True)], {"keep_truncated": True}, [("a", "b")]),
        (REPLIES, {"min_chosen_score": 1.5}, "no pair within"),
        (REPLIES, {"max_rejected_score": -1.0}, "no pair within"),
        ([Reply("a", 1.0, tokens=9), Reply("b", 0.0, tokens=2)], {"max_length": 8}, "fewer than two different"),
    ],
)
def test_rules(replies: list[Reply], rules: dict[str, Any], expected: Any) -> None:
    if isinstance(expected, str):
        found, why = best_and_worst(replies, PairRules(**rules))
        assert found == [] and why.startswith(expected)
    else:
        assert texts(replies, **rules) == expected


@given(st.lists(st.tuples(st.integers(0, 9), st.one_of(st.none(), st.integers(0, 4))), max_size=9), st.integers(1, 3), st.integers(0, 2))
def test_every_pair_keeps_the_rules(drawn: list[tuple[int, int | None]], number: int, margin: int) -> None:
    replies = [Reply("x" * (n + 1), None if s is None else float(s)) for n, s in drawn]
    pairs = texts(replies, pairs_per_prompt=number, min_margin=margin)
    score = {}
    for reply in replies:
        score.setdefault(reply.text, reply.score)
    assert len(pairs) <= number and len({text for pair in pairs for text in pair}) == 2 * len(pairs)
    for chosen, rejected in pairs:
        assert score[chosen] is not None and score[chosen] - score[rejected] >= margin and score[chosen] > score[rejected]
    valid = [s for s in score.values() if s is not None]
    if pairs:
        assert score[pairs[0][0]] - score[pairs[0][1]] == max(valid) - min(valid), "the widest margin is among them"


@pytest.mark.parametrize(
    "rules", [{"min_margin": -1}, {"max_length_ratio": 0.5}, {"min_length": 5, "max_length": 4}, {"pairs_per_prompt": 0}]
)
def test_rules_that_cannot_be_kept_are_refused(rules: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(rules))[:3]):
        PairRules(**rules)


def prediction(question: str, reply: str, reward: float | None, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}]
    return {"prompt": "…", "messages": messages, "predict": reply, "finish": "stop", "ids": [1] * len(reply), "reward": reward, **more}


def test_the_command_writes_a_set_that_stage_dpo_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [prediction("a?", "yes", 1.0), prediction("b?", "same", 0.0), prediction("a?", "no", 0.0), prediction("b?", "other", 0.0)]
    source, out = tmp_path / "eval_predictions.jsonl", tmp_path / "pairs.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "dataset_info.json").write_text(json.dumps({"kept": {"file_name": "kept.json"}}))
    assert main(["pairs", str(source), str(out), "--min_margin", "0.5"]) == 0
    printed = capsys.readouterr().out
    assert "1 pairs" in printed and "1 prompts without a pair: all scores equal" in printed
    assert set(json.loads((tmp_path / "dataset_info.json").read_text())) == {"kept", "pairs"}
    template = ChatTemplate(tiny_tokenizer())
    pair = load_pairs(Options(dataset=["pairs"], dataset_dir=str(tmp_path)), template)[0]
    for side, reply in zip(pair, ("yes", "no"), strict=True):
        whole = [{"role": "user", "content": "a?"}, {"role": "assistant", "content": reply}]
        assert side.ids == template.tokenizer.apply_chat_template(whole, return_dict=False)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--min_margin", "5"], "no pair is left"),
        (["--max_length_ratio", "0.1"], "must be at least 1"),
        (["--name", "taken"], "has a data set 'taken' of another file"),
    ],
)
def test_the_command_says_what_is_wrong(arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "r.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in [prediction("a?", "yes", 1.0), prediction("a?", "no", 0.0)]))
    (tmp_path / "dataset_info.json").write_text(json.dumps({"taken": {"file_name": "kept.json"}}))
    assert main(["pairs", str(source), str(tmp_path / "out.jsonl"), *arguments]) == 1
    assert words in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out.jsonl").exists()


def test_rows_of_another_form_are_named() -> None:
    with pytest.raises(ValueError, match="row 2 has no messages, predict and reward"):
        pairs_of_rows([prediction("a?", "yes", 1.0), {"prompt": "x"}], PairRules())


def test_tools_that_a_prompt_lists_stay_with_it(tmp_path: Path) -> None:
    """Without them the pair would be of another prompt than the one that was answered."""
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    rows = [prediction("a?", "yes", 1.0, tools=[tool]), prediction("a?", "no", 0.0, tools=[tool]), prediction("a?", "?", -1.0)]
    rows += [prediction("b?", "yes", 1.0), prediction("b?", "no", 0.0)]
    found, without = pairs_of_rows(rows, PairRules())
    assert [(row["rejected"]["content"], bool(row["tools"])) for row in found] == [("no", True), ("no", False)]
    assert without == {"fewer than two different valid replies": 1}, "the same words without the tools are another prompt"
    write_ranking_set(tmp_path / "pairs.jsonl", found, "pairs")
    (entry,) = resolve(["pairs"], tmp_path)
    read = convert_rows(entry, list(enumerate(found)), need_reply=False, dropped=Dropped())
    assert [row.tools for row in read] == [[tool], None]
