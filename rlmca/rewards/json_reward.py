"""Reward `json`: the reply is JSON, keeps to a schema, equals the answer."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rlmca.rewards.base import Failure, Reward, Verdict, answer_of
from rlmca.rewards.pool import CheckPool
from rlmca.rewards.schema_check import schema_error, valid
from rlmca.rewards.text import after_thought, last_block

if TYPE_CHECKING:
    from rlmca.types import Sample


@dataclass(frozen=True)
class JsonOptions:
    """`schema`: a JSON schema. `required`: keys that the object must have. `equals_answer`: must equal the row's `answer` as JSON."""

    schema: dict = field(default_factory=dict)
    required: tuple[str, ...] = ()
    equals_answer: bool = False

    def __post_init__(self) -> None:
        if self.schema and (problem := schema_error(dict(self.schema))):
            raise ValueError(f"option 'schema' is no JSON schema: {problem}")


def json_reward(options: JsonOptions, pool: CheckPool) -> Reward:
    """1 when the reply has all that is asked, else 0.

    What is read is the last complete ```json block (or one without a name), else all that follows the last `</think>`.
    NaN and Infinity are no JSON. Numbers are equal by value (1 = 1.0, true is no number), objects in any order. The
    schema is checked in the pool, each check bounded in time; references to other documents are not fetched.
    """
    schema = json.dumps(dict(options.schema))

    def score(samples: Sequence[Sample]) -> list[Verdict]:
        verdicts: list[Verdict] = [0.0] * len(samples)
        to_check: list[tuple[int, str]] = []
        for at, sample in enumerate(samples):
            try:
                wanted = parse(answer_of(sample, "json"), "the row's `answer`") if options.equals_answer else None
            except ValueError as error:
                verdicts[at] = Failure.of(error)
                continue
            text = document_of(sample.reply)
            try:
                found = parse(text, "the reply")
                has_keys = not options.required or (isinstance(found, Mapping) and all(key in found for key in options.required))
                verdicts[at] = float(has_keys and (not options.equals_answer or same(found, wanted)))
            except (ValueError, RecursionError):
                continue
            if verdicts[at] and options.schema:
                to_check.append((at, text))
        outcomes = pool.run(valid, [(schema, text) for _, text in to_check])
        for (at, _), outcome in zip(to_check, outcomes, strict=True):
            verdicts[at] = outcome if isinstance(outcome, Failure) else float(outcome)
        return verdicts

    return score


def document_of(reply: str) -> str:
    """The JSON text of a reply; see `json_reward`."""
    said = after_thought(reply)
    block = last_block(said, ("json", ""))
    return said.strip() if block is None else block


def parse(text: str, where: str) -> Any:
    """`text` as JSON. Raises ValueError naming `where`."""

    def refuse(name: str) -> Any:
        raise ValueError(f"{name} is no JSON")

    try:
        return json.loads(text, parse_constant=refuse)
    except ValueError as error:
        raise ValueError(f"reward json: {where} is no JSON: {error}") from None
    except RecursionError:
        raise ValueError(f"reward json: {where} is nested too deeply") from None


def same(a: Any, b: Any) -> bool:
    """Equality of JSON values."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(value, b[key]) for key, value in a.items())
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, float) and math.isinf(a):
        return False  # a number too large to hold equals nothing
    return type(a) is type(b) and a == b or (isinstance(a, (int, float)) and isinstance(b, (int, float)) and a == b)
