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
from rlmca.rewards.exact import ExactOptions, exact
from rlmca.rewards.format import FormatOptions, format_reward
from rlmca.rewards.math import MathOptions, math_reward
from rlmca.rewards.pool import CheckPool
from rlmca.rewards.reasoning_gym import ReasoningGymOptions, reasoning_gym_reward
from rlmca.rewards.user import user_reward


@dataclass(frozen=True)
class Entry:
    """A registered reward: its factory, the dataclass of its options, the module its checks need in the pool."""

    make: Callable[[Any, CheckPool], Reward]
    options: type
    module: str | None = None


REGISTRY: Mapping[str, Entry] = MappingProxyType(
    {
        "exact": Entry(exact, ExactOptions),
        "format": Entry(format_reward, FormatOptions),
        "math": Entry(math_reward, MathOptions, module="math_verify"),
        "reasoning_gym": Entry(reasoning_gym_reward, ReasoningGymOptions, module="reasoning_gym"),
    }
)


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
    return entry.make(read_options(name, entry.options, options), pool)


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
    choices = typing.get_args(wanted) if isinstance(wanted, types.UnionType) else (wanted,)
    for choice in choices:
        if typing.get_origin(choice) is tuple:
            if isinstance(value, (list, tuple)) and all(isinstance(item, typing.get_args(choice)[0]) for item in value):
                return tuple(value)
        elif choice is float and isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
        elif isinstance(value, choice) and not (choice is int and isinstance(value, bool)):
            return value
    shown = " or ".join("a list of text" if typing.get_origin(c) is tuple else getattr(c, "__name__", str(c)) for c in choices)
    raise ValueError(f"{where}: {value!r} is {type(value).__name__}, it must be {shown.replace('NoneType', 'null')}")
