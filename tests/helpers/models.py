"""Tiny random Hugging Face models, written to a folder once a session."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

SMALL: dict[str, Any] = {
    "vocab_size": 67,  # odd on purpose: tensor parallelism has to pad it
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": None,  # with a pad id, Transformers drops the gradient of that embedding row (padding_idx); Megatron does not
}
YARN: dict[str, Any] = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 16,
                        "mscale": 0.9, "mscale_all_dim": 0.7}  # fmt: skip
FAMILIES: dict[str, tuple[type, type, dict[str, Any]]] = {
    "qwen3_tied": (Qwen3Config, Qwen3ForCausalLM, {"tie_word_embeddings": True, "head_dim": 16}),
    "qwen3_untied": (Qwen3Config, Qwen3ForCausalLM, {"tie_word_embeddings": False, "head_dim": 16}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": False}),
    "llama": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": False}),
    "mistral": (MistralConfig, MistralForCausalLM, {"tie_word_embeddings": False, "head_dim": 16, "sliding_window": 5}),
}


MIXTURES: dict[str, tuple[type, type, dict[str, Any]]] = {
    "qwen3_moe": (
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        {"tie_word_embeddings": False, "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
         "norm_topk_prob": True, "num_hidden_layers": 4, "mlp_only_layers": [1]},
    ),
    "qwen2_moe": (
        Qwen2MoeConfig,
        Qwen2MoeForCausalLM,
        {"tie_word_embeddings": False, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
         "shared_expert_intermediate_size": 40, "num_hidden_layers": 4, "mlp_only_layers": [1]},
    ),
    "mixtral": (
        MixtralConfig,
        MixtralForCausalLM,
        {"tie_word_embeddings": False, "num_local_experts": 8, "num_experts_per_tok": 3, "num_hidden_layers": 4},
    ),
    "deepseek_v3": (
        DeepseekV3Config,
        DeepseekV3ForCausalLM,
        {"num_key_value_heads": 4, "num_hidden_layers": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 12,
         "qk_rope_head_dim": 8, "v_head_dim": 10, "n_routed_experts": 8, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2,
         "n_shared_experts": 2, "moe_intermediate_size": 24, "first_k_dense_replace": 1, "rms_norm_eps": 1e-5, "rope_parameters": YARN},
    ),
}  # fmt: skip
"""Families with experts, where they can one layer without; apart from the others, since the Hugging Face engine does not train them."""


def make_model(name: str, *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A random fp32 model of family `name` in eval mode, norms and biases perturbed so that mix-ups show."""
    config_class, model_class, own = {**FAMILIES, **MIXTURES}[name]
    torch.manual_seed(seed)
    model = model_class(config_class(**{**SMALL, **own, **overrides}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # ones and zeros would hide a swapped norm or a dropped bias
                parameter.add_(torch.randn_like(parameter) * 0.1)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn_like(buffer) * 0.1)
    return model.float().eval()


def save_model(name: str, folder: Path, **kwargs: Any) -> Path:
    """`make_model` written to `folder` in Transformers' format."""
    make_model(name, **kwargs).save_pretrained(folder)
    return folder
