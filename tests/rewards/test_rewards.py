from __future__ import annotations

import functools
import itertools
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy
import psutil  # type: ignore[import-untyped]
import pytest
import reasoning_gym
import torch

from rlmca.config import RewardSpec
from rlmca.rewards import Failure, build_rewards
from rlmca.rewards.format import has_tags
from rlmca.rewards.math import compare_plainly, extract_answer
from rlmca.rewards.math_check import equal
from rlmca.rewards.pool import CheckPool
from rlmca.rewards.reasoning_gym import compares_texts
from rlmca.types import Sample


def sample(reply: str, **row: Any) -> Sample:
    return Sample([1], [5, 2], [-1.0, -1.0], [0, 0], "stop", reply=reply, row=row)


def scores(spec: RewardSpec, samples: list[Sample]) -> list[float | None]:
    with build_rewards([spec], timeout=30) as rewards:
        rewards.score(samples)
    return [s.reward for s in samples]


def write(tmp_path: Path, code: str) -> str:
    (tmp_path / "mine.py").write_text(code)
    return str(tmp_path / "mine.py")


# --- math: extraction and comparison


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"first \boxed{1} then \boxed{\frac{1}{\sqrt{2}}}.", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{a} and an open \boxed{b", "a"),
        (r"\fbox{3}", "3"),
        (r"\boxed {4}", "4"),
        ("5 + 5 = 10\n#### 10\n", "10"),
        ("#### 1\n#### 2", "2"),
        ("The answer is 3.5. Thanks", "3.5"),
        ("The answer is 4. No, the Answer is: $\\frac12$.", "\\frac12"),
        ("the answer is\n**12**", "12"),
        (r"the answer is 5, or \boxed{6}; #### 7", "6"),
        ("just 7", None),
        ("", None),
        (r"\boxed{", None),
    ],
)
def test_extract_answer(text: str, answer: str | None) -> None:
    assert extract_answer(text) == answer


@pytest.mark.parametrize(
    ("gold", "found", "want"),
    [
        ("7", "7", True), ("7", "7.0", True), ("+7", "7", True), ("7", "8", False), ("7", None, False), ("7", "", False),
        ("0.333", "0.3333", None), ("1/3", "0.5", None), ("x+1", "x+1", True), ("", "7", None), ("1" * 400, "2", None),
    ],
)  # fmt: skip
def test_plain_comparison_decides_only_what_is_certain(gold: str, found: str | None, want: bool | None) -> None:
    assert compare_plainly(gold, found) is want


@pytest.mark.parametrize(
    ("gold", "found", "want"),
    [
        ("1/3", r"\frac{1}{3}", True), (r"\{1,2\}", r"\{2,1\}", True), ("1234", "1,234", True), ("10", r"10\text{ cm}", True),
        (r"50\%", "0.5", True), ("5", "x=5", True), (r"x^2+2x+1", "(x+1)^2", True), ("(1,2)", "(2,1)", False), ("1/3", r"\begin{", False),
    ],
)  # fmt: skip
def test_equal_as_mathematics(gold: str, found: str, want: bool) -> None:
    assert equal(gold, found) is want


def test_an_answer_that_is_no_mathematics_is_named() -> None:
    with pytest.raises(ValueError, match=r"'\?\?\?' cannot be read as mathematics; the reward `exact`"):
        equal("???", "3")


@pytest.mark.serial
def test_math_scores_in_order_with_worked_solutions_as_ground_truth() -> None:
    samples = [
        sample("#### 72", answer="48/2 = 24\n48+24 = 72\n#### 72"),
        sample("the answer is 0.5", answer=r"\boxed{\frac12}"),
        sample("no answer", answer="1"),
        sample(r"\boxed{2}", answer=""),
        sample(r"\boxed{2\sqrt3}", answer=r"\sqrt{12}"),
    ]
    assert scores(RewardSpec("math"), samples) == [1.0, 1.0, 0.0, None, 1.0]


