"""Qwen3 with experts: Qwen3's attention, and in most layers a softmax router over gated experts, without shared ones."""

from __future__ import annotations

from rlmca.layouts.families.common import (
    ATTENTION,
    DECODER,
    EMBEDDING,
    EXPERTS,
    FIXED,
    HEAD,
    MLP,
    QK_NORM,
    Part,
    head_fields,
    heads,
    rope,
)  # fmt: skip
from rlmca.layouts.family import Family
from rlmca.layouts.fields import FieldError, Joint, Mapped, NoEffect, Only, Values


def no_windows(values: Values) -> Part:
    """Refuses windows. Transformers' class knows no layers without one: `use_sliding_window` gives all of them `sliding_window`."""
    if values["use_sliding_window"] and values["sliding_window"] is not None:
        raise FieldError("use_sliding_window", True, "only full attention works: write use_sliding_window: false")
    return {}


def experts(values: Values) -> Part:
    """How many experts, how tokens choose among them, and which layers have them (Qwen3MoeDecoderLayer of Transformers).

    The router's weights are a softmax over all experts, of which the largest are taken. With `norm_topk_prob` these are
    divided by their sum, which is a softmax over the chosen logits alone: what Megatron computes without
    `moe_router_pre_softmax`.
    """
    both = {values["num_experts"], values["num_local_experts"]} - {None}
    if len(both) > 1:
        raise FieldError("num_local_experts", values["num_local_experts"], f"it contradicts num_experts ({values['num_experts']})")
    number, chosen = next(iter(both), 128), values["num_experts_per_tok"]
    if chosen > number:
        raise FieldError("num_experts_per_tok", chosen, f"there are {number} experts")
    if chosen == 1 and values["norm_topk_prob"]:
        raise FieldError("num_experts_per_tok", 1, "with norm_topk_prob the router would learn nothing; 2 or more work")
    step, dense = values["decoder_sparse_step"], values["mlp_only_layers"] or []
    if not isinstance(dense, list | tuple) or not all(isinstance(layer, int) for layer in dense):
        raise FieldError("mlp_only_layers", dense, "write a list of layer numbers")
    mixture = [int(layer not in dense and (layer + 1) % step == 0) for layer in range(values["num_hidden_layers"])]
    if not any(mixture):
        field = "mlp_only_layers" if dense else "decoder_sparse_step"
        raise FieldError(field, values[field], "no layer is left with experts; models without are of a type that has none")
    return {
        "config": {
            "num_moe_experts": number,
            "moe_router_topk": chosen,
            "moe_router_pre_softmax": not values["norm_topk_prob"],
            "moe_router_score_function": "softmax",
            "moe_layer_freq": mixture,
        }
    }


QWEN3_MOE = Family(
    model_type="qwen3_moe",
    fields=head_fields("Qwen3MoeForCausalLM")
    | DECODER
    | {
        "hidden_size": Mapped("hidden_size", 2048, "int"),
        "intermediate_size": Mapped("ffn_hidden_size", 6144, "int"),
        "num_hidden_layers": Mapped("num_layers", 24, "int"),
        "num_key_value_heads": Joint(4, "int", nullable=False),
        "use_sliding_window": Joint(False, "bool"),
        "sliding_window": Joint(4096, "int"),
        "max_window_layers": NoEffect("not read by Transformers' class of this family"),
        "head_dim": Joint(None, "int"),
        "attention_bias": Only((False,), "only false works: true adds biases to q, k, v and o, and Megatron would add one to the MLP too"),
        "num_experts": Joint(None, "int"),
        "num_local_experts": Joint(None, "int"),
        "num_experts_per_tok": Joint(8, "int", nullable=False),
        "norm_topk_prob": Joint(False, "bool", nullable=False),
        "decoder_sparse_step": Joint(1, "int", nullable=False),
        "mlp_only_layers": Joint(),
        "moe_intermediate_size": Mapped("moe_ffn_hidden_size", 768, "int"),
        "router_aux_loss_coef": NoEffect("weighs a loss that Transformers adds only with output_router_logits; here: moe_aux_loss_coeff"),
        "output_router_logits": Only((False, None), "only false works: the run's moe_aux_loss_coeff adds the auxiliary loss"),
    },
    fixed=FIXED | {"qk_layernorm": True},
    joint=(heads, rope, no_windows, experts),
    rows=(*EMBEDDING, *ATTENTION, *QK_NORM, *MLP, *EXPERTS, *HEAD),
)
