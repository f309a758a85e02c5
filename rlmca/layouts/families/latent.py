"""Multi-latent attention (DeepSeek-V2, 2024, section 2.1): queries, keys and values go through a narrow latent vector."""

from __future__ import annotations

from typing import Any

from rlmca.layouts.families.common import L, M, Part, rope_table
from rlmca.layouts.fields import FieldError, Joint, Mapped, NoEffect, Only, Rule, Values
from rlmca.layouts.rows import COLUMN, REPLICATED, ROW, MegatronModel, Row

LATENT_FIELDS: dict[str, Rule] = {
    "q_lora_rank": Joint(1536, "int"),
    "kv_lora_rank": Mapped("kv_lora_rank", 512, "int"),
    "qk_nope_head_dim": Joint(128, "int", nullable=False),
    "qk_rope_head_dim": Joint(64, "int", nullable=False),
    "v_head_dim": Mapped("v_head_dim", 128, "int"),
    "num_key_value_heads": Joint(128, "int"),
    "head_dim": Joint(None, "int"),
    "qk_head_dim": NoEffect("Transformers' attention adds its parts up whatever it says"),
    "rope_interleave": Only((True,), "only true works: turn the rotated rows of q_b_proj and kv_a_proj_with_mqa into pairs and write true"),
    "attention_bias": Only((False,), "only false works: Megatron has no biases in multi-latent attention"),
}

YARN = {"factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"}
LATENT_ROPES: dict[str, set[str]] = {"default": set(), "yarn": YARN}


def latent(values: Values) -> Part:
    """Sizes of multi-latent attention. Every head has its own keys and values, made from what all heads share."""
    heads, groups, rotated = values["num_attention_heads"], values["num_key_value_heads"], values["qk_rope_head_dim"]
    if groups not in (None, heads):
        raise FieldError("num_key_value_heads", groups, f"latent attention has as many as num_attention_heads ({heads})")
    if values["head_dim"] not in (None, rotated):
        raise FieldError("head_dim", values["head_dim"], f"angles would not fit qk_rope_head_dim ({rotated}); write that, or leave it out")
    if rotated % 2:
        raise FieldError("qk_rope_head_dim", rotated, "rotary embeddings need an even number")
    return {
        "config": {
            "multi_latent_attention": True,
            "qk_layernorm": True,
            "num_query_groups": heads,
            "kv_channels": values["qk_nope_head_dim"] + rotated,
            "q_lora_rank": values["q_lora_rank"],
            "qk_head_dim": values["qk_nope_head_dim"],
            "qk_pos_emb_head_dim": rotated,
        }
    }


def latent_rope(values: Values) -> Part:
    """Rotary embeddings, plain or YaRN (Peng et al. 2023), as Megatron's latent attention rotates: adjacent rows are a pair.

    `mscale_all_dim` scales the scores by the square of m(mscale_all_dim), m(s) = 0.1 s ln(factor) + 1; angles' cosine and sine
    are scaled by m(mscale) / m(mscale_all_dim) when both are given, else by m(1).
    """
    field, params, kind, theta = rope_table(values, LATENT_ROPES)
    config: dict[str, Any] = {"rope_type": "rope", "rotary_base": theta, "rotary_percent": 1.0}
    config |= {"rotary_scaling_factor": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0}
    if kind == "yarn":
        numbers: dict[str, Any] = {"beta_fast": 32, "beta_slow": 1, "mscale": 0, "mscale_all_dim": 0}
        numbers |= {key: params[key] for key in YARN if params.get(key) is not None}
        for key, least in (("factor", 1), ("original_max_position_embeddings", 1), *((name, 0) for name in sorted(numbers))):
            value = numbers.get(key)
            if isinstance(value, bool) or not isinstance(value, int | float) or value < least:
                raise FieldError(f"{field}.{key}", value, f"rope_type yarn needs a number, {least} or more")
        if numbers["mscale_all_dim"] and not numbers["mscale"]:
            raise FieldError(f"{field}.mscale", params.get("mscale"), "with mscale_all_dim write mscale too")
        if not numbers["mscale_all_dim"]:
            numbers["mscale"] = 1.0  # Transformers reads neither then
        config |= {"rope_type": "yarn", "rotary_scaling_factor": numbers.pop("factor"), **numbers}
    return {"config": config, "model": {"position_embedding_type": "rope"}}


def narrow_query(megatron: MegatronModel) -> bool:
    """Whether queries too go through a latent vector."""
    return megatron.config["q_lora_rank"] is not None


def plain_query(megatron: MegatronModel) -> bool:
    """Whether they come from the hidden states."""
    return not narrow_query(megatron)


A, S = L + "self_attn.", M + "self_attention."

LATENT_ATTENTION = (
    Row(M + "input_layernorm.weight", {L + "input_layernorm.weight": ("hidden",)}, REPLICATED),
    Row(S + "linear_q_proj.weight", {A + "q_proj.weight": ("q", "hidden")}, COLUMN, when=plain_query),
    Row(S + "linear_q_down_proj.weight", {A + "q_a_proj.weight": ("q_latent", "hidden")}, REPLICATED, when=narrow_query),
    Row(S + "q_layernorm.weight", {A + "q_a_layernorm.weight": ("q_latent",)}, REPLICATED, when=narrow_query,
        te=S + "linear_q_up_proj.layer_norm_weight"),
    Row(S + "linear_q_up_proj.weight", {A + "q_b_proj.weight": ("q", "q_latent")}, COLUMN, when=narrow_query),
    Row(S + "linear_kv_down_proj.weight", {A + "kv_a_proj_with_mqa.weight": ("kv_down", "hidden")}, REPLICATED),
    Row(S + "kv_layernorm.weight", {A + "kv_a_layernorm.weight": ("kv_latent",)}, REPLICATED,
        te=S + "linear_kv_up_proj.layer_norm_weight"),
    Row(S + "linear_kv_up_proj.weight", {A + "kv_b_proj.weight": ("kv_up", "kv_latent")}, COLUMN),
    Row(S + "linear_proj.weight", {A + "o_proj.weight": ("hidden", "v")}, ROW),
)  # fmt: skip
