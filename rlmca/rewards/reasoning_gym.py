"""Reward `reasoning_gym`: the task's own verifier (reasoning-gym's `score_answer`)."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlmca.rewards.base import Failure, Reward, Verdict
from rlmca.rewards.pool import CheckPool

if TYPE_CHECKING:
    from rlmca.types import Sample


_NUMBER = re.compile(r"[+-]?\d{1,30}(\.\d{1,30})?")


@dataclass(frozen=True)
class ReasoningGymOptions:
    """`reasoning_gym` has no options."""


def reasoning_gym_reward(options: ReasoningGymOptions, pool: CheckPool) -> Reward:
    """The verifier's score, in [0, 1] for most tasks.

    The row holds `reasoning_gym: {task, config, entry}` (a mapping, or its JSON text); `entry` is the item as
    the data set made it. What is scored is the last `<answer>...</answer>` of the reply if there is one, else
    the whole reply, white space at the ends removed. Some verifiers evaluate what the reply says, so they run
    in the pool; what cannot hang is scored here: tasks that compare texts, and replies that are one number.
    """

    def score(samples: Sequence[Sample]) -> list[Verdict]:
        verdicts: list[Verdict] = [None] * len(samples)
        pooled: list[tuple[int, tuple[str, str, str, dict[str, Any]]]] = []
        for at, sample in enumerate(samples):
            try:
                task, config, entry = _read(sample.row)
                answer = answer_in(sample.reply)
                if _NUMBER.fullmatch(answer) or compares_texts(task, config):
                    verdicts[at] = verify(answer, task, config, entry)
                else:
                    pooled.append((at, (answer, task, config, entry)))
            except Exception as error:
                verdicts[at] = Failure.of(error)
        for (at, _), outcome in zip(pooled, pool.run(verify, [call for _, call in pooled]), strict=True):
            verdicts[at] = outcome
        return verdicts

    return score


def answer_in(reply: str) -> str:
    """What of the reply is scored; see `reasoning_gym_reward`."""
    from reasoning_gym.utils import extract_answer

    tagged = extract_answer(reply)
    return reply.strip() if tagged is None else tagged


def verify(answer: str, task: str, config: str, entry: dict[str, Any]) -> float:
    """Score of an answer by the task's verifier; `config` is JSON text."""
    return float(dataset(task, config).score_answer(answer, entry))


@functools.lru_cache(maxsize=256)
def dataset(task: str, config: str) -> Any:
    """The data set object that owns the verifier, made once for each task and configuration."""
    import reasoning_gym

    return reasoning_gym.create_dataset(task, **json.loads(config))


def compares_texts(task: str, config: str) -> bool:
    """Whether the task's verifier is the plain comparison of texts that all tasks inherit."""
    from reasoning_gym.dataset import ProceduralDataset

    return type(dataset(task, config)).score_answer is ProceduralDataset.score_answer


def _read(row: Mapping[str, Any]) -> tuple[str, str, dict[str, Any]]:
    source = row.get("reasoning_gym")
    if isinstance(source, str):
        source = json.loads(source)
    if not isinstance(source, Mapping) or not {"task", "entry"} <= source.keys():
        raise ValueError(
            "reward reasoning_gym: the data row has no `reasoning_gym: {task, config, entry}`; "
            f"its columns are {', '.join(map(str, row)) or 'none'}. Data sets named reasoning_gym:TASK have it"
        )
    return str(source["task"]), json.dumps(source.get("config") or {}, sort_keys=True), dict(source["entry"])
