"""What the dense decoder families share: rules for common config fields, rotary embeddings, attention, rows of a layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlmca.layouts.families.angles import ROPE_KEYS, scaling
from rlmca.layouts.fields import FieldError, Joint, Mapped, NoEffect, Only, Rule, Values
from rlmca.layouts.rows import GATED, QKV, REPLICATED, ROW, VOCABULARY, MegatronModel, Row

Part = dict[str, dict[str, Any]]
"""What a joint rule adds to the parts of a `MegatronModel`: {"config": {...}, "model": {...}, ...}."""

GENERATION = (
    "max_length", "min_length", "max_new_tokens", "do_sample", "early_stopping", "num_beams", "num_beam_groups", "temperature",
    "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size",
    "bad_words_ids", "num_return_sequences", "output_scores", "return_dict_in_generate", "forced_bos_token_id",
    "forced_eos_token_id", "remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens",
    "begin_suppress_tokens", "diversity_penalty", "epsilon_cutoff", "eta_cutoff", "encoder_repetition_penalty",
    "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold", "assistant_lookbehind",
    "target_lookbehind", "decoder_start_token_id",
)  # fmt: skip
CLASSIFIER = ("id2label", "label2id", "num_labels", "problem_type", "finetuning_task", "task_specific_params")
BOOKKEEPING = ("transformers_version", "_name_or_path", "name_or_path", "_commit_hash", "tokenizer_class", "prefix", "model_type",
               "unsloth_version", "unsloth_fixed")  # fmt: skip
REPORTING = ("output_hidden_states", "output_attentions", "output_router_logits", "return_dict", "tie_last_hidden_states")


def head_fields(architecture: str) -> dict[str, Rule]:
    """Fields of every Transformers config: what they report, how they generate, what they were saved by."""
    return {
        **{name: NoEffect("used by text generation only") for name in GENERATION},
        **{name: NoEffect("belongs to a classification head, which a language model lacks") for name in CLASSIFIER},
        **{name: NoEffect("says where the config comes from") for name in BOOKKEEPING},
        **{name: NoEffect("chooses what a forward pass returns besides the logits") for name in REPORTING},
        "architectures": Only((None, [architecture]), f'only ["{architecture}"] works'),
        "dtype": NoEffect("type of the stored weights; the run chooses the type it trains in"),
        "torch_dtype": NoEffect("older name of dtype"),
        "use_cache": NoEffect("caches keys and values while generating"),
        "pad_token_id": NoEffect("changes no value of a forward pass over loaded weights"),
        "bos_token_id": NoEffect("read by tokenizer and generation only"),
        "eos_token_id": NoEffect("read by tokenizer and generation only"),
        "sep_token_id": NoEffect("read by tokenizer and generation only"),
        "attn_implementation": NoEffect("chooses a kernel of the same arithmetic"),
        "_attn_implementation": NoEffect("chooses a kernel of the same arithmetic"),
        "_attn_implementation_autoset": NoEffect("chooses a kernel of the same arithmetic"),
        "torchscript": NoEffect("chooses how a module is traced"),
        "use_bfloat16": NoEffect("read by TensorFlow models only"),
        "tf_legacy_loss": NoEffect("read by TensorFlow models only"),
        "chunk_size_feed_forward": NoEffect("read by encoder models only"),
        "pruned_heads": Only((None, {}), "heads cannot be pruned; remove the field"),
        "is_encoder_decoder": Only((False,), "only decoder models work (false)"),
        "is_decoder": NoEffect("a causal language model is a decoder either way"),
        "add_cross_attention": Only((False, None), "only false works"),
        "cross_attention_hidden_size": Only((None,), "only null works"),
        "tie_encoder_decoder": Only((False, None), "only false works"),
        "per_layer_config": Only((None, {}), "all layers must be alike; remove the field"),
        "quantization_config": Only((None,), "only unquantized weights work; save the model in bf16 without this field"),
        "auto_map": Only((None, {}), "models with code of their own are not supported; remove it if the weights fit the built-in class"),
    }  # fmt: skip


DECODER: dict[str, Rule] = {
    "vocab_size": Mapped("vocab_size", 151936, "int", into="model"),
    "hidden_size": Mapped("hidden_size", 4096, "int"),
    "intermediate_size": Mapped("ffn_hidden_size", 22016, "int"),
    "num_hidden_layers": Mapped("num_layers", 32, "int"),
    "num_attention_heads": Mapped("num_attention_heads", 32, "int"),
    "num_key_value_heads": Joint(32, "int"),
    "head_dim": Joint(None, "int"),
    "hidden_act": Only(("silu", "swish"), "only silu works (Megatron's fused and unfused gated MLP agree on it)"),
    "max_position_embeddings": Mapped("max_sequence_length", 32768, "int", into="model"),
    "initializer_range": Mapped("init_method_std", 0.02, "float"),
    "rms_norm_eps": Mapped("layernorm_epsilon", 1e-6, "float"),
    "tie_word_embeddings": Mapped("share_embeddings_and_output_weights", False, "bool", into="model"),
    "attention_dropout": Mapped("attention_dropout", 0.0, "float"),
    "rope_parameters": Joint(),
    "rope_scaling": Joint(),
    "rope_theta": Joint(),
    "partial_rotary_factor": Only((None, 1.0), "only 1.0 works"),
}
"""Fields that the arithmetic reads in all three families, with Qwen's defaults."""

