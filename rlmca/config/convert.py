"""From a plain YAML value to a key's type, with an error that names the key and says what to write."""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import urlsplit

from rlmca.config.rewards import REGISTERED_REWARDS, REWARDS_LATER, RewardSpec
from rlmca.config.schema import Key
from rlmca.config.sglang import LATER, SglangOptions, SyncOptions

_TRUE = {"true", "yes", "on", "y", "t", "1"}
_FALSE = {"false", "no", "off", "n", "f", "0"}


class Unfit(ValueError):
    """A value that does not fit its key; the text says what to write."""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name most like `name`, if any is like it."""
    lowered = {candidate.lower(): candidate for candidate in known}
    found = difflib.get_close_matches(name.lower(), lowered, n=1, cutoff=0.6)
    return lowered[found[0]] if found else None


def convert(key: Key, value: Any) -> Any:
    """`value` as the key's type, within its rule; raises Unfit."""
    kind = key.type
    optional = isinstance(kind, types.UnionType) and type(None) in typing.get_args(kind)
    if optional:
        if value is None or value == "":
            return None
        kind = next(k for k in typing.get_args(kind) if k is not type(None))
    made = _SPECIAL[key.name](value) if key.name in _SPECIAL else _to(kind, value, key)
    for item in made if isinstance(made, list) else [made]:
        problem = key.rule.problem(item)
        if problem:
            raise Unfit(problem)
    return made


def _to(kind: Any, value: Any, key: Key) -> Any:
    origin = typing.get_origin(kind)
    if origin is list:
        return _to_list(value, key.rule.split)
    if origin is dict:
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise Unfit(f"expected `name: value` pairs, got {value!r}")
        return {str(name): item for name, item in value.items()}
    if value is None:
        raise Unfit("has no value: give one or leave the key out")
    return {bool: _to_bool, int: _to_int, float: _to_float, str: _to_str}[kind](value)


def _to_bool(value: Any) -> bool:
    text = str(value).strip().lower()
    if not isinstance(value, float) and text in _TRUE | _FALSE:
        return text in _TRUE
    raise Unfit(f"{value!r} is neither true nor false")


