"""The fields of DeepSeek-V3's config, one by one: (value, expectation[, other fields]).

An expectation is None (no effect), a text (refused; the field that is named, "" for the changed one) or the keywords that
change, with "logits": False where logits of given weights stay.
"""

from __future__ import annotations

from typing import Any

Entries = dict[str, list[Any]]
YARN: dict[str, Any] = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
YARN_KEYWORDS: dict[str, Any] = {
    "rope_type": "yarn", "rotary_scaling_factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 32, "beta_slow": 1,
}  # fmt: skip


def base_config() -> dict[str, Any]:
    """Small, with groups that limit the choice, a dense layer and one with experts."""
    return {
        "model_type": "deepseek_v3", "vocab_size": 67, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 128, "q_lora_rank": 24, "kv_lora_rank": 16,
        "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10, "n_routed_experts": 8, "num_experts_per_tok": 4,
        "n_group": 4, "topk_group": 2, "moe_intermediate_size": 24, "first_k_dense_replace": 1,
    }  # fmt: skip


def class_fields() -> Entries:
    """Fields of the config class."""
    free = {"moe_router_num_groups": None, "moe_router_group_topk": None}
    return {
        "vocab_size": [(71, {"vocab_size": 71}), (0, ""), ("67", "")],
        "hidden_size": [(48, {"hidden_size": 48})],
        "intermediate_size": [(64, {"ffn_hidden_size": 64})],
        "moe_intermediate_size": [(16, {"moe_ffn_hidden_size": 16, "moe_shared_expert_intermediate_size": 16}), (0, ""), (None, "")],
        "num_hidden_layers": [(3, {"num_layers": 3, "moe_layer_freq": [0, 1, 1]}), (1, "first_k_dense_replace")],
        "num_attention_heads": [(2, {"num_attention_heads": 2, "num_query_groups": 2}, {"num_key_value_heads": 2}),
                                (2, "num_key_value_heads")],
        "num_key_value_heads": [(None, None), (2, "")],
        "n_shared_experts": [(2, {"moe_shared_expert_intermediate_size": 48}), (0, ""), (None, "")],
        "n_routed_experts": [(16, {"num_moe_experts": 16}), (4, "n_group"), (9, "n_group"), (0, "")],
        "output_router_logits": [(True, "")],
        "routed_scaling_factor": [(1.5, {"moe_router_topk_scaling_factor": 1.5}), (0, ""), (0.0, ""), (None, "")],
        "kv_lora_rank": [(20, {"kv_lora_rank": 20}), (None, "")],
        "q_lora_rank": [(20, {"q_lora_rank": 20}), (None, {"q_lora_rank": None}), (0, "")],
        "qk_rope_head_dim": [(6, {"qk_pos_emb_head_dim": 6, "kv_channels": 18}), (7, "")],
        "v_head_dim": [(16, {"v_head_dim": 16}), (None, "")],
        "qk_nope_head_dim": [(8, {"qk_head_dim": 8, "kv_channels": 16}), (None, "")],
        "n_group": [
            (2, {**free}), (1, {**free}, {"topk_group": 1}), (3, ""), (8, ""), (1, "topk_group"), (None, ""),
        ],
        "topk_group": [(4, {**free}), (3, "num_experts_per_tok"), (1, "num_experts_per_tok"), (5, ""), (None, "")],
        "num_experts_per_tok": [
            (3, ""), (5, ""), (None, ""),
            (3, {"moe_router_topk": 3, **free}, {"topk_group": 4}),
            (1, {"moe_router_topk": 1, **free}, {"topk_group": 4, "norm_topk_prob": False}),
            (2, {"moe_router_topk": 2, "moe_router_group_topk": 1}, {"topk_group": 1}),
        ],
        "first_k_dense_replace": [(0, {"moe_layer_freq": [1, 1]}), (2, ""), (-1, ""), (None, ""), (True, "")],
        "norm_topk_prob": [(False, ""), (None, ""), (1, "")],
        "hidden_act": [("swish", None), ("gelu", "")],
        "max_position_embeddings": [(256, {"max_sequence_length": 256, "logits": False})],
        "initializer_range": [(0.05, {"init_method_std": 0.05, "logits": False})],
        "rms_norm_eps": [(1e-3, {"layernorm_epsilon": 1e-3}), ("1e-5", ""), (None, "")],
        "use_cache": [(False, None)],
        "pad_token_id": [(3, None)],
        "bos_token_id": [(3, None)],
        "eos_token_id": [(3, None)],
        "pretraining_tp": [(2, None)],
        "tie_word_embeddings": [(True, {"share_embeddings_and_output_weights": True}), (None, "")],
        "rope_parameters": _ropes(),
        "rope_interleave": [(False, ""), (None, "")],
        "attention_bias": [(True, "")],
        "attention_dropout": [(0.25, {"attention_dropout": 0.25, "logits": False})],
        "num_mtp_layers": [(0, None), (2, None), (2, "", {"num_nextn_predict_layers": 1}), (-1, "")],
        "transformers_version": [("4.51.0", None)],
        "architectures": [(["DeepseekV3ForCausalLM"], None), (["DeepseekV2ForCausalLM"], "")],
        "output_hidden_states": [(True, None)],
        "return_dict": [(False, None)],
        "dtype": [("bfloat16", None)],
        "chunk_size_feed_forward": [(4, None)],
        "is_encoder_decoder": [(True, "")],
        "id2label": [({"0": "no", "1": "yes", "2": "maybe"}, None)],
        "label2id": [({"no": 0}, None)],
        "problem_type": [("regression", None)],
    }  # fmt: skip


