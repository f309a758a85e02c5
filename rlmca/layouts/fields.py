"""Rules for the fields of a Hugging Face config: mapped, without effect, or limited to values that are implemented."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Values = Mapping[str, Any]
"""Every field of a family with its value or its default."""
Kind = Literal["int", "float", "bool", "any"]


class FieldError(ValueError):
    """A field whose value has no exact counterpart, and what works instead."""

    def __init__(self, field: str, value: Any, works: str) -> None:
        self.field, self.value, self.works = field, value, works
        super().__init__(f"{field}: {value!r} is not supported; {works}")

    def __reduce__(self) -> tuple[type, tuple[str, Any, str]]:
        return type(self), (self.field, self.value, self.works)


class UnsupportedField(ValueError):
    """Fields of a config that would be ignored or computed differently; `errors` lists all of them."""

    def __init__(self, model_type: str, errors: list[FieldError]) -> None:
        self.errors = errors
        super().__init__(f"config.json of model type {model_type}:\n" + "\n".join(map(str, errors)))
        self.model_type = model_type

    def __reduce__(self) -> tuple[type, tuple[str, list[FieldError]]]:
        return type(self), (self.model_type, self.errors)  # ranks send it to the process that started them


@dataclass(frozen=True)
class Mapped:
    """A field with a counterpart: `to` names the keyword of `TransformerConfig` ("config") or `GPTModel` ("model")."""

    to: str
    default: Any
    kind: Kind
    into: Literal["config", "model"] = "config"


@dataclass(frozen=True)
class Joint:
    """A field that a function of the family reads together with others (see `Family.joint`)."""

    default: Any = None
    kind: Kind = "any"
    nullable: bool = True


@dataclass(frozen=True)
class NoEffect:
    """A field that does not change the logits of a loaded model, with the reason."""

    why: str


@dataclass(frozen=True)
class Only:
    """A field that may only have one of `values`; the first is the default."""

    values: tuple[Any, ...]
    works: str


Rule = Mapped | Joint | NoEffect | Only


def wrong_kind(value: Any, kind: Kind) -> str | None:
    """What to write instead when `value` is not of `kind`: sizes are positive integers, floats are not negative."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind == "int" and not (number and isinstance(value, int) and value > 0):
        return "write a positive integer"
    if kind == "float" and not (number and value >= 0):
        return "write a number, 0 or more"
    if kind == "bool" and not isinstance(value, bool):
        return "write true or false"
    return None


def read_fields(hf_config: Mapping[str, Any], rules: Mapping[str, Rule]) -> tuple[dict[str, Any], list[FieldError]]:
    """Values of all fields, defaults filled in, and an error for each value that no rule allows."""
    values: dict[str, Any] = {}
    errors: list[FieldError] = []
    for name, rule in rules.items():
        if isinstance(rule, NoEffect):
            continue
        default = rule.values[0] if isinstance(rule, Only) else rule.default
        value = values[name] = hf_config.get(name, default)
        if isinstance(rule, Only):
            if value not in rule.values:
                errors.append(FieldError(name, value, rule.works))
        elif value is None and isinstance(rule, Joint) and rule.nullable:
            continue
        elif wrong := wrong_kind(value, rule.kind):
            errors.append(FieldError(name, value, wrong))
    works = "this field is not known for the model type and may change its arithmetic; if it has no effect, remove it"
    errors += [FieldError(n, v, works) for n, v in hf_config.items() if n not in rules and v is not None]
    return values, errors