def test_plain_answers_start_no_process() -> None:
    before = len(psutil.Process().children(recursive=True))
    samples = [sample(rf"\boxed{{{i}}}", answer=str(i % 3)) for i in range(1024)]
    assert scores(RewardSpec("math"), samples) == [float(i < 3) for i in range(1024)]
    assert len(psutil.Process().children(recursive=True)) == before


# --- format, exact


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("<think>a</think><answer>1</answer>", True),
        ("\n<think></think>\n\n<answer> 1 </answer> \n", True),
        ("<think>a</think><answer> </answer>", False),
        ("<think>a</think>x<answer>1</answer>", False),
        ("<answer>1</answer><think>a</think>", False),
        ("<think>a</think><answer>1</answer>.", False),
        ("<think><answer>1</answer></think>", False),
        ("<think>a</think><answer>1</answer><answer>1</answer>", False),
        ("</think>a<think><answer>1</answer>", False),
    ],
)
def test_tags(text: str, want: bool) -> None:
    assert has_tags(text, ("think", "answer")) is want


def test_format_options() -> None:
    assert scores(RewardSpec("format", options={"pattern": r"\d+(\n.*)?"}), [sample(" 12\nab "), sample("12ab")]) == [1.0, 0.0]
    assert scores(RewardSpec("format", options={"tags": ["answer"]}), [sample("<answer>1</answer>"), sample("1")]) == [1.0, 0.0]


def test_a_pattern_that_backtracks_for_ever_is_stopped() -> None:
    rewards = build_rewards([RewardSpec("format", options={"pattern": r"(.*?,){25}P.*"})], timeout=0.2)
    samples = [sample("1," * 60)]
    rewards.score(samples)
    assert samples[0].reward == 0.0 and rewards.timeouts == 1


def test_exact_compares_text() -> None:
    assert scores(RewardSpec("exact"), [sample(" 12 ", answer=12), sample("12.0", answer=12), sample("A", answer="a")]) == [1.0, 0.0, 0.0]


# --- reasoning_gym


def test_reasoning_gym_scores_numbers_and_texts_without_a_process() -> None:
    before = len(psutil.Process().children(recursive=True))
    samples = []
    for task in ("chain_sum", "caesar_cipher"):
        entry = reasoning_gym.create_dataset(task, size=1, seed=1)[0]
        samples += [sample(r, reasoning_gym={"task": task, "config": {}, "entry": entry}) for r in (entry["answer"], "-1.5")]
    assert scores(RewardSpec("reasoning_gym"), samples) == [1.0, 0.0, 1.0, 0.0]
    assert len(psutil.Process().children(recursive=True)) == before


@pytest.mark.serial
def test_reasoning_gym_equals_the_tasks_own_score() -> None:
    data = reasoning_gym.create_dataset("chain_sum", size=5, seed=1)
    replies = ["0", " {0} ", "it is {0}", "<think>x</think><answer>{0}</answer>", ""]
    samples, want = [], []
    for entry, reply in zip(data, replies, strict=True):
        text = reply.format(entry["answer"])
        samples.append(sample(text, reasoning_gym={"task": "chain_sum", "config": {"min_terms": 2}, "entry": entry}))
        shown = entry["answer"] if "<answer>" in text else text.strip()
        want.append(data.score_answer(shown, entry))
    assert scores(RewardSpec("reasoning_gym"), samples) == want and want[1] == want[3] == 1.0


@pytest.mark.serial
def test_reasoning_gym_verifiers_of_their_own_run_in_the_pool() -> None:
    assert compares_texts("caesar_cipher", "{}") and not compares_texts("countdown", "{}")
    data = reasoning_gym.create_dataset("countdown", size=1, seed=1)
    entry = data[0]
    samples = [sample(r, reasoning_gym={"task": "countdown", "config": {}, "entry": entry}) for r in (entry["metadata"]["expression"], "1")]
    got = scores(RewardSpec("reasoning_gym"), samples)
    assert got == [data.score_answer(s.reply, entry) for s in samples] and got[0] == 1.0 and got[1] is not None and got[1] < 1


