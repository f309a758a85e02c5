"""A model family as a table: rules for the config's fields and rows of parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rlmca.layouts.fields import FieldError, Joint, Mapped, Rule, UnsupportedField, Values, read_fields
from rlmca.layouts.rows import MegatronModel, Row


@dataclass(frozen=True)
class Family:
    """One Hugging Face `model_type`.

    `fields` has a rule for every config field, `fixed` the `TransformerConfig` values that all members share, `joint`
    the functions that map several fields at once (they raise FieldError), `rows` the parameters.
    """

    model_type: str
    fields: Mapping[str, Rule]
    fixed: Mapping[str, Any]
    joint: tuple[Callable[[Values], dict[str, dict[str, Any]]], ...]
    rows: tuple[Row, ...]

    def megatron(self, hf_config: Mapping[str, Any]) -> MegatronModel:
        """Megatron's keyword arguments for a config (the mapping in config.json).

        Raises UnsupportedField naming every field, its value and what works, when a field would be ignored or computed
        otherwise than Transformers computes it.
        """
        values, errors = read_fields(hf_config, self.fields)
        parts: dict[str, dict[str, Any]] = {"config": dict(self.fixed), "model": {}, "files": {}, "rope": {}}
        for name, rule in self.fields.items():
            if isinstance(rule, Mapped):
                parts[rule.into][rule.to] = values[name]
        bad = {error.field for error in errors}
        if not any(name in bad and isinstance(rule, Mapped | Joint) for name, rule in self.fields.items()):
            for function in self.joint:  # they rely on the kinds checked above
                try:
                    for into, kwargs in function(values).items():
                        parts[into] |= kwargs
                except FieldError as error:
                    errors.append(error)
        if errors:
            raise UnsupportedField(self.model_type, errors)
        return MegatronModel(**parts)

    def rows_of(self, megatron: MegatronModel) -> list[Row]:
        """The rows that a model with these arguments has."""
        return [row for row in self.rows if row.when(megatron)]
