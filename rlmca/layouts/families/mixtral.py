"""Mixtral: Llama's attention, and in every layer a softmax router over the chosen experts alone."""

from __future__ import annotations

from collections.abc import Mapping

from rlmca.layouts.families.common import (
    ATTENTION,
    DECODER,
    EMBEDDING,
    FIXED,
    HEAD,
    L,
    M,
    Part,
    head_fields,
    heads,
    rope,
)  # fmt: skip
from rlmca.layouts.family import Family
from rlmca.layouts.fields import FieldError, Joint, Mapped, NoEffect, Only, Values
from rlmca.layouts.rows import GATED, REPLICATED, ROW, Row

THETA = 1000000.0
"""`default_theta` of Transformers' class."""


def mixtral_rope(values: Values) -> Part:
    """Rotary embeddings; without a base in either spelling it is this family's own."""
    params = values["rope_parameters"] or values["rope_scaling"]
    given = values["rope_theta"] is not None or (isinstance(params, Mapping) and "rope_theta" in params)
    return rope(values if given else {**values, "rope_theta": THETA})


def experts(values: Values) -> Part:
    """Experts in all layers. The router's weights are a softmax over the chosen logits alone (MixtralTopKRouter divides the
    largest of a softmax over all by their sum, which is the same)."""
    number, chosen, layers = values["num_local_experts"], values["num_experts_per_tok"], values["num_hidden_layers"]
    if chosen > number:
        raise FieldError("num_experts_per_tok", chosen, f"there are {number} experts")
    if chosen == 1:
        raise FieldError("num_experts_per_tok", 1, "the one chosen expert would weigh 1 and its router would learn nothing; 2 or more work")
    return {
        "config": {
            "num_moe_experts": number,
            "moe_router_topk": chosen,
            "moe_router_pre_softmax": False,
            "moe_router_score_function": "softmax",
            "moe_layer_freq": [1] * layers,
            "moe_ffn_hidden_size": values["intermediate_size"],
        }
    }


B = L + "block_sparse_moe."
MIXTURE = (
    Row(M + "pre_mlp_layernorm.weight", {L + "post_attention_layernorm.weight": ("hidden",)}, REPLICATED),
    Row(M + "mlp.router.weight", {B + "gate.weight": ("experts", "hidden")}, REPLICATED, stacked=L + "mlp.gate.weight"),
    Row(M + "mlp.experts.local_experts.{e}.linear_fc1.weight",
        {B + f"experts.{{e}}.{x}.weight": ("moe_ffn", "hidden") for x in ("w1", "w3")}, GATED,
        te=M + "mlp.experts.linear_fc1.weight{e}", expert=True, stacked=L + "mlp.experts.gate_up_proj"),
    Row(M + "mlp.experts.local_experts.{e}.linear_fc2.weight", {B + "experts.{e}.w2.weight": ("hidden", "moe_ffn")}, ROW,
        te=M + "mlp.experts.linear_fc2.weight{e}", expert=True, stacked=L + "mlp.experts.down_proj"),
)  # fmt: skip

MIXTRAL = Family(
    model_type="mixtral",
    fields=head_fields("MixtralForCausalLM")
    | DECODER
    | {
        "vocab_size": Mapped("vocab_size", 32000, "int", into="model"),
        "intermediate_size": Mapped("ffn_hidden_size", 14336, "int"),
        "num_key_value_heads": Joint(8, "int", nullable=False),
        "max_position_embeddings": Mapped("max_sequence_length", 131072, "int", into="model"),
        "rms_norm_eps": Mapped("layernorm_epsilon", 1e-5, "float"),
        "sliding_window": Only((None,), "only full attention works: write null"),
        "num_local_experts": Joint(8, "int", nullable=False),
        "num_experts_per_tok": Joint(2, "int", nullable=False),
        "router_jitter_noise": Only((0.0, None), "only 0.0 works: Transformers' noise in training has no counterpart"),
        "router_aux_loss_coef": NoEffect("weighs a loss that Transformers adds only with output_router_logits; here: moe_aux_loss_coeff"),
        "output_router_logits": Only((False, None), "only false works: the run's moe_aux_loss_coeff adds the auxiliary loss"),
    },
    fixed=FIXED,
    joint=(heads, mixtral_rope, experts),
    rows=(*EMBEDDING, *ATTENTION, *MIXTURE, *HEAD),
)
