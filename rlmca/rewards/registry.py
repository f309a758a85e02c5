"""The rewards known by name, and the check of their options."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from rlmca.rewards.base import Reward
from rlmca.rewards.choice import ChoiceOptions, choice
from rlmca.rewards.code import CodeOptions, code_reward
from rlmca.rewards.exact import ExactOptions, exact
from rlmca.rewards.format import FormatOptions, format_reward
from rlmca.rewards.hybrid import HybridOptions, hybrid
from rlmca.rewards.json_reward import JsonOptions, json_reward
from rlmca.rewards.judge import JudgeOptions, judge
from rlmca.rewards.math import MathOptions, math_reward
from rlmca.rewards.pool import CheckPool
from rlmca.rewards.reasoning_gym import ReasoningGymOptions, reasoning_gym_reward
from rlmca.rewards.shape import (
    LengthBonusOptions,
    LengthOptions,
    OverlongOptions,
    RepetitionOptions,
    ThinkOptions,
    length,
    length_bonus,
    overlong,
    repetition,
    think,
)
from rlmca.rewards.user import user_reward


@dataclass(frozen=True)
class Entry:
    """A registered reward: its factory, the dataclass of its options, the module its checks need in the pool."""

    make: Callable[[Any, CheckPool], Reward]
    options: type
    module: str | None = None


def _hybrid(options: HybridOptions, pool: CheckPool) -> Reward:
    return hybrid(options, pool, build_reward, read_options("judge", JudgeOptions, options.judge))


REGISTRY: Mapping[str, Entry] = MappingProxyType(
    {
        "exact": Entry(exact, ExactOptions),
        "choice": Entry(choice, ChoiceOptions),
        "math": Entry(math_reward, MathOptions, module="math_verify"),
        "json": Entry(json_reward, JsonOptions, module="jsonschema"),
        "code": Entry(code_reward, CodeOptions),
        "reasoning_gym": Entry(reasoning_gym_reward, ReasoningGymOptions, module="reasoning_gym"),
        "format": Entry(format_reward, FormatOptions),
        "length": Entry(length, LengthOptions),
        "length_bonus": Entry(length_bonus, LengthBonusOptions),
        "overlong": Entry(overlong, OverlongOptions),
        "repetition": Entry(repetition, RepetitionOptions),
        "think": Entry(think, ThinkOptions),
        "judge": Entry(judge, JudgeOptions),
        "hybrid": Entry(_hybrid, HybridOptions),
    }
)


def modules_of(name: str, options: Mapping[str, Any]) -> list[str]:
    """What the checking processes of a reward import before they take checks, its rules' included."""
    rules = options.get("rules") if name == "hybrid" else None
    found = [entry.module] if (entry := REGISTRY.get(name)) and entry.module else []
    for rule in rules if isinstance(rules, (list, tuple)) else ():
        if isinstance(rule, str):
            found += modules_of(rule, {})
        elif isinstance(rule, Mapping):
            found += modules_of(str(rule.get("name")), rule.get("options") or {})
    return found


def build_reward(name: str, options: Mapping[str, Any], pool: CheckPool) -> Reward:
    """The reward of that name, or the user function at that path. Raises ValueError for a name or option unknown."""
    if ":" in name:
        return user_reward(name, options)
    entry = REGISTRY.get(name)
    if entry is None:
        near = difflib.get_close_matches(name, REGISTRY, 1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(
            f"reward {name!r} is unknown; {hint}write one of {', '.join(REGISTRY)}, or path/file.py:function or package.module:function"
        )
    made = read_options(name, entry.options, options)
    try:
        return entry.make(made, pool)
    except ValueError as error:  # what only the machine can say: a file, a sandbox, a rule inside
        raise ValueError(f"reward {name!r}: {error}") from None


def read_options(name: str, kind: type, options: Mapping[str, Any]) -> Any:
    """`options` as the dataclass `kind`. Raises ValueError naming what is unknown, of the wrong type or refused."""
    types_of = typing.get_type_hints(kind)
    fields = [field.name for field in dataclasses.fields(kind)]
    values: dict[str, Any] = {}
    for key, value in options.items():
        if key not in types_of:
            near = difflib.get_close_matches(str(key), fields, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"reward {name!r} has no option {key!r}{hint} Its options: {', '.join(fields) or 'none'}")
        values[key] = _typed(f"reward {name!r}, option {key!r}", types_of[key], value)
    try:
        return kind(**values)
    except ValueError as error:
        raise ValueError(f"reward {name!r}: {error}") from None


def _typed(where: str, wanted: Any, value: Any) -> Any:
    kinds = typing.get_args(wanted) if isinstance(wanted, types.UnionType) else (wanted,)
    for kind in kinds:
        if typing.get_origin(kind) is tuple:
            if isinstance(value, (list, tuple)) and all(isinstance(item, typing.get_args(kind)[0]) for item in value):
                return tuple(value)
        elif kind is float and isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
        elif isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
            return value
    shown = " or ".join("a list of text" if typing.get_origin(c) is tuple else getattr(c, "__name__", str(c)) for c in kinds)
    raise ValueError(f"{where}: {value!r} is {type(value).__name__}, it must be {shown.replace('NoneType', 'null')}")
