"""The rotary embeddings that Megatron makes from a config are those of Transformers, bit by bit where they are scaled."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.mistral.modeling_mistral import MistralRotaryEmbedding
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRotaryEmbedding

import rlmca.parallel.megatron  # noqa: F401  (makes megatron importable without CUDA)
from rlmca.layouts import family_of
from tests.helpers.config_mutations import LLAMA3, base_config

ROTARY: dict[str, Any] = {
    "qwen3": Qwen3RotaryEmbedding, "qwen3_moe": Qwen3MoeRotaryEmbedding, "qwen2": Qwen2RotaryEmbedding,
    "llama": LlamaRotaryEmbedding, "mistral": MistralRotaryEmbedding,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768}
ROPES: list[dict[str, Any]] = [
    {},
    {"rope_theta": 1000000},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
    {"rope_scaling": {"type": "linear", "factor": 2.0}},
    {"rope_scaling": {"type": "linear", "factor": 3.0}, "rope_theta": 5e5},
    {"rope_parameters": LLAMA3},
    {"rope_parameters": LLAMA3 | {"rope_theta": 500000.0, "factor": 32}},
    {"rope_parameters": LLAMA3 | {"low_freq_factor": 2, "high_freq_factor": 7.5, "original_max_position_embeddings": 2048}},
    {"rope_scaling": {k: v for k, v in LLAMA3.items() if k not in ("rope_theta", "original_max_position_embeddings")}},
    {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, "rope_theta": 1000000.0},
    {"rope_parameters": YARN},
    {"rope_parameters": YARN | {"attention_factor": 0.8}},
    {"rope_parameters": YARN | {"truncate": False, "beta_fast": 24, "beta_slow": 2.5, "factor": 7.3}},
    {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.2}},
    {"rope_parameters": YARN | {"mscale": 0.7}},
    {"rope_parameters": YARN | {"factor": 1.0, "original_max_position_embeddings": 16}},
    {"rope_parameters": {k: v for k, v in YARN.items() if k[0] != "o"}},
]


def cosine_and_sine(config: dict[str, Any], positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What Megatron's attention multiplies a head's rows by, of the model that `build_policy` makes of this config."""
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import _yarn_get_concentration_factor_from_config

    from rlmca.models.rope import scale_attention, set_angles

    class Model:
        apply_rope_fusion = False

    megatron = family_of(config).megatron(config)
    model: Any = Model()
    base = megatron.model["rotary_base"]
    model.rotary_pos_emb = RotaryEmbedding(megatron.config["kv_channels"], 1.0, rotary_base=base, use_cpu_initialization=True)
    scale_attention(model, megatron.rope)
    set_angles(model, megatron.rope, base)
    angles_TD = model.rotary_pos_emb.get_emb(positions)[:, 0, 0]
    factor = _yarn_get_concentration_factor_from_config(model)
    return torch.cos(angles_TD) * factor, torch.sin(angles_TD) * factor


def compare(family: str, changes: dict[str, Any], positions: int = 6000) -> None:
    config = {**base_config(family), "head_dim": 64, "max_position_embeddings": 16384, **changes}
    hf = AutoConfig.for_model(**copy.deepcopy({**config, "model_type": family}))
    theirs = ROTARY[family](hf)(torch.zeros(1), torch.arange(positions)[None])
    for ours, expected in zip(cosine_and_sine(config, positions), theirs, strict=True):
        torch.testing.assert_close(ours, expected[0], rtol=0, atol=0)


@pytest.mark.parametrize("rope", ROPES, ids=str)
@pytest.mark.parametrize("family", ROTARY)
def test_cosines_and_sines_are_equal_bit_by_bit(family: str, rope: dict[str, Any]) -> None:
    compare(family, rope)


numbers = st.floats(1.0, 64.0)


@settings(max_examples=40, deadline=None)
@given(
    st.fixed_dictionaries(
        {"factor": numbers, "original_max_position_embeddings": st.integers(1, 40000), "rope_theta": st.floats(100.0, 1e8)},
        optional={
            "attention_factor": st.floats(0.05, 3.0), "beta_fast": numbers, "beta_slow": numbers, "truncate": st.booleans(),
            "mscale": st.floats(0.1, 2.0), "mscale_all_dim": st.floats(0.1, 2.0),
        },
    )
)  # fmt: skip
def test_any_yarn_table_is_computed_as_transformers_does(table: dict[str, Any]) -> None:
    compare("llama", {"rope_parameters": {"rope_type": "yarn", **table}}, positions=200)


@settings(max_examples=40, deadline=None)
@given(st.floats(1.0, 64.0), st.floats(0.1, 4.0), st.floats(0.1, 8.0), st.integers(1, 40000), st.floats(100.0, 1e8))
def test_any_table_of_llama3_is_computed_as_transformers_does(factor: float, low: float, more: float, old: int, theta: float) -> None:
    table = {"rope_type": "llama3", "rope_theta": theta, "factor": factor, "low_freq_factor": low}
    compare("llama", {"rope_parameters": table | {"high_freq_factor": low + more, "original_max_position_embeddings": old}}, positions=200)


def test_a_fused_kernel_that_leaves_out_the_factor_is_refused() -> None:
    from rlmca.models.rope import scale_attention

    class Config:
        apply_rope_fusion = True

    with pytest.raises(ValueError, match=r"apply_rope_fusion: .* \(1.139\); write apply_rope_fusion: false"):
        scale_attention(Config(), family_of({"model_type": "qwen2"}).megatron({**base_config("qwen2"), "rope_parameters": YARN}).rope)  # type: ignore[arg-type]
