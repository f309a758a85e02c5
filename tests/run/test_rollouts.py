"""Rollout files: everything a sample holds, whole files only, errors that surface."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from rlmca.run.rollouts import RolloutWriter, read_rollout
from rlmca.types import Sample


def sample(group: int, k: int, **changes: object) -> Sample:
    kept = {
        "prompt_ids": [1, 2, group],
        "reply_ids": [3, 4],
        "reply_logp": [-0.5, -0.25],
        "versions": [6, 7],
        "finish": "stop",
        "reply": "x\u2028😀",
        "row": {"answer": "42", "messages": []},
        "group": group,
        "k": k,
        "reward": 1.0,
        "reward_parts": {"exact": 1.0, "format": None},
        "advantage": 0.75,
    }
    return Sample(**{**kept, **changes})


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    asked = []

    def text(ids: list[int]) -> str:
        asked.append(tuple(ids))
        return f"prompt {ids[-1]}"

    with RolloutWriter(tmp_path, prompt_text=text) as writer:
        writer.write(3, [sample(g, k) for g in range(2) for k in range(3)])
    rows = list(read_rollout(tmp_path / "rollouts" / "step-3.jsonl.zst"))
    assert [(r["group"], r["k"]) for r in rows] == [(g, k) for g in range(2) for k in range(3)]
    assert rows[4] == {
        "step": 3, "group": 1, "k": 1, "prompt": "prompt 1", "prompt_ids": [1, 2, 1], "reply": "x\u2028😀", "reply_ids": [3, 4],
        "logp": [-0.5, -0.25], "versions": [6, 7], "finish": "stop", "reward": 1.0, "reward_parts": {"exact": 1.0, "format": None},
        "advantage": 0.75, "answer": "42",
    }  # fmt: skip
    assert asked == [(1, 2, 0), (1, 2, 1)]  # once a group


def test_invalid_and_non_finite_become_null(tmp_path: Path) -> None:
    with RolloutWriter(tmp_path) as writer:
        writer.write(1, [sample(0, 0, reward=None, reply_logp=[math.nan, -math.inf])])
    (row,) = read_rollout(tmp_path / "rollouts" / "step-1.jsonl.zst")
    assert row["reward"] is None and row["logp"] == [None, None] and row["prompt"] is None


def test_rewards_written_are_those_at_the_time_of_the_call(tmp_path: Path) -> None:
    samples = [sample(0, k) for k in range(200)]
    with RolloutWriter(tmp_path) as writer:
        writer.write(1, samples)
        for s in samples:
            s.reward, s.reward_parts["exact"], s.advantage = -1.0, -1.0, -1.0
    assert all(
        r["reward"] == 1.0 and r["reward_parts"]["exact"] == 1.0 and r["advantage"] == 0.75
        for r in read_rollout(tmp_path / "rollouts" / "step-1.jsonl.zst")
    )


def test_an_error_of_a_write_surfaces_at_the_next_one_or_at_close(tmp_path: Path) -> None:
    (tmp_path / "rollouts").write_text("a file where the folder should be")
    writer = RolloutWriter(tmp_path)
    writer.write(1, [sample(0, 0)])
    with pytest.raises(OSError):
        writer.write(2, [sample(0, 0)])
    writer.write(3, [sample(0, 0)])
    with pytest.raises(OSError):
        writer.close()


def test_a_failed_write_leaves_no_part(tmp_path: Path) -> None:
    def broken(ids: list[int]) -> str:
        raise RuntimeError("no text")

    writer = RolloutWriter(tmp_path, prompt_text=broken)
    writer.write(1, [sample(0, 0)])
    with pytest.raises(RuntimeError, match="no text"):
        writer.close()
    assert not (tmp_path / "rollouts").exists() or list((tmp_path / "rollouts").iterdir()) == []


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    with RolloutWriter(tmp_path, is_main=False) as writer:
        writer.write(1, [sample(0, 0)])
    assert list(tmp_path.iterdir()) == []
