"""Models with experts that SGLang would serve with other numbers, without a word; found by comparing a real server with Transformers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

_FAMILIES = ("qwen3_moe", "qwen2_moe", "mixtral")


def mixture_error(hf_config: Mapping[str, Any], tensors: Iterable[str]) -> str | None:
    """Why SGLang cannot serve the model with this config.json and these tensors, or None.

    Its classes give experts to all layers of these families and drop weights of layers without; and they read one tensor for
    each expert, and drop those that hold all experts of a layer.
    """
    family = hf_config.get("model_type")
    if family not in _FAMILIES:
        return None
    defaults: dict[str, Any] = {} if family == "mixtral" else {"mlp_only_layers": [], "decoder_sparse_step": 1}
    for field, default in defaults.items():
        value = hf_config.get(field) or default
        if value != default:
            return (
                f"rollout_engine: sglang: config.json has {field} {value!r}, and SGLang gives experts to every layer of a {family} model; "
                "write rollout_engine: local"
            )
    if any(name.endswith(".mlp.experts.gate_up_proj") for name in tensors):
        return (
            "rollout_engine: sglang: the model's files hold the experts of a layer in one tensor, and SGLang reads one for each "
            f"of a {family} model; write rollout_engine: local, or load the model with Transformers and write it anew with save_pretrained"
        )
    return None
