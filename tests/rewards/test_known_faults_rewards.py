"""Faults of reward code that users of comparable systems reported, restated as small tests."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest
import reasoning_gym

from rlmca.algorithms import assign_advantages
from rlmca.config import RewardSpec
from rlmca.rewards import REGISTRY, RewardError, RewardSet, build_rewards
from rlmca.types import Sample, batch_of_samples
from tests.rewards.judge_server import serving

THIRD = r"So it is \boxed{\frac{1}{3}}."
HANGS = r"\boxed{9^{9^{9^{9}}}}"


def sample(reply: str, group: int = 0, **row: Any) -> Sample:
    return Sample([1], [5, 2], [-1.0, -1.0], [0, 0], "stop", reply=reply, row=row, group=group)


def user(tmp_path: Path, code: str, name: str = "fn") -> RewardSpec:
    path = tmp_path / f"{name}.py"
    path.write_text(code)
    return RewardSpec(f"{path}:{name}")


def live_children() -> set[int]:
    """Processes below this one that have not ended, the tracker of multiprocessing (one a program, for good) left out."""
    found = set()
    for child in psutil.Process().children(recursive=True):
        if child.status() != psutil.STATUS_ZOMBIE and "resource_tracker" not in " ".join(child.cmdline()):
            found.add(child.pid)
    return found


# --- a grader that needs the main thread, or hangs the pool


@pytest.mark.serial
def test_e1_math_grades_in_any_thread_and_under_asyncio() -> None:
    samples = [sample(THIRD, answer="1/3"), sample(r"\boxed{\frac{1}{4}}", answer="1/3")]

    def grade() -> list[float | None]:
        rewards.score(samples)
        return [s.reward for s in samples]

    async def grade_async() -> list[list[float | None]]:
        return [grade(), await asyncio.to_thread(grade)]

    with build_rewards([RewardSpec("math")], workers=1, timeout=30) as rewards:
        results = [grade()]
        thread = threading.Thread(target=lambda: results.append(grade()))
        thread.start()
        thread.join()
        results += asyncio.run(grade_async())
    assert results == [[1.0, 0.0]] * 4


@pytest.mark.serial
def test_e1_hung_checks_are_killed_and_the_pool_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    """4 checks that never end and 8 normal ones, pool of 2, limit 2 s."""
    before = live_children()
    normal = [(THIRD, "1/3", 1.0), (r"\boxed{0.25}", r"\frac14", 1.0), (r"\boxed{x+1}", "1+x", 1.0), (r"\boxed{x+2}", "1+x", 0.0)] * 2
    samples = [sample(HANGS, answer="5") for _ in range(4)] + [sample(reply, answer=answer) for reply, answer, _ in normal]
    rewards = build_rewards([RewardSpec("math")], workers=2, timeout=2.0)
    started = time.monotonic()
    with caplog.at_level(logging.WARNING, "rlmca.rewards"):
        rewards.score(samples)
    took = time.monotonic() - started
    assert [s.reward for s in samples] == [0.0] * 4 + [want for _, _, want in normal]
    assert (rewards.timeouts, rewards.errors) == (
        4,
        0,
    ) and took < 60  # 4 s of limits and the starts of workers; without kills it would never end
    assert len(caplog.records) == 1 and "2 s" in caplog.text
    assert len(live_children() - before) <= 2
    rewards.close()
    assert not live_children() - before


@pytest.mark.serial
def test_e1_close_ends_a_pool_that_is_busy() -> None:
    before = live_children()
    rewards = build_rewards([RewardSpec("math")], workers=1, timeout=60)
    rewards.score([sample(THIRD, answer="1/3")])  # the worker is up: the next check runs at once
    (worker,) = live_children() - before
    used = psutil.Process(worker).cpu_times().user
    samples = [sample(HANGS, answer="5"), sample(HANGS, answer="6")]  # one running, one waiting for the worker
    thread = threading.Thread(target=lambda: rewards.score(samples), daemon=True)
    thread.start()
    deadline = time.monotonic() + 50
    while psutil.Process(worker).cpu_times().user < used + 0.5 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert psutil.Process(worker).cpu_times().user >= used + 0.5
    rewards.close()
    assert not live_children() - before
    thread.join(30)
    assert not thread.is_alive()
    assert [s.reward for s in samples] == [None, None] and rewards.errors == 2


# --- scores computed but not returned, or spread over the batch


def words(text: str, count: int) -> str:
    return " ".join(text + str(i) for i in range(count))


def cases() -> dict[str, tuple[Sequence[Sample], list[float | None]]]:
    """(right, wrong, unparsable, no ground truth) for every registered reward, with the scores they must get."""
    entry = reasoning_gym.create_dataset("chain_sum", size=1, seed=3)[0]
    source = {"task": "chain_sum", "config": {}, "entry": entry}
    return {
        "exact": ([sample(" 7\n", answer=7), sample("8", answer=7), sample("", answer=7), sample("7")], [1, 0, 0, None]),
        "math": (
            [sample(r"\boxed{7}", answer="7"), sample(r"\boxed{8}", answer="7"), sample(r"\boxed{", answer="7"), sample(r"\boxed{7}")],
            [1, 0, 0, None],
        ),
        "format": (
            [sample("<think>a</think>\n<answer>7</answer>"), sample("<answer>7</answer>"), sample("<think><answer>"), sample("")],
            [1, 0, 0, 0],
        ),
        "reasoning_gym": (
            [sample(r, reasoning_gym=source) for r in (entry["answer"], "x" + "1" * 9, "")] + [sample(entry["answer"])],
            [1, 0, 0, None],
        ),
        "choice": ([sample("answer is B", answer="B"), sample("A", answer="B"), sample("", answer="B"), sample("B")], [1, 0, 0, None]),
        "json": ([sample(r, answer=a) for r, a in (("[1]", "[1.0]"), ("2", "1"), ("{", "1"))] + [sample("1")], [1, 0, 0, None]),
        "code": (
            [sample(f"print({r})", tests=[{"output": 7}]) for r in ("7", "8", "(")] + [sample("print(7)")],
            [1, 0, 0, None],
        ),
        "length": ([sample("x" * 20), sample("x" * 19), sample(""), sample("x" * 900)], [0.5, -0.5, -0.5, -0.5]),
        "length_bonus": ([sample("x" * 1000), sample("x" * 10), sample(""), sample("x" * 2000)], [1, 0.01, 0, 1]),
        "think": ([sample("x" * 20 + "</think>"), sample("x</think>"), sample(""), sample("x" * 20)], [1.25, -0.25, -0.75, -0.75]),
        "repetition": ([sample(words("a", 9)), sample("a " * 9), sample(""), sample("a b")], [0, -0.5, 0, 0]),
        "overlong": ([Sample([1], [5] * n, [-1.0] * n, [0] * n, "stop") for n in (6, 8, 10, 99)], [0, -0.5, -1, -1]),
        "judge": (
            [sample("mark=10"), sample("mark=0"), sample("none"), sample("mark=5 fail=400:9")],
            [1, 0, None, None],
        ),
        "hybrid": ([sample("7", answer="7"), sample("8", answer="7"), sample("none"), sample("mark=5")], [1, 0, None, 0.5]),
    }


@pytest.fixture(scope="module")
def judge_options() -> Iterator[dict[str, Any]]:
    with serving() as server:
        yield {"base_url": server.url, "model": "m", "retries": 1, "backoff": 0.01}


@pytest.mark.serial
@pytest.mark.parametrize("name", REGISTRY)
def test_e3_every_registered_reward_returns_its_own_scores(name: str, judge_options: dict[str, Any]) -> None:
    samples, want = cases()[name]
    options: dict[str, dict[str, Any]] = {
        "json": {"equals_answer": True},
        "code": {"timeout": 30.0},
        "overlong": {"max_tokens": 10, "buffer": 4},
        "judge": judge_options,
        "hybrid": {"rules": ["exact"], "judge": judge_options},
    }
    with build_rewards([RewardSpec(name, options=options.get(name, {}))], timeout=60) as rewards:
        rewards.score(samples)
    assert [s.reward for s in samples] == want
    assert [s.reward_parts for s in samples] == [{name: value} for value in want]
    assert rewards.errors == want.count(None)


@pytest.mark.parametrize("result", ["[1.0]", "[]", "[1.0] * 5", "1.0", "None", "{'a': 1, 'b': 2, 'c': 3, 'd': 4}", "'1234'"])
@pytest.mark.parametrize("head", ["def", "async def"])
def test_e3_wrong_number_of_values_is_an_error_naming_function_and_count(tmp_path: Path, result: str, head: str) -> None:
    rewards = build_rewards([user(tmp_path, f"{head} fn(samples):\n    return {result}\n")])
    samples = [sample(str(i)) for i in range(4)]
    with pytest.raises(ValueError, match=r"fn\.py:fn returned .* 4") as caught:
        rewards.score(samples)
    assert "4 samples" in str(caught.value) and all(s.reward is None and not s.reward_parts for s in samples)


# --- no invalid state for a reward


def scored(specs: list[RewardSpec], samples: list[Sample]) -> RewardSet:
    rewards = build_rewards(specs)
    rewards.score(samples)
    return rewards


def test_e4_none_is_left_out_of_the_group(tmp_path: Path) -> None:
    samples = [sample(r) for r in "abc"]
    rewards = scored([user(tmp_path, "def fn(samples):\n    return [{'a': 1, 'b': 0, 'c': None}[s.reply] for s in samples]\n")], samples)
    assert [s.reward for s in samples] == [1.0, 0.0, None] and rewards.errors == 1
    assign_advantages(samples, std="none")
    assert [s.advantage for s in samples] == [0.5, -0.5, 0.0]
    kept = batch_of_samples([s for s in samples if s.reward is not None])
    assert len(kept) == 2


BAD = "{head} fn(samples):\n    return [1 / (int(s.reply) != 3) for s in samples]\n"


@pytest.mark.parametrize("head", ["def", "async def"])
def test_e4_one_exception_in_eight_loses_one_sample(tmp_path: Path, head: str, caplog: pytest.LogCaptureFixture) -> None:
    samples = [sample(str(i)) for i in range(8)]
    rewards = build_rewards([user(tmp_path, BAD.format(head=head))])
    with caplog.at_level(logging.WARNING, "rlmca.rewards"):
        rewards.score(samples)
        assert rewards.errors == 1
        rewards.score(samples)
    assert [s.reward for s in samples] == [1.0] * 3 + [None] + [1.0] * 4
    assert rewards.errors == 1 and len(caplog.records) == 1
    assert "ZeroDivisionError" in caplog.text and "return [1 / (int(s.reply) != 3)" in caplog.text and "fn" in caplog.text


def test_e4_valid_parts_add_up(tmp_path: Path) -> None:
    specs = [
        user(tmp_path, "def one(samples):\n    return [1] * len(samples)\n", "one"),
        user(tmp_path, "def none(samples):\n    return [None] * len(samples)\n", "none"),
    ]
    samples = [sample("a")]
    rewards = scored(specs, samples)
    assert samples[0].reward == 1.0 and samples[0].reward_parts == {"one": 1.0, "none": None} and rewards.errors == 1


@pytest.mark.parametrize("body", ["return [None] * len(samples)", "raise RuntimeError('down')", "return [float('nan')] * len(samples)"])
def test_e4_all_invalid_is_never_a_silent_zero(tmp_path: Path, body: str, caplog: pytest.LogCaptureFixture) -> None:
    samples = [sample(r) for r in "ab"]
    with caplog.at_level(logging.WARNING, "rlmca.rewards"):
        rewards = scored([user(tmp_path, f"def fn(samples):\n    {body}\n")], samples)
    assert [s.reward for s in samples] == [None, None] and rewards.errors == 2
    assert "none of 2 samples has a valid reward" in caplog.text
    assign_advantages(samples)
    assert [s.advantage for s in samples] == [0.0, 0.0]


def test_e4_strict_aborts(tmp_path: Path) -> None:
    rewards = build_rewards([user(tmp_path, "def fn(samples):\n    raise RuntimeError('down')\n")], strict=True)
    with pytest.raises(RewardError, match="RuntimeError: down"):
        rewards.score([sample("a")])


def test_e4_a_part_of_weight_zero_does_not_make_an_invalid_sample_zero(tmp_path: Path) -> None:
    none = user(tmp_path, "def none(samples):\n    return [None] * len(samples)\n", "none")
    samples = [sample("7", answer="7")]
    scored([none, RewardSpec("exact", weight=0.0)], samples)
    assert samples[0].reward is None and samples[0].reward_parts == {"none": None, "exact": 1.0}


def test_a_function_that_raises_is_shown_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The batch is tried again one by one; the traceback is that of one try, not of a try inside another's handling."""
    with caplog.at_level(logging.WARNING, "rlmca.rewards"):
        samples = [sample("7"), sample("8")]
        scored([user(tmp_path, "def fn(samples):\n    raise KeyError('solution')\n")], samples)
    assert [one.reward for one in samples] == [None, None]
    assert caplog.text.count("KeyError: 'solution'") == 1 and "During handling" not in caplog.text
