"""DeepSeek-V3 (DeepSeek-AI 2024, arXiv 2412.19437): multi-latent attention, and after the first layers experts that a
sigmoid router chooses by groups with a correcting bias, beside one that all tokens go through."""

from __future__ import annotations

from collections.abc import Mapping

from rlmca.layouts.families.common import (
    DECODER,
    EMBEDDING,
    EXPERTS,
    FIXED,
    HEAD,
    MLP,
    L,
    M,
    Part,
    head_fields,
    mixture_layer,
)  # fmt: skip
from rlmca.layouts.families.latent import LATENT_ATTENTION, LATENT_FIELDS, latent, latent_rope
from rlmca.layouts.family import Family
from rlmca.layouts.fields import FieldError, Joint, Mapped, NoEffect, Only, Values
from rlmca.layouts.rows import GATED, REPLICATED, ROW, Row

CLASSES = ("DeepseekV3Config", "DeepseekV3Model", "DeepseekV3ForCausalLM")


def routing(values: Values) -> Part:
    """How tokens choose experts (DeepseekV3TopkRouter of Transformers).

    Chosen by sigmoid plus bias among the groups whose two best experts sum up highest; weighted by the sigmoid alone,
    divided by its sum over the chosen ones, times a factor. Megatron divides whenever more than one expert is chosen, and
    sums the best topk / groups of a group, which must be two then.
    """
    chosen, number = values["num_experts_per_tok"], _experts(values)
    groups, allowed, scale = values["n_group"], values["topk_group"], values["routed_scaling_factor"]
    if number % groups or number < 2 * groups:
        raise FieldError("n_group", groups, f"it must deal out {number} experts in equal groups of two or more")
    if allowed > groups:
        raise FieldError("topk_group", allowed, f"there are {groups} groups")
    if chosen > allowed * (number // groups):
        raise FieldError("num_experts_per_tok", chosen, f"{allowed} of {groups} groups hold {allowed * (number // groups)} experts")
    if bool(values["norm_topk_prob"]) != (chosen > 1):
        works = "Megatron divides the weights of several experts by their sum and leaves that of one: write " + str(chosen > 1).lower()
        raise FieldError("norm_topk_prob", values["norm_topk_prob"], works)
    if not scale:
        raise FieldError("routed_scaling_factor", scale, "write a number above 0")
    limited = allowed < groups  # else every group is allowed, and the choice is a plain one
    if limited and chosen // allowed != 2:
        works = f"with topk_group {allowed} of {groups} groups it must be {2 * allowed}: groups are compared by their two best experts"
        raise FieldError("num_experts_per_tok", chosen, works)
    first, layers = values["first_k_dense_replace"], values["num_hidden_layers"]
    if isinstance(first, bool) or not isinstance(first, int) or not 0 <= first < layers:
        raise FieldError("first_k_dense_replace", first, f"write a number from 0 to {layers - 1}: one of {layers} layers must have experts")
    return {
        "config": {
            "num_moe_experts": number,
            "moe_router_topk": chosen,
            "moe_router_score_function": "sigmoid",
            "moe_router_num_groups": groups if limited else None,
            "moe_router_group_topk": allowed if limited else None,
            "moe_router_topk_scaling_factor": scale,
            "moe_router_dtype": "fp32",
            "moe_router_enable_expert_bias": True,
            "moe_router_bias_update_rate": 0.0,  # whoever trains it says so; here it stays what the checkpoint has
            "moe_shared_expert_intermediate_size": values["n_shared_experts"] * values["moe_intermediate_size"],
            "moe_ffn_hidden_size": values["moe_intermediate_size"],
            "moe_layer_freq": [int(layer >= first) for layer in range(layers)],
        }
    }


def _experts(values: Values) -> int:
    both = {values["n_routed_experts"], values["num_local_experts"]} - {None}
    if len(both) > 1:
        raise FieldError(
            "num_local_experts", values["num_local_experts"], f"it contradicts n_routed_experts ({values['n_routed_experts']})"
        )
    return int(next(iter(both), 256))


def further_tokens(values: Values) -> Part:
    """Layers for multi-token prediction lie behind the others in the files. They are not part of the model that is trained,
    here as in Transformers; their tensors are kept for the exported folder."""
    names = ("num_nextn_predict_layers", "num_mtp_layers")
    for name in names:
        if values[name] is not None and (isinstance(values[name], bool) or not isinstance(values[name], int) or values[name] < 0):
            raise FieldError(name, values[name], "write a number of layers, 0 or more")
    both = {values[name] for name in names} - {None}
    if len(both) > 1:
        raise FieldError("num_mtp_layers", values["num_mtp_layers"], "it contradicts num_nextn_predict_layers; keep one of them")
    first = values["num_hidden_layers"]
    return {"files": {"kept": tuple(f"model.layers.{first + number}." for number in range(next(iter(both), 1)))}}


def own_code(values: Values) -> Part:
    """The code that came with the model before Transformers had the class is not run."""
    names = values["auto_map"] or {}
    if not isinstance(names, Mapping) or any(str(name).rsplit(".", 1)[-1] not in CLASSES for name in names.values()):
        raise FieldError(
            "auto_map", names, f"models with code of their own are not supported; the classes known here are {', '.join(CLASSES)}"
        )
    return {}


SHARED = L + "mlp.shared_experts."
BIAS_AND_SHARED = (
    Row(M + "mlp.router.expert_bias", {L + "mlp.gate.e_score_correction_bias": ("experts",)}, REPLICATED, of=mixture_layer, buffer=True),
    Row(M + "mlp.shared_experts.linear_fc1.weight", {SHARED + f"{x}_proj.weight": ("shared_ffn", "hidden") for x in ("gate", "up")}, GATED,
        of=mixture_layer),
    Row(M + "mlp.shared_experts.linear_fc2.weight", {SHARED + "down_proj.weight": ("hidden", "shared_ffn")}, ROW, of=mixture_layer),
)  # fmt: skip
"""What Qwen's mixtures lack: the bias that corrects the choice, and the expert that all tokens share."""

DEEPSEEK_V3 = Family(
    model_type="deepseek_v3",
    fields=head_fields("DeepseekV3ForCausalLM")
    | DECODER
    | LATENT_FIELDS
    | {
        "vocab_size": Mapped("vocab_size", 129280, "int", into="model"),
        "hidden_size": Mapped("hidden_size", 7168, "int"),
        "intermediate_size": Mapped("ffn_hidden_size", 18432, "int"),
        "num_hidden_layers": Mapped("num_layers", 61, "int"),
        "num_attention_heads": Mapped("num_attention_heads", 128, "int"),
        "max_position_embeddings": Mapped("max_sequence_length", 4096, "int", into="model"),
        "n_routed_experts": Joint(None, "int"),
        "num_local_experts": Joint(None, "int"),
        "num_experts_per_tok": Joint(8, "int", nullable=False),
        "n_group": Joint(8, "int", nullable=False),
        "topk_group": Joint(4, "int", nullable=False),
        "norm_topk_prob": Joint(True, "bool"),
        "routed_scaling_factor": Joint(2.5, "float", nullable=False),
        "n_shared_experts": Joint(1, "int", nullable=False),
        "moe_intermediate_size": Joint(2048, "int", nullable=False),
        "first_k_dense_replace": Joint(3, nullable=False),
        "num_nextn_predict_layers": Joint(),
        "num_mtp_layers": Joint(),
        "auto_map": Joint(),
        "scoring_func": Only(("sigmoid", None), "only sigmoid works"),
        "topk_method": Only(("noaux_tc", None), "only noaux_tc works"),
        "moe_layer_freq": Only((1, None), "only 1 works: every layer after the first_k_dense_replace first ones has experts"),
        "ep_size": NoEffect("how other software dealt out experts"),
        "seq_aux": NoEffect("chooses a loss that Transformers' class does not have"),
        "aux_loss_alpha": NoEffect("weighs a loss that Transformers' class does not have"),
        "pretraining_tp": NoEffect("splits a product into parts of the same sum"),
        "output_router_logits": Only((False, None), "only false works"),
        "quantization_config": Only(
            (None,),
            "FP8 weights (weight_scale_inv) are not read in this version: convert the folder to bf16 (DeepSeek's own "
            "inference/fp8_cast_bf16.py does) and remove this field",
        ),
    },
    fixed=FIXED,
    joint=(latent, latent_rope, routing, further_tokens, own_code),
    rows=(*EMBEDDING, *LATENT_ATTENTION, *MLP, *EXPERTS, *BIAS_AND_SHARED, *HEAD),
)
