"""Attention that SGLang would compute otherwise than the trainer, without a word: windows, and parts of YaRN's table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlmca.config.generation import GenerationConfig

_WINDOWS = {"mistral": 4096, "mixtral": None}
"""Families whose `sliding_window` alone says whether layers have one, and its default."""
_SWITCHED = ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
"""Families that have windows with `use_sliding_window` only."""
_DROPPED = ("attention_factor", "mscale", "mscale_all_dim")


def attention_error(hf_config: Mapping[str, Any], generation: GenerationConfig) -> str | None:
    """Why SGLang cannot serve the model with this config.json to a run with prompts and replies of such lengths, or None.

    Its classes of these families attend to whole rows, which is the same as long as no row is longer than the window; and of
    YaRN's table they read neither `attention_factor` nor `mscale`. Log-probs of a real server (0.5.23) were wrong by about 1.
    """
    family = hf_config.get("model_type")
    windowed = family in _WINDOWS or (family in _SWITCHED and hf_config.get("use_sliding_window"))
    window = hf_config.get("sliding_window", _WINDOWS.get(str(family), 4096)) if windowed else None
    longest = generation.max_prompt_len + generation.max_new_tokens
    if window is not None and longest > window:
        return (
            f"rollout_engine: sglang: config.json has sliding_window {window}, and SGLang attends to whole rows of a {family} model, "
            f"here up to max_prompt_len + max_new_tokens = {longest}; lower them to {window} together, or write rollout_engine: local"
        )
    table = hf_config.get("rope_parameters") or hf_config.get("rope_scaling") or {}
    yarn = isinstance(table, Mapping) and table.get("rope_type", table.get("type")) == "yarn"
    if yarn and family != "deepseek_v3":
        for key in _DROPPED:
            if table.get(key):
                return (
                    f"rollout_engine: sglang: config.json has {key} {table[key]!r} in its YaRN table, which SGLang does not read for "
                    f"a {family} model; write rollout_engine: local"
                )
    return None
