"""The rotary embeddings that Megatron makes from our keywords are those of Transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import rlmca.parallel.megatron  # noqa: F401  (makes megatron importable without CUDA)
from rlmca.layouts import family_of
from tests.helpers.config_mutations import LLAMA3, base_config

ROPES: list[dict[str, Any]] = [
    {},
    {"rope_theta": 1000000},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
    {"rope_scaling": {"type": "linear", "factor": 2.0}},
    {"rope_scaling": {"type": "linear", "factor": 3.0}, "rope_theta": 5e5},
    {"rope_parameters": LLAMA3},
    {"rope_parameters": LLAMA3 | {"rope_theta": 500000.0, "factor": 32}},
]


@pytest.mark.parametrize("rope", ROPES, ids=str)
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_angles_agree(family: str, rope: dict[str, Any]) -> None:
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    config = {**base_config(family), "head_dim": 64, "max_position_embeddings": 16384, **rope}
    megatron = family_of(config).megatron(config)
    names = ("rotary_percent", "seq_len_interpolation_factor", "rotary_base", "rope_scaling", "rope_scaling_factor")
    kwargs = {n: megatron.model[n] for n in names if n in megatron.model}
    ours = RotaryEmbedding(kv_channels=megatron.config["kv_channels"], use_cpu_initialization=True, **kwargs).get_emb(600)[:, 0, 0].double()
    hf = AutoConfig.for_model(**{**config, "model_type": family})
    angles = torch.arange(600).double()[:, None] * LlamaRotaryEmbedding(hf).inv_freq.double()
    torch.testing.assert_close(ours, torch.cat([angles, angles], -1), rtol=3e-7, atol=1e-9)
