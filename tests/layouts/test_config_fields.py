"""Every field of a Hugging Face config is mapped, refused by name, or known to have no effect."""

from __future__ import annotations

from typing import Any

import pytest

from rlmca.layouts import FAMILIES, ModelLayout, UnsupportedField, family_of
from rlmca.layouts.fields import NoEffect as NoEffectRule
from tests.helpers.config_mutations import CONFIG_CLASSES, Maps, Mutation, NoEffect, Refused, base_config, mutations

CASES = [pytest.param(family, mutation, id=f"{family}-{mutation}") for family in FAMILIES for mutation in mutations(family)]


def keywords(config: dict[str, Any]) -> dict[str, Any]:
    megatron = family_of(config).megatron(config)
    return {**megatron.config, **megatron.model, "rope": megatron.rope}


@pytest.mark.parametrize(("family", "mutation"), CASES)
def test_changing_one_field_does_what_the_table_says(family: str, mutation: Mutation) -> None:
    base = base_config(family)
    changed = mutation.apply(base)
    match mutation.expect:
        case Refused(named):
            with pytest.raises(UnsupportedField) as caught:
                keywords(changed)
            name = named or mutation.field
            assert name in [error.field for error in caught.value.errors]
            line = next(line for line in str(caught.value).splitlines() if line.startswith(name + ":"))
            assert "is not supported; " in line and len(line.split("; ", 1)[1]) > 8  # says what to write instead
        case Maps(keywords=expected):
            assert keywords(changed) == {**keywords(base), **expected} != keywords(base)
        case NoEffect():
            assert keywords(changed) == keywords(base)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_rule_is_exercised_and_every_exemption_has_a_reason(family: str) -> None:
    tried = {mutation.field for mutation in mutations(family)}
    rules = FAMILIES[family].fields
    assert all(len(rule.why) > 5 for rule in rules.values() if isinstance(rule, NoEffectRule))
    constants = {"pruned_heads", "add_cross_attention", "cross_attention_hidden_size", "tie_encoder_decoder"}
    assert {name for name, rule in rules.items() if not isinstance(rule, NoEffectRule)} - constants <= tried
    for name in constants:
        with pytest.raises(UnsupportedField, match=name):
            keywords({**base_config(family), name: {"0": [1]}})


@pytest.mark.parametrize("family", FAMILIES)
def test_absent_fields_take_the_defaults_of_transformers(family: str) -> None:
    assert keywords({"model_type": family}) == keywords(CONFIG_CLASSES[family]().to_dict())


def test_all_errors_come_at_once() -> None:
    bad = {**base_config("qwen3"), "hidden_act": "gelu", "logit_scale": 2.0, "rope_theta": 1.0, "rope_scaling": {"type": "longrope"}}
    with pytest.raises(UnsupportedField) as caught:
        keywords(bad)
    assert [error.field for error in caught.value.errors] == ["hidden_act", "logit_scale", "rope_scaling.type"]
    assert "'gelu'" in str(caught.value) and "2.0" in str(caught.value) and "'longrope'" in str(caught.value)


def test_unknown_model_type_names_the_families() -> None:
    with pytest.raises(ValueError, match="'gemma3'.*qwen3, qwen3_moe, qwen2, qwen2_moe, llama, mistral, mixtral, deepseek_v3"):
        ModelLayout({"model_type": "gemma3"})
    with pytest.raises(ValueError, match="None"):
        family_of({})