def _to_float(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise Unfit(f"{value!r} is not a number")
    try:
        made = float(value)
    except (ValueError, OverflowError):
        raise Unfit(f"{value!r} is not a number") from None
    if not math.isfinite(made):
        raise Unfit(f"{value!r} is not a finite number")
    return made


def _to_int(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            pass
    made = _to_float(value)
    if made != int(made):
        raise Unfit(f"{value!r} is not a whole number")
    return int(made)


def _to_str(value: Any) -> str:
    if isinstance(value, str):
        if any("\ud800" <= character <= "\udfff" for character in value):
            raise Unfit(f"{value!a} is not valid Unicode")
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    raise Unfit(f"expected text, got {value!r}: put it in quotes if it is meant as text")


def _to_list(value: Any, split: bool) -> list[str]:
    if value is None or value == "":
        return []
    if isinstance(value, list):
        return [_to_str(item) for item in value]
    text = _to_str(value)
    return [part.strip() for part in text.split(",") if part.strip()] if split else [text]


def _steps(value: Any) -> int:
    if isinstance(value, float) and 0 < value < 1:
        raise Unfit(f"{value} as a share of the run is not in this version; write a whole number of steps")
    return _to_int(value)


def _tracker_list(value: Any) -> list[str]:
    names = [name for name in _to_list(value, True) if name.lower() != "none"]
    if "all" in names:
        raise Unfit("all: name the trackers, for example tensorboard")
    return names


def _resume(value: Any) -> str | None:
    if isinstance(value, bool) or str(value).lower() in {"true", "false", "auto"}:
        return "auto" if str(value).lower() in {"true", "auto"} else None
    return _to_str(value)


def _numbers(value: Any) -> list[float]:
    parts = value if isinstance(value, list) else [value] if isinstance(value, (int, float)) else _to_list(value, True)
    return [_to_float(part) for part in parts]


def _engine_name(value: Any) -> str:
    return "local" if value == "torch" else _to_str(value)


def _rewards(value: Any) -> list[RewardSpec]:
    if isinstance(value, dict):
        value = [value]
    entries = value if isinstance(value, list) else _to_list(value, True)
    return [_reward(entry) for entry in entries]


def _reward(entry: Any) -> RewardSpec:
    if isinstance(entry, str):
        entry = {"name": entry}
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str) or not entry["name"]:
        raise Unfit(f"{entry!r}: write a name or {{name: math, weight: 1.0, options: {{...}}}}")
    name = entry["name"]
    if name in REWARDS_LATER:
        raise Unfit(REWARDS_LATER[name])
    if ":" not in name and name not in REGISTERED_REWARDS:
        close = nearest(name, REGISTERED_REWARDS)
        known = f"known: {', '.join(REGISTERED_REWARDS)}, path/file.py:function, package.module:function"
        hint = f"did you mean {close}?" if close else known
        raise Unfit(f"there is no reward {name}; {hint}")
    for field in entry:
        if field not in ("name", "weight", "options"):
            close = nearest(str(field), ("name", "weight", "options"))
            hint = f"did you mean {close}?" if close else "arguments of the function go under options"
            raise Unfit(f"reward {name} has no part {field!r}: {hint}")
    options = entry.get("options") or {}
    if not isinstance(options, dict):
        raise Unfit(f"reward {name}: options must be `name: value` pairs, got {options!r}")
    try:
        weight = _to_float(entry.get("weight", 1.0))
    except Unfit as error:
        raise Unfit(f"reward {name}: weight {error}") from None
    return RewardSpec(name, weight, {str(k): v for k, v in options.items()})


def _options(cls: type) -> Callable[[Any], Any]:
    """A mapping to a dataclass of options, each checked like a key of its own."""

    def make(value: Any) -> Any:
        if value is None or value == "":
            return cls()
        if not isinstance(value, dict):
            raise Unfit("expected `name: value` pairs")  # the value may be a secret in the wrong place
        hints, fresh = typing.get_type_hints(cls), cls()
        parts = {f.name: Key(f.name, "rollout", hints[f.name], getattr(fresh, f.name), f.metadata["rule"]) for f in dataclasses.fields(cls)}
        problems, made = [], {}
        for name, item in value.items():
            part = parts.get(str(name))
            try:
                if part is None:
                    problems.append(_no_part(cls, str(name), parts))
                else:
                    made[part.name] = convert(part, item)
            except Unfit as error:
                problems.append(f"{name}: {'does not fit: write text' if part and part.rule.secret else error}")
        if problems:
            raise Unfit("; ".join(problems))
        return cls(**made)

    return make


def _no_part(cls: type, name: str, parts: Iterable[str]) -> str:
    if name in LATER.get(cls, {}):
        return f"{name}: {LATER[cls][name]}"
    close = nearest(name, parts)
    return f"{name}: unknown" + (f", did you mean {close}?" if close else f"; known: {', '.join(parts)}")


def _urls(value: Any) -> list[str]:
    made: list[str] = []
    for text in _to_list(value, True):
        try:
            url = urlsplit(text)
            port_is_good = url.port != 0
        except ValueError:
            url, port_is_good = urlsplit(""), False
        if url.username or url.password:
            raise Unfit("an address holds a name or a password: write sglang: {api_key: ...}")
        beyond = url.path.strip("/") or url.query or url.fragment
        if url.scheme not in ("http", "https") or not url.hostname or beyond or not port_is_good:
            raise Unfit(f"{text!r} is not an address: write http://host:port")
        text = text.rstrip("/")
        if text in made:
            raise Unfit(f"{text} is named twice")
        made.append(text)
    return made


def _range(value: Any) -> list[float]:
    """[low, high], as a list or as the text low,high."""
    if value is None or value == "" or value == []:
        return []
    items = value if isinstance(value, list) else _to_list(value, True)
    pair = [_to_float(item) for item in items]
    if len(pair) != 2 or pair[0] >= pair[1]:
        raise Unfit(f"expected [low, high] with low below high, got {value!r}")
    return pair


_SPECIAL: dict[str, Callable[[Any], Any]] = {
    "logging_steps": _steps,
    "save_steps": _steps,
    "eval_steps": _steps,
    "report_to": _tracker_list,
    "resume_from_checkpoint": _resume,
    "rollout_correction_range": _range,
    "rollout_engine": _engine_name,
    "interleave_probs": _numbers,
    "rewards": _rewards,
    "sglang": _options(SglangOptions),
    "sglang_base_urls": _urls,
    "sync": _options(SyncOptions),
    "curriculum_range": _range,
}