WINDOWS: dict[str, Rule] = {
    "use_sliding_window": Joint(False, "bool"),
    "sliding_window": Joint(4096, "int"),
    "max_window_layers": Joint(28),
    "layer_types": Joint(),
}

FIXED: dict[str, Any] = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": "silu",
    "hidden_dropout": 0.0,
    "add_bias_linear": False,
    "add_qkv_bias": False,
    "qk_layernorm": False,
}


def heads(values: Values) -> Part:
    """Grouped-query attention: KV heads and the size of a head, derived when they are null."""
    n, kv = values["num_attention_heads"], values["num_key_value_heads"] or values["num_attention_heads"]
    if n % kv:
        raise FieldError("num_key_value_heads", kv, f"it must divide num_attention_heads ({n})")
    head = values["head_dim"]
    if head is None:
        if values["hidden_size"] % n:
            works = f"without head_dim, num_attention_heads must divide hidden_size ({values['hidden_size']})"
            raise FieldError("num_attention_heads", n, works)
        head = values["hidden_size"] // n
    if head % 2:
        raise FieldError("head_dim", head, "rotary embeddings need an even number")
    return {"config": {"num_query_groups": kv, "kv_channels": head}}


def rope_table(values: Values, known: Mapping[str, set[str]]) -> tuple[str, Mapping[str, Any], str, float]:
    """(field, its table, rope type, theta) in both spellings: `rope_parameters`, or `rope_theta` and `rope_scaling` of
    Transformers 4. `known` has the keys of each type; whatever else a table holds is refused."""
    both = [f for f in ("rope_parameters", "rope_scaling") if values[f]]
    if len(both) == 2 and values["rope_parameters"] != values["rope_scaling"]:
        raise FieldError("rope_scaling", values["rope_scaling"], "it contradicts rope_parameters; keep one of them")
    field = both[0] if both else "rope_parameters"
    params: Mapping[str, Any] = values[field] or {}
    if not isinstance(params, Mapping) or any(isinstance(v, Mapping) for v in params.values()):
        raise FieldError(field, params, "write one flat table for all layers")
    kind = params.get("rope_type", params.get("type", "default"))
    top = values["rope_theta"]
    theta = params.get("rope_theta", 10000.0 if top is None else top)

    def refuse(key: str, value: Any, works: str) -> FieldError:
        return FieldError(f"{field}.{key}", value, works)

    if kind not in known:
        *most, last = known
        raise refuse("type" if "rope_type" not in params else "rope_type", kind, f"{', '.join(most)} and {last} work")
    if isinstance(theta, bool) or not isinstance(theta, int | float) or theta <= 0:
        raise FieldError(f"{field}.rope_theta" if "rope_theta" in params else "rope_theta", theta, "write a positive number")
    if top is not None and top != theta:
        raise FieldError("rope_theta", top, f"it contradicts {field}.rope_theta ({theta}); keep one of them")
    if "type" in params and params["type"] != kind:
        raise refuse("type", params["type"], f"it contradicts rope_type ({kind})")
    if params.get("partial_rotary_factor", 1.0) != 1.0:
        raise refuse("partial_rotary_factor", params["partial_rotary_factor"], "only 1.0 works")
    for key in sorted(set(params) - known[kind] - {"rope_type", "type", "rope_theta", "partial_rotary_factor"}):
        raise refuse(key, params[key], f"the keys of rope_type {kind} are {sorted(known[kind] | {'rope_type', 'rope_theta'})}")
    return field, params, kind, theta


def rope(values: Values) -> Part:
    """Rotary embeddings of Megatron's `RotaryEmbedding`, see `rope_table`; scaled ones as numbers for `models/rope.py`."""
    field, params, kind, theta = rope_table(values, ROPE_KEYS)
    return {
        "model": {"position_embedding_type": "rope", "rotary_percent": 1.0, "rotary_base": theta},
        "rope": scaling(field, params, kind, values["max_position_embeddings"]),
    }


def full_attention(values: Values) -> Part:
    """Refuses windows. As in Transformers, a layer has one when its `layer_types` entry says so, or, without entries, when
    `use_sliding_window` is set and its number is at least `max_window_layers`."""
    layers, types = values["num_hidden_layers"], values["layer_types"]
    if types is not None:
        if not isinstance(types, list | tuple) or len(types) != layers:
            raise FieldError("layer_types", types, f"write one entry for each of {layers} layers")
        if other := sorted({str(t) for t in types} - {"full_attention", "attention"}):
            raise FieldError("layer_types", other, "only full_attention works")
    elif values["use_sliding_window"] and values["sliding_window"] is not None:
        first = values["max_window_layers"]
        if not isinstance(first, int) or first < layers:
            works = f"only full attention works: write use_sliding_window: false (layers {first} to {layers - 1} would have a window)"
            raise FieldError("use_sliding_window", True, works)
    return {}


