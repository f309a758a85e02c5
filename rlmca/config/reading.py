"""Reading YAML or JSON text and `key=value` overrides into plain values.

Scalars follow YAML 1.2's core schema: `1e-5` is a float, `no` is text, `010` is ten. Duplicate keys are errors.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from rlmca.config.errors import ConfigError


class _Loader(yaml.SafeLoader):
    """SafeLoader with YAML 1.2 scalars; `problems` collects duplicate and non-text keys."""

    yaml_implicit_resolvers: dict[str, Any] = {}

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self.problems: list[str] = []

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        # Here, not where values are made: merging writes the keys of one mapping into another that has its own.
        node = super().compose_mapping_node(anchor)
        seen: dict[str, int] = {}
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                self.problems.append(f"line {line}: a key must be text")
            elif key_node.value in seen:
                self.problems.append(f"{key_node.value} is written twice, in line {seen[key_node.value]} and in line {line}: keep one")
            else:
                seen[key_node.value] = line
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        if any(not isinstance(k, yaml.ScalarNode) for k, _ in node.value):
            return {}
        return super().construct_mapping(node, deep)


def _int(loader: _Loader, node: yaml.ScalarNode) -> int:
    text = str(node.value)
    return int(text, 0) if text[:2] in ("0x", "0o") else int(text)


def _float(loader: _Loader, node: yaml.ScalarNode) -> float:
    return float(str(node.value).lower().replace(".inf", "inf").replace(".nan", "nan"))


for _tag, _pattern, _first in (
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF"),
    ("int", r"^(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$", "-+0123456789"),
    ("float", r"^[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$", "-+.0123456789"),
    ("float", r"^(?:[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$", "-+."),
    ("null", r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("merge", r"^<<$", "<"),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), list(_first))
_Loader.add_constructor("tag:yaml.org,2002:int", _int)
_Loader.add_constructor("tag:yaml.org,2002:float", _float)


def scalar_resolvers(others: dict[str, Any]) -> dict[str, Any]:
    """Resolvers of this reader after those of another one, for a writer that must satisfy both."""
    merged: dict[str, Any] = {first: list(rules) for first, rules in others.items()}
    for first, rules in _Loader.yaml_implicit_resolvers.items():
        merged.setdefault(first, []).extend(rules)
    return merged


def parse_yaml(text: str, where: str) -> tuple[Any, list[str]]:
    """(value, problems) of YAML text; `where` starts each problem."""
    try:
        loader = _Loader(text)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        return None, [f"{where}: line {line}: not valid YAML: the character U+{ord(text[error.position]):04X} may not stand in it"]
    try:
        value = loader.get_single_data()
        if _contains_itself(value):
            return None, [f"{where}: not valid YAML: an anchor that contains itself"]
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        line_text = f" line {mark.line + 1}:" if mark is not None else ""
        what = getattr(error, "problem", None) or str(error).splitlines()[0]
        return None, [f"{where}:{line_text} not valid YAML: {what}"]
    finally:
        loader.dispose()
    return value, [f"{where}: {problem}" for problem in loader.problems]


def _contains_itself(value: Any, above: tuple[int, ...] = ()) -> bool:
    if not isinstance(value, (dict, list)):
        return False
    inside = (*above, id(value))
    return id(value) in above or any(_contains_itself(item, inside) for item in (value.values() if isinstance(value, dict) else value))


def parse_json(text: str, where: str) -> tuple[Any, list[str]]:
    """(value, problems) of JSON text."""
    problems: list[str] = []

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        for key, value in items:
            if key in seen:
                problems.append(f"{where}: {key} is written twice: keep one")
            seen[key] = value
        return seen

    try:
        return json.loads(text, object_pairs_hook=pairs), problems
    except (ValueError, RecursionError) as error:
        return None, [f"{where}: not valid JSON: {error}"]


def read_file(path: str | Path) -> tuple[dict[str, Any], list[str]]:
    """(keys, problems) of a configuration file; ConfigError when it cannot be read as a set of keys at all."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    parse = parse_json if path.suffix.lower() == ".json" else parse_yaml
    value, problems = parse(text, str(path))
    if value is None:
        if problems:
            raise ConfigError(problems)
        value = {}
    if not isinstance(value, dict):
        raise ConfigError([*problems, f"{path}: expected `key: value` lines, found a {type(value).__name__}"])
    return {str(key): item for key, item in value.items()}, problems


def apply_overrides(values: dict[str, Any], overrides: Sequence[str]) -> list[str]:
    """Set `key=value` and nested `a.b=c` in place (later ones win); the problems found.

    What a nested override goes through is copied first: YAML's anchors put one object under several keys.

    A value is read as YAML, so `stop=[a,b]` is a list and `learning_rate=1e-5` a float. `rewards.0.weight=2` reaches into a list.
    """
    problems: list[str] = []
    for text in overrides:
        key, sign, raw = text.partition("=")
        key = key.strip().removeprefix("--")
        if not sign or not key:
            problems.append(f"override {text!r}: write key=value")
            continue
        value, wrong = parse_yaml(raw, f"override {key}")
        problems += wrong
        if not wrong:
            problems += _set(values, key.split("."), value, text)
    return problems


def _set(values: dict[str, Any], path: list[str], value: Any, text: str) -> list[str]:
    here: Any = values
    for depth, part in enumerate(path):
        last = depth == len(path) - 1
        if isinstance(here, dict):
            if last:
                here[part] = value
            else:
                here[part] = {} if here.get(part) is None else copy.copy(here[part])
                here = here[part]
        elif isinstance(here, list):
            if not part.isdecimal() or int(part) >= len(here):
                return [f"override {text!r}: {'.'.join(path[:depth])} is a list of {len(here)}; write its number, from 0"]
            if last:
                here[int(part)] = value
            else:
                here[int(part)] = copy.copy(here[int(part)])
                here = here[int(part)]
        else:
            return [f"override {text!r}: {'.'.join(path[:depth])} holds {here!r}, which has no parts"]
    return []