def test_reasoning_gym_unknown_task_is_invalid() -> None:
    entry = {"question": "?", "answer": "1", "metadata": {}}
    assert scores(RewardSpec("reasoning_gym"), [sample("1", reasoning_gym={"task": "no_such", "config": {}, "entry": entry})]) == [None]


# --- user functions


@pytest.mark.parametrize("head", ["def", "async def"])
def test_user_function_by_path(tmp_path: Path, head: str) -> None:
    code = f"from dataclasses import dataclass\n@dataclass\nclass C:\n    x: int\n{head} f(samples, scale=1.0):\n"
    path = write(tmp_path, code + "    return [scale * len(s.reply) + s.row['bonus'] for s in samples]\n")
    assert scores(RewardSpec(f"{path}:f", weight=0.5, options={"scale": 2}), [sample("ab", bonus=1), sample("", bonus=0)]) == [2.5, 0.0]


def test_user_function_by_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_reward_package").mkdir()
    (tmp_path / "my_reward_package" / "inner.py").write_text("def length(samples):\n    return [len(s.reply) for s in samples]\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert scores(RewardSpec("my_reward_package.inner:length"), [sample("abc")]) == [3.0]


def test_async_functions_run_together_and_inside_a_running_loop(tmp_path: Path) -> None:
    import asyncio

    code = """
import asyncio
async def f(samples):
    barrier = asyncio.Barrier(len(samples))
    async def one(sample):
        await barrier.wait()
        return float(sample.reply)
    return await asyncio.gather(*(one(s) for s in samples))
"""
    spec = RewardSpec(f"{write(tmp_path, code)}:f")

    async def inside() -> list[float | None]:
        return scores(spec, [sample("1"), sample("2")])

    assert asyncio.run(inside()) == [1.0, 2.0]


@pytest.mark.parametrize("value", ["'1.0'", "[1.0]", "1j", "object()"])
def test_user_values_must_be_numbers(tmp_path: Path, value: str) -> None:
    path = write(tmp_path, f"def f(samples):\n    return [0.0, {value}]\n")
    with pytest.raises(ValueError, match=r"mine\.py:f returned .* for sample 1; it must be a float or None"):
        scores(RewardSpec(f"{path}:f"), [sample(""), sample("")])


def test_numbers_of_every_kind_are_taken(tmp_path: Path) -> None:
    import fractions

    code = """
import fractions, numpy, torch
def f(samples):
    return [1, True, numpy.float32(.5), torch.tensor(2.0), fractions.Fraction(1, 4), numpy.int64(3), None]
def array(samples):
    return numpy.arange(len(samples))
def tensor(samples):
    return torch.arange(len(samples)) / 2
"""
    path = write(tmp_path, code)
    assert scores(RewardSpec(f"{path}:f"), [sample("")] * 7) == [None] * 7  # one object seven times: the last value stands
    separate = [sample("") for _ in range(7)]
    assert scores(RewardSpec(f"{path}:f"), separate) == [1.0, 1.0, 0.5, 2.0, float(fractions.Fraction(1, 4)), 3.0, None]
    for name, want in (("array", numpy.arange(3).tolist()), ("tensor", (torch.arange(3) / 2).tolist())):
        assert scores(RewardSpec(f"{path}:{name}"), [sample("") for _ in range(3)]) == want


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("exct", {}, r"'exct' is unknown; did you mean 'exact'\? write one of exact, choice, math, json, code, reasoning_gym, "),
        ("exact", {"strip": True}, "'exact' has no option 'strip'"),
        ("format", {"patern": "a"}, r"'format' has no option 'patern'; did you mean 'pattern'\?"),
        ("format", {"pattern": 3}, "option 'pattern': 3 is int, it must be str or null"),
        ("format", {"tags": "answer"}, "'answer' is str, it must be a list of text"),
        ("format", {"pattern": "("}, r"'\(' is no regular expression"),
        ("format", {"tags": []}, "at least one"),
        ("nowhere.py:f", {}, "there is no file"),
        ("no_such_module:f", {}, "importing module 'no_such_module' failed"),
        ("math:no_such", {}, r"has no function 'no_such'; it has .*sqrt"),
        ("math:sqrt", {"unit": 1}, "cannot be called as function.*unexpected keyword argument 'unit'"),
    ],
)
def test_mistakes_are_named_when_built(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_rewards([RewardSpec(name, options=options)])


def test_a_file_that_does_not_import_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"mine\.py failed: SyntaxError"):
        build_rewards([RewardSpec(write(tmp_path, "def f(:\n") + ":f")])


