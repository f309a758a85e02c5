"""Replies of a policy that repeats itself: reading the answer takes time in proportion to their length."""

from __future__ import annotations

import time

import pytest

from rlmca.rewards.math import extract_answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("\\boxed{" * 20_000, None),
        ("\\boxed{7}" + "\\boxed{" * 20_000, "7"),
        ("answer is" + "\n" * 60_000, None),
        (("answer" + " " * 50) * 3_000, None),
        ("\\boxed{1} \\boxed{\\text{a} \\boxed{2}", "2"),
        ("\\boxed{1} \\boxed{", "1"),
        ("The answer is 4. The answer is: \n 5.", "5"),
    ],
)
def test_the_answer_is_found_at_once(text: str, answer: str | None) -> None:
    start = time.process_time()
    assert extract_answer(text) == answer
    assert time.process_time() - start < 2