def _ropes() -> list[Any]:
    plain, both = {"mscale": 1.0, "mscale_all_dim": 0.0}, {"mscale": 0.7, "mscale_all_dim": 1.3}
    beta = {"beta_fast": 4, "beta_slow": 2}
    return [
        ({"rope_type": "default", "rope_theta": 500.0}, {"rotary_base": 500.0}),
        ({}, None),
        (YARN, {**YARN_KEYWORDS, "mscale": 1.0}),
        (YARN | both, {**YARN_KEYWORDS, **both}),
        (YARN | {"mscale": 0.7}, {**YARN_KEYWORDS, **plain}),
        (YARN | {"mscale": 0.7, "mscale_all_dim": 0}, {**YARN_KEYWORDS, **plain}),
        (YARN | beta, {**YARN_KEYWORDS, **plain, **beta}),
        (YARN | {"mscale_all_dim": 0.7}, "rope_parameters.mscale"),
        (YARN | {"factor": None}, "rope_parameters.factor"),
        (YARN | {"factor": 0.5}, "rope_parameters.factor"),
        (YARN | {"original_max_position_embeddings": None}, "rope_parameters.original_max_position_embeddings"),
        (YARN | {"attention_factor": 2.0}, "rope_parameters.attention_factor"),
        (YARN | {"truncate": False}, "rope_parameters.truncate"),
        ({"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}, "rope_parameters.rope_type"),
        ({"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}, "rope_parameters.rope_type"),
        ({"rope_type": "llama3", "rope_theta": 10000.0, "factor": 2.0}, "rope_parameters.rope_type"),
        ({"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}, "rope_parameters.partial_rotary_factor"),
    ]


def other_fields() -> Entries:
    """Spellings of Transformers 4 and of DeepSeek's own files, and fields that the class does not know."""
    old = {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
           "original_max_position_embeddings": 4096}  # fmt: skip
    code = {"AutoConfig": "configuration_deepseek.DeepseekV3Config", "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"}
    return {
        "rope_theta": [(500.0, {"rotary_base": 500.0}), (-1.0, "")],
        "rope_scaling": [
            (None, None),
            (old, {**YARN_KEYWORDS, "rotary_scaling_factor": 40, "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096}),
            ({"type": "linear", "factor": 2.0}, "rope_scaling.type"),
        ],
        "head_dim": [(8, None), (64, "")],
        "qk_head_dim": [(192, None)],
        "partial_rotary_factor": [(1.0, None), (0.5, "")],
        "num_local_experts": [(8, None), (4, "")],
        "num_nextn_predict_layers": [(0, None), (3, None), ("1", "")],
        "scoring_func": [("sigmoid", None), ("softmax", "")],
        "topk_method": [("noaux_tc", None), ("greedy", "")],
        "moe_layer_freq": [(1, None), (2, "")],
        "ep_size": [(8, None)],
        "seq_aux": [(True, None)],
        "aux_loss_alpha": [(0.001, None)],
        "torch_dtype": [("bfloat16", None)],
        "quantization_config": [({"quant_method": "fp8"}, "")],
        "per_layer_config": [({"0": {"num_key_value_heads": 4}}, "")],
        "auto_map": [(code, None), ({"AutoModelForCausalLM": "modeling.Model"}, ""), ("x", "")],
        "sliding_window": [(4, "")],
        "logit_scale": [(0.5, "")],
        "_name_or_path": [("somewhere", None)],
    }