# --- the set


def test_weights_and_columns(tmp_path: Path) -> None:
    path = write(tmp_path, "def exact(samples):\n    return [2.0] * len(samples)\n")
    specs = [RewardSpec("exact", 1.0), RewardSpec(f"{path}:exact", -0.5), RewardSpec("exact", 0.25)]
    rewards = build_rewards(specs)
    samples = [sample("7", answer="7"), sample("8", answer="7")]
    rewards.score(samples)
    assert rewards.names == ("exact", "exact_2", "exact_3")
    assert [s.reward for s in samples] == [0.25, -1.0] and samples[0].reward_parts == {"exact": 1.0, "exact_2": 2.0, "exact_3": 1.0}


@pytest.mark.parametrize(
    ("specs", "message"),
    [([], "there is no reward"), ([RewardSpec("exact", math.nan)], "weight nan"), ([RewardSpec("exact", 0.0)], "all reward weights are 0")],
)
def test_sets_that_cannot_score_are_refused(specs: list[RewardSpec], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_rewards(specs)


def test_no_samples_is_no_error() -> None:
    rewards = build_rewards([RewardSpec("exact"), RewardSpec("math"), RewardSpec("math:sqrt")])
    rewards.score([])
    assert (rewards.errors, rewards.timeouts) == (0, 0)


# --- the pool


@pytest.mark.serial
def test_pool_kills_loops_inside_c_code_reports_deaths_and_starts_again() -> None:
    endless = functools.partial(sum, itertools.count())  # never runs a bytecode, so never a Python signal handler
    pool = CheckPool(2, 1.0)
    try:
        (hung,) = pool.run(endless, [()])
        rest = pool.run(math.sqrt, [(4.0,), (-1.0,)])
        assert isinstance(hung, Failure) and hung.kind == "timeout"
        assert rest[0] == 2.0 and isinstance(rest[1], Failure) and (rest[1].kind, rest[1].cause) == ("error", "ValueError")
        (died,) = pool.run(os._exit, [(3,)])
        assert isinstance(died, Failure) and died.kind == "error" and died.cause == "ProcessExpired"
        assert pool.run(math.sqrt, [(9.0,)]) == [3.0]
        pool.close()
        assert pool.run(math.sqrt, [(16.0,)]) == [4.0]
    finally:
        pool.close()


@pytest.mark.serial
def test_memory_of_a_check_is_bounded() -> None:
    pool = CheckPool(1, 30.0)
    try:
        (outcome,) = pool.run(bytearray, [(6 * 2**30,)])
        assert isinstance(outcome, Failure) and outcome.cause == "MemoryError"
    finally:
        pool.close()


@pytest.mark.parametrize(("workers", "timeout"), [(0, 1.0), (1, 0.0), (1, math.nan)])
def test_pool_needs_workers_and_a_limit(workers: int, timeout: float) -> None:
    with pytest.raises(ValueError, match="at least 1 worker and a positive limit"):
        CheckPool(workers, timeout)


def test_checking_processes_load_neither_torch_nor_the_engine() -> None:
    code = "import sys, rlmca.rewards, rlmca.rewards.math_check; print(sorted({'torch', 'megatron', 'transformers'} & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    assert out.stdout.strip() == "[]"