def qkv_bias(megatron: MegatronModel) -> bool:
    """Whether the fused QKV projection has a bias."""
    return bool(megatron.config["add_qkv_bias"] or megatron.config["add_bias_linear"])


def linear_bias(megatron: MegatronModel) -> bool:
    """Whether the other linear layers have one."""
    return bool(megatron.config["add_bias_linear"])


def dense_layer(megatron: MegatronModel, layer: int) -> bool:
    """Whether a layer has one feed-forward network for all tokens."""
    return not megatron.has_experts(layer)


def mixture_layer(megatron: MegatronModel, layer: int) -> bool:
    """Whether a layer chooses among experts."""
    return megatron.has_experts(layer)


L, M = "model.layers.{l}.", "decoder.layers.{l}."

EMBEDDING = (
    Row("embedding.word_embeddings.weight", {"model.embed_tokens.weight": ("vocab", "hidden")}, VOCABULARY, at="first"),
)  # fmt: skip
ATTENTION = (
    Row(M + "input_layernorm.weight", {L + "input_layernorm.weight": ("hidden",)}, REPLICATED,
        te=M + "self_attention.linear_qkv.layer_norm_weight"),
    Row(M + "self_attention.linear_qkv.weight", {L + "self_attn.q_proj.weight": ("q", "hidden"),
        L + "self_attn.k_proj.weight": ("kv", "hidden"), L + "self_attn.v_proj.weight": ("kv", "hidden")}, QKV),
    Row(M + "self_attention.linear_qkv.bias", {L + f"self_attn.{x}_proj.bias": ("q" if x == "q" else "kv",) for x in "qkv"}, QKV,
        when=qkv_bias),
    Row(M + "self_attention.linear_proj.weight", {L + "self_attn.o_proj.weight": ("hidden", "q")}, ROW),
    Row(M + "self_attention.linear_proj.bias", {L + "self_attn.o_proj.bias": ("hidden",)}, REPLICATED, when=linear_bias),
)  # fmt: skip
QK_NORM = (
    Row(M + "self_attention.q_layernorm.weight", {L + "self_attn.q_norm.weight": ("head",)}, REPLICATED),
    Row(M + "self_attention.k_layernorm.weight", {L + "self_attn.k_norm.weight": ("head",)}, REPLICATED),
)  # fmt: skip
MLP = (
    Row(M + "pre_mlp_layernorm.weight", {L + "post_attention_layernorm.weight": ("hidden",)}, REPLICATED,
        te=M + "mlp.linear_fc1.layer_norm_weight", of=dense_layer),
    Row(M + "mlp.linear_fc1.weight", {L + f"mlp.{x}_proj.weight": ("ffn", "hidden") for x in ("gate", "up")}, GATED, of=dense_layer),
    Row(M + "mlp.linear_fc1.bias", {L + f"mlp.{x}_proj.bias": ("ffn",) for x in ("gate", "up")}, GATED, when=linear_bias,
        of=dense_layer),
    Row(M + "mlp.linear_fc2.weight", {L + "mlp.down_proj.weight": ("hidden", "ffn")}, ROW, of=dense_layer),
    Row(M + "mlp.linear_fc2.bias", {L + "mlp.down_proj.bias": ("hidden",)}, REPLICATED, when=linear_bias, of=dense_layer),
)  # fmt: skip
EXPERTS = (
    Row(M + "pre_mlp_layernorm.weight", {L + "post_attention_layernorm.weight": ("hidden",)}, REPLICATED, of=mixture_layer),
    Row(M + "mlp.router.weight", {L + "mlp.gate.weight": ("experts", "hidden")}, REPLICATED, of=mixture_layer),
    Row(M + "mlp.experts.local_experts.{e}.linear_fc1.weight",
        {L + f"mlp.experts.{{e}}.{x}_proj.weight": ("moe_ffn", "hidden") for x in ("gate", "up")}, GATED,
        te=M + "mlp.experts.linear_fc1.weight{e}", of=mixture_layer, expert=True, stacked=L + "mlp.experts.gate_up_proj"),
    Row(M + "mlp.experts.local_experts.{e}.linear_fc2.weight", {L + "mlp.experts.{e}.down_proj.weight": ("hidden", "moe_ffn")}, ROW,
        te=M + "mlp.experts.linear_fc2.weight{e}", of=mixture_layer, expert=True, stacked=L + "mlp.experts.down_proj"),
)  # fmt: skip
HEAD = (
    Row("decoder.final_layernorm.weight", {"model.norm.weight": ("hidden",)}, REPLICATED, at="last"),
    Row("output_layer.weight", {"lm_head.weight": ("vocab", "hidden")}, VOCABULARY, at="last", when=lambda m: not m.tied),
)  # fmt: skip