PUBLISHED = {
    "Qwen3-0.6B": {
        "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643,
        "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024, "initializer_range": 0.02,
        "intermediate_size": 3072, "max_position_embeddings": 40960, "max_window_layers": 28, "model_type": "qwen3",
        "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
        "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True,
        "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "Qwen2.5-0.5B": {
        "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151643,
        "hidden_act": "silu", "hidden_size": 896, "initializer_range": 0.02, "intermediate_size": 4864,
        "max_position_embeddings": 32768, "max_window_layers": 24, "model_type": "qwen2", "num_attention_heads": 14,
        "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
        "sliding_window": 32768, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "transformers_version": "4.40.1",
        "use_cache": True, "use_mrope": False, "use_sliding_window": False, "vocab_size": 151936,
    },
    "Llama-3.2-1B": {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000,
        "eos_token_id": 128001, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
        "intermediate_size": 8192, "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama",
        "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8, "pretraining_tp": 1,
        "rms_norm_eps": 1e-05, "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192, "rope_type": "llama3"}, "rope_theta": 500000.0, "tie_word_embeddings": True,
        "torch_dtype": "bfloat16", "transformers_version": "4.45.0.dev0", "use_cache": True, "vocab_size": 128256,
    },
    "Qwen1.5-MoE-A2.7B": {
        "architectures": ["Qwen2MoeForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151643,
        "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 5632,
        "max_position_embeddings": 8192, "max_window_layers": 21, "model_type": "qwen2_moe", "num_attention_heads": 16,
        "num_hidden_layers": 24, "num_key_value_heads": 16, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
        "sliding_window": 32768, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.39.0.dev0",
        "use_cache": True, "use_sliding_window": False, "vocab_size": 151936, "decoder_sparse_step": 1,
        "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632, "num_experts_per_tok": 4, "num_experts": 60,
        "norm_topk_prob": False, "output_router_logits": False, "router_aux_loss_coef": 0.001,
    },
    "Mixtral-8x7B": {
        "architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
        "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
        "max_position_embeddings": 32768, "model_type": "mixtral", "num_attention_heads": 32, "num_experts_per_tok": 2,
        "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8, "output_router_logits": False,
        "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02, "sliding_window": None,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.36.0.dev0", "use_cache": True,
        "vocab_size": 32000,
    },
    "Mistral-7B-v0.1": {
        "architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096,
        "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mistral",
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
        "sliding_window": 4096, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.34.0.dev0",
        "use_cache": True, "vocab_size": 32000,
    },
    "Mistral-7B-v0.3": {
        "architectures": ["MistralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
        "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 32768,
        "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0, "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "transformers_version": "4.42.0.dev0", "use_cache": True, "vocab_size": 32768,
    },
    "Mistral-Nemo-12B": {
        "architectures": ["MistralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 5120, "initializer_range": 0.02, "intermediate_size": 14336,
        "max_position_embeddings": 1024000, "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 40,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "sliding_window": None,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.43.0.dev0", "use_cache": True,
        "vocab_size": 131072,
    },
    "Llama-2-7b": {
        "architectures": ["LlamaForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096,
        "initializer_range": 0.02, "intermediate_size": 11008, "max_position_embeddings": 4096, "model_type": "llama",
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
        "rope_scaling": None, "tie_word_embeddings": False, "torch_dtype": "float16", "transformers_version": "4.31.0.dev0",
        "use_cache": True, "vocab_size": 32000, "attention_bias": False, "rope_theta": 10000.0,
    },
    "Llama-3.1-8B": {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000,
        "eos_token_id": [128001, 128008, 128009], "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
        "intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama",
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
        "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3"}, "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "transformers_version": "4.42.3", "use_cache": True, "vocab_size": 128256,
    },
    "Qwen2.5-7B-Instruct with YaRN": {
        "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645,
        "hidden_act": "silu", "hidden_size": 3584, "initializer_range": 0.02, "intermediate_size": 18944,
        "max_position_embeddings": 32768, "max_window_layers": 28, "model_type": "qwen2", "num_attention_heads": 28,
        "num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 131072,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.43.1", "use_cache": True,
        "use_sliding_window": False, "vocab_size": 152064,
        "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"},
    },
    "Qwen3-30B-A3B with YaRN": {
        "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643,
        "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048,
        "initializer_range": 0.02, "intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 48,
        "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768, "norm_topk_prob": True,
        "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4,
        "output_router_logits": False, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001,
        "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.51.0",
        "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    },
}  # fmt: skip
FACTORS = {"Llama-3.2-1B": 32.0, "Llama-3.1-8B": 8.0, "Qwen2.5-7B-Instruct with YaRN": 4.0, "Qwen3-30B-A3B with YaRN": 4.0}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_read(name: str) -> None:
    config = PUBLISHED[name]
    got = keywords(config)
    assert got["rotary_base"] == config["rope_theta"] and got["num_layers"] == config["num_hidden_layers"]
    assert got["rope"].get("factor") == FACTORS.get(name)
    assert got.get("window_size") == ((4095, 0) if name == "Mistral-7B-v0.1" else None)
    assert got["kv_channels"] == (
        128 if "Mistral" in name else config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    )
    modern = CONFIG_CLASSES[config["model_type"]](**config).to_dict()  # what Transformers 5 makes of it
    assert keywords(modern) == got


def test_an_unsupported_field_survives_the_way_between_processes() -> None:
    import pickle

    from rlmca.layouts.fields import FieldError, UnsupportedField

    error = UnsupportedField("qwen3", [FieldError("a", 1, "write 2")])
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) and type(again) is UnsupportedField
