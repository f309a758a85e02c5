"""Other spellings of honoured keys."""

from __future__ import annotations

from collections.abc import Mapping

ALIASES: Mapping[str, str] = {
    "evaluation_strategy": "eval_strategy",
    "no_cuda": "use_cpu",
}
