from __future__ import annotations

from typing import Any

import pytest

from rlmca.config import RewardSpec
from rlmca.rewards import build_rewards
from rlmca.rewards.choice import chosen
from rlmca.rewards.json_reward import document_of, parse, same
from rlmca.rewards.schema_check import valid
from rlmca.types import Sample

CITIES = {"A": "Rome", "B": "Paris", "C": "A", "D": "Bonn, or Berlin"}


def score(name: str, reply: str, given: dict[str, Any] | None = None, /, **row: Any) -> float | None:
    one = Sample([1], [5, 2], [-1.0, -1.0], [0, 0], "stop", reply=reply, row=row)
    with build_rewards([RewardSpec(name, options=given or {})], timeout=60) as rewards:
        rewards.score([one])
    return one.reward


@pytest.mark.parametrize(
    ("reply", "letter"),
    [
        ("The answer is (B).", "B"), ("the answer is B", "B"), ("Answer: **C**", "C"), ("**Answer:** (d)", "D"),
        ("Final answer is: $B$.", "B"),
        ("The answer is A. No, the answer is (B) because", "B"), (r"so \boxed{B}", "B"), (r"\boxed{\text{(B)}} but the answer is C", "B"),
        (r"\boxed{\text{Paris}}", "B"), ("The answer is Paris.", "B"), ("The answer is paris", "B"), ("answer: bonn, or  berlin", "D"),
        ("B", "B"), ("(b)", "B"), ("I think so.\nB.", "B"), ("long\n**B**\n", "B"), ("Option B", "B"), ("the answer is option C.", "C"),
        ("<think>the answer is A</think>B", "B"), ("The answer is B) Paris", "B"), ("The answer is B. Paris", "B"),
        ("The answer is a city", None), ("Because A", None), ("", None), ("Z", None), ("the answer is E", None),
        ("answer the question", None),
        (r"\boxed{}", None), ("AB", None), ("The answer is\n\n(C)", "C"), ("The answer is A", "A"),
    ],
)  # fmt: skip
def test_the_letter_that_a_reply_chooses(reply: str, letter: str | None) -> None:
    assert chosen(reply, CITIES) == letter


def test_choice_knows_letters_texts_and_places_as_answers() -> None:
    cities = list(CITIES.values())
    assert score("choice", "answer is B", answer="b") == 1
    assert score("choice", "answer is B", answer="Paris", options=cities) == 1
    assert score("choice", "answer is B", answer=1, options=CITIES) == 1
    assert score("choice", "answer is B", answer="(C)", choices=cities) == 0
    assert score("choice", "answer is Rome", {"column": "choices"}, answer="A", choices='["Rome", "Bonn"]') == 1
    assert score("choice", "answer is B", answer="London", options=cities) is None
    assert score("choice", "answer is B", answer="B", options=[]) is None
    assert score("choice", "answer is B") is None


@pytest.mark.parametrize(
    ("reply", "want"),
    [
        ('{"a": 1}', 1), ("[1, 2", 0), ("", 0), ("NaN", 0), ("[Infinity]", 0), ("null", 1), ('sure: {"a": 1}', 0),
        ('```json\n{"a": 1}\n```', 1),
        ("text\n```\n[1]\n```\nmore", 1), ("```json\n{\n```\n```json\n{}\n```", 1), ("```json\n{}", 0), ("<think>{</think> {}", 1),
        ("[" * 100_000, 0), ("1" * 100_000, 0), ('"\ud800"', 1),
    ],
)  # fmt: skip
def test_json_parses(reply: str, want: float) -> None:
    assert score("json", reply) == want


def test_json_required_keys_and_answer() -> None:
    required = {"required": ["name", "age"]}
    assert score("json", '{"name": 1, "age": null}', required) == 1
    assert score("json", '{"name": 1}', required) == 0 and score("json", '["name", "age"]', required) == 0
    equal = {"equals_answer": True}
    assert score("json", '{"b": [1.0], "a": "x"}', equal, answer='{"a": "x", "b": [1]}') == 1
    assert score("json", '{"a": 2}', equal, answer='{"a": 1}') == 0
    assert score("json", "{}", equal, answer="no json") is None and score("json", "{}", equal) is None


@pytest.mark.parametrize(
    ("a", "b", "want"),
    [
        (1, 1.0, True),
        (True, 1, False),
        (False, 0, False),
        (None, 0, False),
        ("1", 1, False),
        ([1, 2], [2, 1], False),
        ({}, [], False),
        (0.1, 0.1, True),
    ],
)
def test_same(a: Any, b: Any, want: bool) -> None:
    assert same(a, b) is want and same(b, a) is want


def test_a_schema_is_read_when_built_and_checked_in_the_pool() -> None:
    with pytest.raises(ValueError, match="'schema' is no JSON schema"):
        build_rewards([RewardSpec("json", options={"schema": {"type": "nosuch"}})])
    assert valid('{"type": "object", "required": ["a"]}', '{"a": 1}') and not valid('{"type": "integer"}', '"1"')


def test_a_schema_fetches_nothing() -> None:
    with pytest.raises(Exception, match="127.0.0.1"):
        valid('{"$ref": "http://127.0.0.1:9/x.json"}', "1")


@pytest.mark.serial
def test_json_schema_with_a_pattern_that_hangs_is_stopped() -> None:
    schema = {"properties": {"a": {"type": "string", "pattern": "^(x+x+)+y$"}, "b": {"type": "integer"}}}
    samples = [Sample([1], [5], [-1.0], [0], "stop", reply=reply) for reply in ('{"a": "' + "x" * 60 + '"}', '{"b": 1}', '{"b": "1"}')]
    with build_rewards([RewardSpec("json", options={"schema": schema})], workers=1, timeout=5.0) as rewards:
        rewards.score(samples)
    assert [s.reward for s in samples] == [0, 1, 0] and rewards.timeouts == 1


def test_documents() -> None:
    assert document_of("a ```json\n1\n```") == "a ```json\n1\n```".strip()  # a fence starts a line
    with pytest.raises(ValueError, match="the reply is no JSON"):
        parse("{", "the reply")
