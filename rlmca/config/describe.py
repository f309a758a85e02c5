"""What `rlmca-cli help KEY` says: the documentation of one key, honoured or not."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any

from rlmca.config.convert import nearest
from rlmca.config.errors import ConfigError
from rlmca.config.foreign import ALIASES, FOREIGN
from rlmca.config.schema import Key, keys


def describe(name: str) -> list[str]:
    """Lines about a key; ConfigError with the nearest name when nobody knows it."""
    if name in ALIASES:
        return [f"{name}: another name of {ALIASES[name]}", *describe(ALIASES[name])]
    if name in keys():
        return _honoured(keys()[name])
    if name in FOREIGN:
        foreign = FOREIGN[name]
        if foreign.kind == "no_effect":
            return [f"{name}: no effect", f"  {foreign.reason}"]
        text = [f"{name}: refused", f"  {foreign.reason}"]
        text += [f"  {foreign.instead}"] if foreign.instead else []
        accepted = [str(v).lower() if isinstance(v, bool) else str(v) for v in foreign.accepted if v not in (None, "", [], {})]
        return [*text, f"  accepted values: {', '.join(accepted)}"]
    close = nearest(name, [*keys(), *ALIASES]) or nearest(name, FOREIGN)
    raise ConfigError(f"{name}: unknown key" + (f", did you mean {close}?" if close else ""))


def _honoured(key: Key) -> list[str]:
    rule = key.rule
    unset = key.default is None or key.default == [] or key.default == {} or dataclasses.is_dataclass(key.default)
    default = "not set" if unset else key.default
    lines = [f"{key.name} ({key.section} key)", f"  {rule.doc}", f"  type: {type_name(key.type)}, default: {_text(default)}"]
    if rule.choices:
        lines.append(f"  one of: {', '.join(_text(c) for c in rule.choices)}")
    bounds = [
        f"{word} {value}"
        for word, value in (("at least", rule.at_least), ("above", rule.above), ("at most", rule.at_most), ("below", rule.below))
        if value is not None
    ]
    if bounds:
        lines.append(f"  {', '.join(bounds)}")
    if dataclasses.is_dataclass(key.type):
        lines += [f"  {f.name}: {f.metadata['rule'].doc}" for f in dataclasses.fields(key.type)]
    return lines + [f"  refused: {reason}" for reason in dict.fromkeys(rule.refused.values())]


def type_name(kind: Any) -> str:
    """A type as a reader of YAML calls it."""
    if isinstance(kind, types.UnionType):
        return type_name(next(k for k in typing.get_args(kind) if k is not type(None)))
    if typing.get_origin(kind) is list:
        return "list"
    if typing.get_origin(kind) is dict or dataclasses.is_dataclass(kind):
        return "name: value pairs"
    return {bool: "true or false", int: "whole number", float: "number", str: "text"}[kind]


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
