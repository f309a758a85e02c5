"""Every field of a family's Hugging Face config, changed one by one, and what must come of it.

The list is made by walking the fields of the config class, so a field that a new Transformers version adds fails here
until somebody decides what it means.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import (
    DeepseekV3Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from tests.helpers import deepseek_mutations


@dataclass(frozen=True)
class Maps:
    """The change must arrive in these keywords of TransformerConfig or GPTModel, and in no other.

    `logits` is False where it is read only when weights are drawn or in training: the logits of given weights stay.
    """

    keywords: Mapping[str, Any]
    logits: bool = True


@dataclass(frozen=True)
class Refused:
    """The change must be an error that names this field (default: the changed one) and its value."""

    named: str = ""


@dataclass(frozen=True)
class NoEffect:
    """The change must alter no keyword, and no logit of the Transformers model."""


@dataclass(frozen=True)
class Mutation:
    """`base_config(family) | {field: value} | also`, and the expectation."""

    field: str
    value: Any
    expect: Maps | Refused | NoEffect
    also: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.field}={self.value!r}" + (f",{dict(self.also)!r}" if self.also else "")

    def apply(self, base: Mapping[str, Any]) -> dict[str, Any]:
        return copy.deepcopy({**base, self.field: self.value, **self.also})  # Transformers writes into what it is given


CONFIG_CLASSES: dict[str, type] = {
    "qwen3": Qwen3Config,
    "qwen3_moe": Qwen3MoeConfig,
    "qwen2": Qwen2Config,
    "qwen2_moe": Qwen2MoeConfig,
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "mixtral": MixtralConfig,
    "deepseek_v3": DeepseekV3Config,
}


def base_config(family: str) -> dict[str, Any]:
    """A small config of the family as a config.json would hold it; everything not named is the class's default."""
    if family == "deepseek_v3":
        return deepseek_mutations.base_config()
    own = {
        "qwen3": {"head_dim": 16},
        "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [1]},
        "qwen2": {},
        "qwen2_moe": {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
            "mlp_only_layers": [1],
        },
        "llama": {},
        "mistral": {"sliding_window": 4},
        "mixtral": {"num_local_experts": 4},
    }[family]
    return {
        "model_type": family,
        "vocab_size": 67,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        **own,
    }


LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
YARN_NUMBERS = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 32, "beta_slow": 1,
                "truncate": True, "attention_factor": 0.1 * math.log(4.0) + 1.0}  # fmt: skip


YARN_CHANGES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"factor": 8, "beta_fast": 3, "beta_slow": None}, {"factor": 8, "beta_fast": 3, "attention_factor": 0.1 * math.log(8) + 1.0}),
    ({"attention_factor": 0.75, "beta_slow": 0.5}, {"attention_factor": 0.75, "beta_slow": 0.5}),
    ({"truncate": False, "beta_fast": 0}, {"truncate": False}),
    ({"mscale": 2.0}, {}),
    ({"mscale": 2.0, "mscale_all_dim": 0.5},
     {"attention_factor": (0.1 * 2.0 * math.log(4.0) + 1.0) / (0.1 * 0.5 * math.log(4.0) + 1.0)}),
]  # fmt: skip
"""Changes of a table, and what they change of its numbers."""


