"""Rewards `judge` and `hybrid` against a real endpoint that fails in every way that endpoints do."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlmca.config import RewardSpec
from rlmca.rewards import build_rewards
from rlmca.rewards.judge import JudgeOptions, mark_in
from rlmca.rewards.judge_cache import JudgeCache
from rlmca.types import Sample
from tests.rewards.judge_server import JudgeServer, serving

KEY = "sk-very-secret-7"


@pytest.fixture
def server() -> Iterator[JudgeServer]:
    with serving() as one:
        yield one


def sample(reply: str, **row: Any) -> Sample:
    return Sample([1], [5, 2], [-1.0, -1.0], [0, 0], "stop", reply=reply, row={"messages": [{"role": "user", "content": "why?"}], **row})


def spec(server: JudgeServer, **options: Any) -> RewardSpec:
    return RewardSpec("judge", options={"base_url": server.url, "model": "m", "backoff": 0.01, "retries": 2, **options})


def marks(spec: RewardSpec, samples: list[Sample]) -> list[float | None]:
    build_rewards([spec]).score(samples)
    return [s.reward for s in samples]


def test_marks_become_scores_in_order_and_the_prompt_holds_what_is_judged(server: JudgeServer) -> None:
    samples = [sample("<think>mark=1</think> mark=7", answer="42"), sample("mark=0"), sample("mark=10")]
    assert marks(spec(server, rubric="Be strict.", max_tokens=9), samples) == [0.7, 0.0, 1.0]
    request = next(r for r in server.requests if "42" in r["messages"][0]["content"])
    prompt = request.pop("messages")[0]["content"]
    assert request == {"model": "m", "temperature": 0.0, "max_tokens": 9}
    assert "Be strict." in prompt and "why?" in prompt and "mark=1<" not in prompt and "from 0 (worst) to 10 (best)" in prompt
    assert sum("<reference>" in r["messages"][0]["content"] for r in server.requests if "messages" in r) == 0


@pytest.mark.parametrize("kind", ["429", "500", "503", "close", "garbage", "silent"])
def test_failures_that_pass_are_tried_again(server: JudgeServer, kind: str) -> None:
    assert marks(spec(server), [sample(f"mark=5 fail={kind}:2")]) == [0.5]
    assert len(server.requests) == 3


@pytest.mark.parametrize(
    ("kind", "tries", "words"),
    [
        ("429", 3, "answered 429"),
        ("close", 3, "connection failed"),
        ("garbage", 3, "no chat completion"),
        ("silent", 3, "no mark"),
        ("400", 1, "400"),
    ],
)
def test_failures_that_stay_make_the_score_invalid_and_no_other(
    server: JudgeServer, kind: str, tries: int, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "rlmca.rewards"):
        assert marks(spec(server), [sample(f"mark=5 fail={kind}:99"), sample("mark=6")]) == [None, 0.6]
    assert len(server.requests) == tries + 1 and words in caplog.text


def test_a_judge_that_hangs_is_left(server: JudgeServer) -> None:
    assert marks(spec(server, timeout=0.3, retries=0), [sample("mark=5 fail=hang:9")]) == [None]


def test_nobody_there_is_invalid_also_behind_a_proxy_variable(server: JudgeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert marks(spec(server), [sample("mark=5")]) == [0.5]
    assert marks(spec(server, base_url="http://127.0.0.1:9/v1", retries=0), [sample("mark=5")]) == [None]


def test_marks_outside_the_scale_are_no_marks(server: JudgeServer) -> None:
    assert marks(spec(server, low=1.0, high=5.0), [sample("mark=7"), sample("mark=5"), sample("mark=1"), sample("mark=2")]) == [
        None,
        1,
        0,
        0.25,
    ]


def test_at_most_so_many_requests_at_a_time_also_inside_an_event_loop(server: JudgeServer) -> None:
    samples = [sample(f"{i} mark=5") for i in range(12)]

    async def inside() -> list[float | None]:
        return marks(spec(server, concurrency=3), samples)

    assert asyncio.run(inside()) == [0.5] * 12
    assert 1 < server.most <= 3


def test_the_key_comes_from_the_environment_and_is_never_shown(
    server: JudgeServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    cache = tmp_path / "marks.sqlite"
    with caplog.at_level(logging.DEBUG):
        assert marks(spec(server, api_key_env="JUDGE_KEY", cache=str(cache)), [sample("mark=5"), sample("mark=5 fail=401:9")]) == [
            0.5,
            None,
        ]
    assert {h["Authorization"] for h in server.headers} == {f"Bearer {KEY}"}
    assert "answered 401: no: Bearer ***" in caplog.text and KEY not in caplog.text and KEY.encode() not in cache.read_bytes()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"api_key_env": KEY}, "must be the name of an environment variable"),
        ({"api_key_env": "sk_very_secret_7"}, "names an environment variable that is not set"),
        ({"base_url": "127.0.0.1:8000"}, "'base_url' must be the endpoint's address"),
        ({"base_url": "http://u:secret@h/v1"}, "must hold no user, password"),
        ({"model": ""}, "'model' is missing"),
        ({"score_pattern": "score"}, "needs a group"),
        ({"score_pattern": "("}, "is no regular expression"),
        ({"prompt": "{{ reply"}, "is no Jinja template"),
        ({"low": 3.0, "high": 3.0}, "must be below high"),
        ({"timeout": 0.0}, "'timeout' must be above 0"),
        ({"retries": -1}, "'retries'"),
        ({"cache": "/dev/null/x"}, "'cache': /dev/null/x cannot be used"),
        ({"api_key": KEY}, "did you mean 'api_key_env'"),
    ],
)
def test_mistakes_are_named_when_built_and_keys_are_not(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match="judge") as caught:
        build_rewards([RewardSpec("judge", options={"base_url": "http://127.0.0.1:1/v1", "model": "m", **options})])
    assert words in str(caught.value) and "secret" not in str(caught.value)


def test_a_template_that_asks_for_what_the_row_lacks_is_invalid(server: JudgeServer) -> None:
    assert marks(spec(server, prompt="{{ row.rubric }} {{ reply }}"), [sample("mark=5"), sample("mark=5", rubric="x")]) == [None, 0.5]


def test_marks_are_kept_on_disk_by_model_prompt_and_parameters(server: JudgeServer, tmp_path: Path) -> None:
    path = str(tmp_path / "deep" / "marks.sqlite")
    for _ in range(2):
        assert marks(spec(server, cache=path), [sample("mark=5"), sample("mark=6")]) == [0.5, 0.6]
    assert len(server.requests) == 2
    assert marks(spec(server, cache=path, temperature=0.5), [sample("mark=5")]) == [0.5]
    assert marks(spec(server, cache=path, model="other"), [sample("mark=5")]) == [0.5]
    assert len(server.requests) == 4
    assert marks(spec(server, cache=path, score_pattern=r"no (\d)"), [sample("mark=5")]) == [None]  # what was said has no such mark


def test_the_cache_is_bounded_and_the_oldest_leave(tmp_path: Path) -> None:
    cache = JudgeCache(str(tmp_path / "c"), 3)
    for i in [0, 1, 2, 0, 3]:
        cache.put(str(i), f"said {i}")
    assert [JudgeCache(str(tmp_path / "c"), 3).get(str(i)) for i in range(4)] == [
        "said 0" if i == 0 else None if i == 1 else f"said {i}" for i in range(4)
    ]


def test_the_mark_is_the_last_after_the_thought() -> None:
    options = JudgeOptions(base_url="http://h/v1", model="m")
    assert mark_in("Score: 3. No: **Score:** 4.5/10", options) == 4.5
    signed = dataclasses.replace(options, low=-5.0)
    assert [mark_in(text, signed) for text in ("Score: -3", "**Score:** -2.5", "Score: \u22121", "Score - 4")] == [-3.0, -2.5, -1.0, 4.0]
    assert [mark_in(text, options) for text in ("", "<think>score 3</think>", "score: eleven", "score " * 100_000)] == [None] * 4


# --- hybrid


def hybrid(server: JudgeServer, rules: list[Any], **options: Any) -> RewardSpec:
    return RewardSpec("hybrid", options={"rules": rules, "judge": dict(spec(server).options), **options})


def test_the_judge_is_asked_only_where_rules_abstain(server: JudgeServer, tmp_path: Path) -> None:
    rule = tmp_path / "rule.py"
    rule.write_text("def rule(samples, unsure):\n    return [None if s.reply.startswith(unsure) else 0.25 for s in samples]\n")
    samples = [sample("a mark=9", answer="x"), sample("b mark=9"), sample("a mark=4"), sample("a mark=3 fail=400:9")]
    rules = ["exact", {"name": f"{rule}:rule", "options": {"unsure": "a"}}]
    # `exact` has a verdict for the first alone: the others have no answer
    assert marks(hybrid(server, rules), samples) == [0.0, 0.25, 0.4, None]
    assert len(server.requests) == 2


def test_the_judge_is_asked_about_what_a_rule_did_not_accept(server: JudgeServer) -> None:
    samples = [sample("mark=9", answer="x"), sample("x mark=1", answer="x mark=1")]
    assert marks(hybrid(server, ["exact"], judge_below=1.0), samples) == [0.9, 1.0]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "'rules' is missing"),
        ({"rules": ["exact"]}, "'judge': option 'base_url'"),
        ({"rules": ["exat"], "judge": {"base_url": "http://h/v1", "model": "m"}}, "did you mean 'exact'"),
        ({"rules": [{"name": "exact", "weight": 2}]}, "rules have no weights"),
        ({"rules": ["exact"], "judge": {"base_url": "http://h/v1", "modle": "m"}}, "did you mean 'model'"),
    ],
)
def test_mistakes_of_a_hybrid_are_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError) as caught:
        build_rewards([RewardSpec("hybrid", options=options)])
    assert words in str(caught.value)
