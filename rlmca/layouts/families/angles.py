"""Scaled rotary embeddings of a config as plain numbers: linear, Llama 3's and YaRN; `models/rope.py` computes angles from them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rlmca.layouts.fields import FieldError

LLAMA3 = {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
YARN = {"factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}
ROPE_KEYS: dict[str, set[str]] = {"default": set(), "linear": {"factor"}, "llama3": LLAMA3, "yarn": YARN}
"""Types of rotary embeddings and the keys that their tables have, as in `modeling_rope_utils.py` of Transformers."""


def scaling(field: str, params: Mapping[str, Any], kind: str, longest: int) -> dict[str, Any]:
    """The numbers of a table of type `kind`, Transformers' defaults filled in; `longest` is `max_position_embeddings`.

    Raises FieldError naming `field` and the key for a value that Transformers does not take, or takes as something else.
    """
    if kind == "default":
        return {}

    def number(key: str, default: Any = None, least: float = 0.0) -> float:
        value = params.get(key)
        value = default if value is None else value
        wrong = isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value)
        if wrong or value < least or value <= 0:
            works = f"{least:g} or more" if least else "above 0"
            raise FieldError(f"{field}.{key}", value, f"rope_type {kind} needs a number, {works}")
        return value

    table: dict[str, Any] = {"rope_type": kind, "factor": number("factor", least=1)}
    if kind == "linear":
        return table
    table["original_max_position_embeddings"] = number("original_max_position_embeddings", longest)
    if kind == "llama3":
        low, high = number("low_freq_factor"), number("high_freq_factor")
        if high <= low:
            raise FieldError(f"{field}.high_freq_factor", high, f"it must be above low_freq_factor ({low})")
        return table | {"low_freq_factor": low, "high_freq_factor": high}
    for key in ("beta_fast", "beta_slow"):  # null and 0 are what Transformers takes for "not given"
        table[key] = number(key) if params.get(key) else {"beta_fast": 32, "beta_slow": 1}[key]
    table["truncate"] = params.get("truncate", True)
    if not isinstance(table["truncate"], bool):
        raise FieldError(f"{field}.truncate", table["truncate"], "write true or false")
    return table | {"attention_factor": _attention_factor(table["factor"], params, number)}


def _attention_factor(factor: float, params: Mapping[str, Any], number: Any) -> float:
    """What cosines and sines are multiplied by (Peng et al. 2023, YaRN, section 3.4, and DeepSeek's mscale)."""
    if params.get("attention_factor") is not None:
        return float(number("attention_factor"))

    def m(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    if params.get("mscale") and params.get("mscale_all_dim"):
        return m(number("mscale")) / m(number("mscale_all_dim"))
    return m(1)