def scaled(table: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """The keyword that a table of rotary embeddings must become, without the base."""
    return {"rope": {key: value for key, value in table.items() if key != "rope_theta"} | changes}


OTHER_ROPES = [
    {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
        "original_max_position_embeddings": 32,
    },
    {"rope_type": "proportional", "rope_theta": 10000.0},
]


def _same(*values: Any) -> list[tuple[Any, NoEffect]]:
    return [(value, NoEffect()) for value in values]


def _refused(*values: Any) -> list[tuple[Any, Refused]]:
    return [(value, Refused()) for value in values]


def _class_fields(family: str) -> dict[str, list[tuple[Any, ...]]]:
    """field of the config class -> [(value, expectation[, other fields])]."""
    of_three = {"qwen3_moe": [1, 0, 1], "qwen2_moe": [1, 0, 1], "mixtral": [1, 1, 1]}.get(family)
    based = {"rotary_base": 10000.0} if family == "mixtral" else {}  # where a rope names the base that other families have anyway
    derived = family != "qwen3"  # without head_dim, the size of a head follows from hidden_size and heads
    same_head = {} if family == "qwen3" else {"head_dim": 8}  # Transformers' YaRN fails where the class leaves head_dim null
    windows: dict[str, list[tuple[Any, ...]]] = {
        "use_sliding_window": [
            *_same(True),  # the window would begin at layer 28 of 2
            (True, Refused(), {"max_window_layers": 1, "sliding_window": 4}),
            (True, NoEffect(), {"max_window_layers": 1, "sliding_window": None}),
            *_refused("yes"),
        ],
        "sliding_window": _same(4, None),
        "max_window_layers": _same(0),
        "layer_types": [
            (["full_attention", "full_attention"], NoEffect()),
            (["attention", "full_attention"], NoEffect()),
            (["full_attention", "sliding_attention"], Refused(), {"use_sliding_window": True, "sliding_window": 4}),
            *_refused(["full_attention"], ["full_attention", "linear_attention"]),
        ],
    }
    mixture: dict[str, list[tuple[Any, ...]]] = {
        "decoder_sparse_step": [
            (2, Maps({"moe_layer_freq": [0, 1]}), {"mlp_only_layers": []}),
            (3, Refused(), {"mlp_only_layers": []}),
            *_refused(None),
        ],
        "mlp_only_layers": [
            ([0], Maps({"moe_layer_freq": [0, 1]})),
            ([7], Maps({"moe_layer_freq": [1, 1]})),
            (None, Maps({"moe_layer_freq": [1, 1]})),
            *_refused([0, 1], "0"),
        ],
        "moe_intermediate_size": [(16, Maps({"moe_ffn_hidden_size": 16})), *_refused(0)],
        "num_experts_per_tok": [
            (3, Maps({"moe_router_topk": 3})),
            (1, Maps({"moe_router_topk": 1})),
            (1, Refused(), {"norm_topk_prob": True}),
            *_refused(5, None),
        ],
        "norm_topk_prob": [(True, Maps({"moe_router_pre_softmax": False})), *_refused(1)],
        "output_router_logits": _refused(True),
        "router_aux_loss_coef": _same(0.5),
    }
    own: dict[str, dict[str, list[tuple[Any, ...]]]] = {
        "qwen3": {**windows, "attention_bias": _refused(True), "head_dim": [(8, Maps({"kv_channels": 8})), *_refused(7, None)]},
        "qwen3_moe": {
            "attention_bias": _refused(True),
            "use_sliding_window": [
                (True, Refused(), {"sliding_window": 4}),
                (True, NoEffect(), {"sliding_window": None}),
                *_refused("yes"),
            ],
            "sliding_window": _same(4, None),
            **mixture,
            "num_experts": [(8, Maps({"num_moe_experts": 8})), *_refused("4"), (8, Refused("num_local_experts"), {"num_local_experts": 4})],
        },
        "qwen2": windows,
        "qwen2_moe": {
            **windows,
            "use_sliding_window": [
                (True, Refused(), {"sliding_window": 4}),
                (True, Refused(), {"max_window_layers": 1, "sliding_window": 4}),
                (True, NoEffect(), {"max_window_layers": 0, "sliding_window": 4}),
                *_refused("yes"),
            ],
            **mixture,
            "num_experts": [(8, Maps({"num_moe_experts": 8})), *_refused("4", None, 0)],
            "shared_expert_intermediate_size": [(16, Maps({"moe_shared_expert_intermediate_size": 16})), *_refused(0, None)],
            "qkv_bias": [(False, Maps({"add_qkv_bias": False})), *_refused(None)],
        },
        "mixtral": {
            "head_dim": [(16, Maps({"kv_channels": 16})), (None, NoEffect()), *_refused(7)],
            "sliding_window": [*_same(None), *_refused(4)],
            "num_local_experts": [(8, Maps({"num_moe_experts": 8})), *_refused("4", None, 0)],
            "num_experts_per_tok": [(3, Maps({"moe_router_topk": 3})), *_refused(1, 5, None)],
            "router_jitter_noise": _refused(0.1),
            "output_router_logits": _refused(True),
            "router_aux_loss_coef": _same(0.5),
        },
        "mistral": {
            "head_dim": [(16, Maps({"kv_channels": 16})), (None, NoEffect()), *_refused(7)],
            "sliding_window": [
                (None, Maps({"window_size": None})),
                (3, Maps({"window_size": (2, 0)})),
                (1, Maps({"window_size": (0, 0)})),
                (16, Maps({"window_size": (15, 0)})),
                *_refused(0, -1, True, "4"),
            ],
        },
        "llama": {
            "head_dim": [(16, Maps({"kv_channels": 16})), (None, NoEffect()), *_refused(7)],
            "attention_bias": [*_refused(True), (True, Maps({"add_bias_linear": True}), {"mlp_bias": True})],
            "mlp_bias": [(True, Refused("attention_bias"))],
            "pretraining_tp": _same(2),
        },
    }
    return own[family] | {
        "vocab_size": [(71, Maps({"vocab_size": 71})), *_refused(0, "67", 67.5)],
        "hidden_size": [(48, Maps({"hidden_size": 48} | ({"kv_channels": 12} if derived else {})))],
        "intermediate_size": [(64, Maps({"ffn_hidden_size": 64} | ({"moe_ffn_hidden_size": 64} if family == "mixtral" else {})))],
        "num_hidden_layers": [(3, Maps({"num_layers": 3} | ({"moe_layer_freq": of_three} if of_three else {})))],
        "num_attention_heads": [
            (8, Maps({"num_attention_heads": 8} | ({"kv_channels": 4} if derived else {}))),
            (5, Refused("num_key_value_heads")),
        ],
        "num_key_value_heads": [
            (1, Maps({"num_query_groups": 1})),
            (None, Refused() if of_three or family == "mistral" else Maps({"num_query_groups": 4})),  # else its class has no null
            *_refused(3),
        ],
        "hidden_act": [*_same("swish"), *_refused("gelu", "gelu_pytorch_tanh", "relu")],
        "max_position_embeddings": [(256, Maps({"max_sequence_length": 256}, logits=False))],
        "initializer_range": [(0.05, Maps({"init_method_std": 0.05}, logits=False))],
        "rms_norm_eps": [(1e-3, Maps({"layernorm_epsilon": 1e-3})), *_refused("1e-5", None)],
        "use_cache": _same(False),
        "tie_word_embeddings": [(True, Maps({"share_embeddings_and_output_weights": True})), *_refused(None)],
        "attention_dropout": [(0.25, Maps({"attention_dropout": 0.25}, logits=False))],
        "rope_parameters": [
            ({"rope_type": "default", "rope_theta": 500.0}, Maps({"rotary_base": 500.0})),
            ({"rope_theta": 500.0, "partial_rotary_factor": 1.0}, Maps({"rotary_base": 500.0})),
            ({"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}, Maps(scaled({"rope_type": "linear", "factor": 2.0}) | based)),
            (LLAMA3, Maps(scaled(LLAMA3) | based)),
            *[(LLAMA3 | {key: value}, Maps(scaled(LLAMA3, **{key: value}) | based)) for key, value in
              [("low_freq_factor", 0.5), ("high_freq_factor", 8.0), ("original_max_position_embeddings", 64)]],
            ({k: v for k, v in LLAMA3.items() if k[0] != "o"}, Maps(scaled(LLAMA3, original_max_position_embeddings=128) | based)),
            *[(YARN | change, Maps(scaled(YARN_NUMBERS, **numbers) | based), same_head) for change, numbers in YARN_CHANGES],
            ({}, NoEffect()),
            *[(rope, Refused("rope_parameters.rope_type")) for rope in OTHER_ROPES],
            *[(LLAMA3 | {key: value}, Refused(f"rope_parameters.{key}")) for key, value in
              [("low_freq_factor", 0), ("high_freq_factor", 1.0), ("original_max_position_embeddings", -1), ("factor", 0.5),
               ("factor", "8"), ("attention_factor", 2.0), ("low_freq_factor", None), ("beta_fast", 32)]],
            *[(YARN | {key: value}, Refused(f"rope_parameters.{key}")) for key, value in
              [("factor", None), ("factor", 0.5), ("factor", math.nan), ("attention_factor", 0), ("beta_fast", "32"), ("beta_slow", -1),
               ("truncate", None), ("original_max_position_embeddings", True), ("finetuned", True), ("low_freq_factor", 1.0)]],
            ({"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}, Refused("rope_parameters.partial_rotary_factor")),
            ({"rope_type": "linear", "rope_theta": 10000.0}, Refused("rope_parameters.factor")),
            ({"rope_type": "default", "rope_theta": 10000.0, "attention_factor": 2.0}, Refused("rope_parameters.attention_factor")),
            ({"full_attention": {"rope_type": "default", "rope_theta": 500.0}}, Refused("rope_parameters")),
        ],
        "pad_token_id": _same(3),
        "bos_token_id": _same(3),
        "eos_token_id": _same(3, [3, 4]),
        "transformers_version": _same("4.51.0"),
        "architectures": [([CONFIG_CLASSES[family].__name__.removesuffix("Config") + "ForCausalLM"], NoEffect()),
                          *_refused(["Qwen3ForSequenceClassification"])],
        "output_hidden_states": _same(True),
        "return_dict": _same(False),  # Transformers 5.19 itself cannot run its causal models with false in the config
        "dtype": _same("bfloat16"),
        "chunk_size_feed_forward": _same(4),
        "is_encoder_decoder": _refused(True),
        "id2label": _same({"0": "no", "1": "yes", "2": "maybe"}),
        "label2id": _same({"no": 0}),
        "problem_type": _same("regression"),
    }  # fmt: skip


def _other_fields(family: str) -> dict[str, list[tuple[Any, ...]]]:
    """Spellings of Transformers 4, and fields that the class does not know."""
    extra: dict[str, list[tuple[Any, ...]]] = {
        "qwen3": {},
        "qwen3_moe": {
            "head_dim": [(16, Maps({"kv_channels": 16})), *_refused(7)],
            "max_window_layers": _same(1),
            "num_local_experts": [(4, NoEffect()), *_refused(8)],
        },
        "qwen2": {
            "head_dim": [(16, Maps({"kv_channels": 16})), *_refused(7)],
            "attention_bias": _refused(True),
            "use_mrope": [*_same(False), *_refused(True)],
        },
        "qwen2_moe": {
            "head_dim": [(16, Maps({"kv_channels": 16})), *_refused(7)],
            "num_local_experts": [*_same(None), *_refused(4)],
            "attention_bias": _refused(True),
        },
        "mixtral": {"attention_bias": _refused(True), "use_sliding_window": _refused(True)},
        "mistral": {
            "attention_bias": _refused(True),
            "mlp_bias": _refused(True),
            "use_sliding_window": _refused(True),
            "layer_types": _refused(["sliding_attention", "full_attention"]),
        },
        "llama": {"sliding_window": [*_same(None), *_refused(4)], "rope_interleaved": [*_same(False), *_refused(True)]},
    }[family]
    return extra | {
        "rope_theta": [
            (500.0, Maps({"rotary_base": 500.0})),
            (1000000, NoEffect() if family == "mixtral" else Maps({"rotary_base": 1000000})),
            (500.0, Refused(), {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
            *_refused(-1.0),
        ],
        "rope_scaling": [
            *_same(None),
            ({"type": "linear", "factor": 2.0}, Maps(scaled({"rope_type": "linear", "factor": 2.0}))),
            (
                {"rope_type": "linear", "factor": 4},
                Maps(scaled({"rope_type": "linear", "factor": 4}) | {"rotary_base": 500.0}),
                {"rope_theta": 500.0},
            ),
            ({k: v for k, v in LLAMA3.items() if k != "rope_theta"}, Maps(scaled(LLAMA3))),
            (
                {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
                Maps(scaled(YARN_NUMBERS)),
                {} if family == "qwen3" else {"head_dim": 8},
            ),
            ({"type": "dynamic", "factor": 4.0}, Refused("rope_scaling.type")),
            ({"type": "linear", "factor": 2.0}, Refused(), {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
        ],
        "partial_rotary_factor": [*_same(1.0), *_refused(0.5)],
        "torch_dtype": _same("bfloat16"),
        "quantization_config": _refused({"quant_method": "fp8"}),
        "per_layer_config": _refused({"0": {"num_key_value_heads": 4}}),
        "auto_map": _refused({"AutoModelForCausalLM": "modeling.Model"}),
        "logit_scale": _refused(0.5),
        "final_logit_softcapping": [*_same(None), *_refused(30.0)],
        "attn_logit_softcapping": _refused(50.0),
        "residual_multiplier": _refused(0.22),
        **({} if family in ("qwen3_moe", "qwen2_moe") else {"num_experts": _refused(8)}),
        "output_attentions": _same(True),
        "temperature": _same(0.6),
        "max_length": _same(4096),
        "num_labels": _same(2),
        "_name_or_path": _same("somewhere"),
    }


def _as_entries(table: Mapping[str, list[Any]]) -> dict[str, list[tuple[Any, ...]]]:
    """`deepseek_mutations` in the form of this file: there a plain dict is `Maps`, a text the field that is refused."""

    def expectation(short: Any) -> Maps | Refused | NoEffect:
        if isinstance(short, dict):
            return Maps({name: value for name, value in short.items() if name != "logits"}, logits=short.get("logits", True))
        return NoEffect() if short is None else Refused(short)

    return {name: [(value, expectation(short), *also) for value, short, *also in entries] for name, entries in table.items()}


def mutations(family: str) -> list[Mutation]:
    """All mutations of a family. Fails when the table and the fields of the config class differ."""
    deepseek = family == "deepseek_v3"
    table = _as_entries(deepseek_mutations.class_fields()) if deepseek else _class_fields(family)
    fields = {f.name for f in dataclasses.fields(CONFIG_CLASSES[family])}
    assert fields == set(table), f"undecided fields: {sorted(fields - set(table))}; gone: {sorted(set(table) - fields)}"
    other = _as_entries(deepseek_mutations.other_fields()) if deepseek else _other_fields(family)
    both = list(table.items()) + list(other.items())
    return [Mutation(name, value, expect, *also) for name, entries in both for value, expect, *also in entries]
