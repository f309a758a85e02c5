"""Qwen1.5-MoE and Qwen2-57B-A14B: Qwen2's attention, experts behind a softmax router, and one expert that every token goes
through, weighed by a sigmoid gate of its own."""

from __future__ import annotations

from rlmca.layouts.families.common import (
    ATTENTION,
    DECODER,
    EMBEDDING,
    EXPERTS,
    FIXED,
    HEAD,
    MLP,
    WINDOWS,
    L,
    M,
    Part,
    full_attention,
    head_fields,
    heads,
    mixture_layer,
    rope,
)  # fmt: skip
from rlmca.layouts.families.qwen3_moe import experts
from rlmca.layouts.family import Family
from rlmca.layouts.fields import FieldError, Joint, Mapped, NoEffect, Only, Values
from rlmca.layouts.rows import GATED, REPLICATED, ROW, Row

SHARED = M + "mlp.shared_experts."
SHARED_EXPERT = (
    Row(SHARED + "linear_fc1.weight", {L + f"mlp.shared_expert.{x}_proj.weight": ("shared_ffn", "hidden") for x in ("gate", "up")},
        GATED, of=mixture_layer),
    Row(SHARED + "linear_fc2.weight", {L + "mlp.shared_expert.down_proj.weight": ("hidden", "shared_ffn")}, ROW, of=mixture_layer),
    Row(SHARED + "gate_weight", {L + "mlp.shared_expert_gate.weight": ("one", "hidden")}, REPLICATED, of=mixture_layer),
)  # fmt: skip


def no_windows(values: Values) -> Part:
    """Refuses windows. Without `layer_types`, Transformers' class of this family gives every other layer below
    `max_window_layers` one, the first among them."""
    first_full = values["max_window_layers"]
    if values["layer_types"] is None and values["use_sliding_window"] and (not isinstance(first_full, int) or first_full > 0):
        raise FieldError("use_sliding_window", True, "only full attention works: write use_sliding_window: false")
    return full_attention({**values, "use_sliding_window": False})


QWEN2_MOE = Family(
    model_type="qwen2_moe",
    fields=head_fields("Qwen2MoeForCausalLM")
    | DECODER
    | WINDOWS
    | {
        "hidden_size": Mapped("hidden_size", 2048, "int"),
        "intermediate_size": Mapped("ffn_hidden_size", 5632, "int"),
        "num_hidden_layers": Mapped("num_layers", 24, "int"),
        "num_attention_heads": Mapped("num_attention_heads", 16, "int"),
        "num_key_value_heads": Joint(16, "int", nullable=False),
        "sliding_window": NoEffect("read by layers with a window alone, which are refused"),
        "qkv_bias": Mapped("add_qkv_bias", True, "bool"),
        "num_experts": Joint(60, "int", nullable=False),
        "num_local_experts": Only((None,), "write num_experts"),
        "num_experts_per_tok": Joint(4, "int", nullable=False),
        "norm_topk_prob": Joint(False, "bool", nullable=False),
        "decoder_sparse_step": Joint(1, "int", nullable=False),
        "mlp_only_layers": Joint(),
        "moe_intermediate_size": Mapped("moe_ffn_hidden_size", 1408, "int"),
        "shared_expert_intermediate_size": Mapped("moe_shared_expert_intermediate_size", 5632, "int"),
        "router_aux_loss_coef": NoEffect("weighs a loss that Transformers adds only with output_router_logits; here: moe_aux_loss_coeff"),
        "output_router_logits": Only((False, None), "only false works: the run's moe_aux_loss_coeff adds the auxiliary loss"),
    },
    fixed=FIXED | {"moe_shared_expert_gate": True},
    joint=(heads, rope, no_windows, experts),
    rows=(*EMBEDDING, *ATTENTION, *MLP, *EXPERTS, *SHARED_EXPERT, *HEAD),
)
