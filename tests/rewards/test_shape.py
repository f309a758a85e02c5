"""Rewards for the shape of a reply, held to the figures of their sources."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlmca.config import RewardSpec
from rlmca.rewards import REGISTRY, build_rewards
from rlmca.rewards.shape import duplicate_share
from rlmca.rewards.text import last_block, thought_of
from rlmca.types import Sample

SHAPES = ("length", "length_bonus", "think", "repetition")


def sample(reply: str = "", tokens: int = 1) -> Sample:
    return Sample([1], [5] * tokens, [-1.0] * tokens, [0] * tokens, "stop", reply=reply)


def score(name: str, *samples: Sample, **options: Any) -> list[float | None]:
    build_rewards([RewardSpec(name, options=options)]).score(samples)
    return [s.reward for s in samples]


def test_length_has_both_ends_inside_and_counts_characters() -> None:
    replies = [sample("é" * n) for n in (0, 19, 20, 800, 801)]
    assert score("length", *replies, sample("  " + "x" * 19 + "\n ")) == [-0.5, -0.5, 0.5, 0.5, -0.5, -0.5]
    assert score("length", sample("ab"), minimum=1, maximum=2) == [0.5]


def test_think() -> None:
    thoughts = ["x" * 19, "x" * 20, "x" * 300, "x" * 301]
    tagged = [sample(f"<think>\n{t}\n</think>\n\nyes") for t in thoughts]
    assert score("think", *tagged) == [-0.25, 1.25, 1.25, -0.25]
    others = [sample("x" * 50 + "</think>yes"), sample("x" * 50), sample("x" * 50 + "</think></think>"), sample("")]
    assert score("think", *others) == [1.25, -0.75, 0.75, -0.75]


def test_repetition() -> None:
    # a b c a b c a: 5 grams of 3 words, 3 different
    replies = ["a b c a b c a", "A b C a B c a", "one two three four", "no no no no no no", "a b", "", "!!!!!"]
    assert score("repetition", *map(sample, replies)) == pytest.approx([-0.4, -0.4, 0, -0.5, 0, 0, -0.5])
    assert score("repetition", sample("a a a a"), n=1, scale=0.1) == pytest.approx([-0.075])
    assert score("repetition", sample("a a a a"), n=1, cap=0.6) == [-0.6]


def test_overlong_is_the_equation_of_the_paper() -> None:
    replies = [sample(tokens=n) for n in (0, 16384, 16385, 18432, 20480, 20481, 40000)]
    found = score("overlong", *replies, max_tokens=20480, buffer=4096)
    assert found == pytest.approx([0, 0, -1 / 4096, -0.5, -1, -1, -1])
    assert score("overlong", sample(tokens=10), max_tokens=10, buffer=4, penalty=0.5) == [-0.5]


def test_overlong_takes_the_maximum_of_the_run() -> None:
    rewards = build_rewards([RewardSpec("overlong", options={"buffer": 10})], max_new_tokens=20)
    samples = [sample(tokens=n) for n in (10, 15, 20)]
    rewards.score(samples)
    assert [s.reward for s in samples] == [0, -0.5, -1]


def test_length_bonus() -> None:
    assert score("length_bonus", *(sample("x" * n) for n in (0, 250, 1000, 5000))) == [0, 0.25, 1, 1]


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("length", {"minimum": 5, "maximum": 4}, "at most maximum 4"),
        ("length", {"minimun": 5}, "did you mean 'minimum'"),
        ("think", {"minimum": -1}, "at least 0"),
        ("repetition", {"n": 0}, "at least 1"),
        ("overlong", {}, "'max_tokens' is missing"),
        ("overlong", {"max_tokens": 10, "buffer": 11}, "between 1 and max_tokens 10"),
        ("overlong", {"max_tokens": 10, "buffer": 1, "penalty": -1.0}, "it is subtracted"),
        ("length_bonus", {"characters": 0}, "at least 1"),
    ],
)
def test_mistakes_are_named(name: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError) as caught:
        build_rewards([RewardSpec(name, options=options)])
    assert words in str(caught.value) and name in str(caught.value)


BOUNDS = {"length": (-0.5, 0.5), "length_bonus": (0, 1), "think": (-0.75, 1.25), "repetition": (-0.5, 0), "format": (0, 1), "json": (0, 1)}


@given(st.text() | st.lists(st.sampled_from(["<think>", "</think>", "a", " ", "\n", "```json\n", "{", "}", "]", "é", "\x00"])).map("".join))
def test_any_text_has_a_score_within_bounds(text: str) -> None:
    rewards = build_rewards([RewardSpec(name) for name in BOUNDS] + [RewardSpec("choice")])
    one = sample(text)
    one.row = {"answer": "A"}
    rewards.score([one])
    for name, (low, high) in BOUNDS.items():
        value = one.reward_parts[name]
        assert value is not None and low <= value <= high
    assert one.reward_parts["choice"] in (0.0, 1.0)


@given(st.lists(st.sampled_from("abc"), max_size=20), st.integers(1, 4))
def test_duplicate_share_counts_grams(words: list[str], n: int) -> None:
    grams = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
    seen: list[tuple[str, ...]] = []
    again = 0
    for gram in grams:
        again += gram in seen
        seen.append(gram)
    assert duplicate_share(" ".join(words), n) == pytest.approx(again / len(grams) if grams else 0)


def test_blocks_and_thoughts() -> None:
    text = "```python\na\n```\ntext\n``` Python \nb\n\nc\n```\n```\nplain\n```\n```python\nopen"
    assert last_block(text, ("python",)) == "b\n\nc" and last_block(text, ("",)) == "plain" and last_block(text, ("json",)) is None
    assert thought_of("<think> a </think> b </think>") == "a" and thought_of("no") == ""


def test_registry_holds_every_rule_of_this_file() -> None:
    assert {*SHAPES, "overlong"} <= set(REGISTRY)
