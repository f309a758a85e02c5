"""The table of deepseek_v3: names and shapes of Transformers and of Transformer Engine's spec, every row needed, counts."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from rlmca.layouts import Coord, LayoutError, ModelLayout, Topology
from rlmca.layouts.families.deepseek_v3 import DEEPSEEK_V3
from rlmca.planner.parameters import rank_parameters
from tests.helpers.config_mutations import base_config
from tests.helpers.models import make_model


@pytest.mark.parametrize("shape", [{}, {"q_lora_rank": None, "first_k_dense_replace": 0}, {"tie_word_embeddings": True}], ids=str)
def test_names_and_shapes_are_those_of_the_files_and_every_row_is_needed(shape: dict[str, Any], tmp_path: Path) -> None:
    model = make_model("deepseek_v3", **shape)
    model.save_pretrained(tmp_path)
    stored = {name: tuple(tensor.shape) for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    layout = ModelLayout(model.config.to_dict())
    assert layout.hf_tensors() == stored
    assert layout.hf_buffers() == {name for name in stored if name.endswith("e_score_correction_bias")}
    for row in list(layout.rows):
        layout.rows = [other for other in DEEPSEEK_V3.rows_of(layout.megatron) if other is not row]
        unused = not any(row.of(layout.megatron, number) for number in range(layout.num_layers))
        assert unused or layout.hf_tensors().keys() < stored.keys(), row.megatron


def test_parameters_are_counted_as_transformers_counts_them() -> None:
    model = make_model("deepseek_v3")
    total, ranks = rank_parameters(model.config.to_dict(), Topology(pp=2, ep=2))
    assert total == sum(parameter.numel() for parameter in model.parameters()) == model.num_parameters()
    experts = sum(math.prod(p.shape) for n, p in model.named_parameters() if ".mlp.experts." in n)
    assert sum(rank.parameters for rank in ranks) == 2 * total - experts  # two ranks a stage share the experts and copy the rest


def test_sizes_that_do_not_split_are_refused_with_numbers() -> None:
    config = base_config("deepseek_v3")
    cases: list[tuple[dict[str, Any], Topology, str]] = [
        ({}, Topology(tp=8), "num_attention_heads is 4"),
        ({"moe_intermediate_size": 25}, Topology(tp=2, etp=1), "n_shared_experts x moe_intermediate_size is 25"),
        ({"q_lora_rank": 23}, Topology(tp=2), "q_lora_rank is 23"),
        ({"kv_lora_rank": 17}, Topology(tp=2), r"kv_lora_rank \+ qk_rope_head_dim is 25"),
        ({}, Topology(ep=3), "8 experts do not split"),
        ({}, Topology(etp=5), "expert_tensor_parallel_size is 5"),
    ]
    for change, topology, words in cases:
        with pytest.raises(LayoutError, match=words):
            ModelLayout({**config, **change}).check(topology)


def test_names_of_transformer_engine() -> None:
    """Its spec joins the norms of latent vectors to the ways up, and that of a dense feed-forward network to its first layer."""
    layout = ModelLayout(base_config("deepseek_v3"), spec="te")
    names = set(layout.rank_plan(Topology(), Coord()))
    attention = "decoder.layers.1.self_attention."
    assert {name.removeprefix(attention) for name in names if name.startswith(attention)} == {
        "linear_q_down_proj.weight", "linear_q_up_proj.layer_norm_weight", "linear_q_up_proj.weight", "linear_kv_down_proj.weight",
        "linear_kv_up_proj.layer_norm_weight", "linear_kv_up_proj.weight", "linear_proj.weight",
    }  # fmt: skip
    assert {"decoder.layers.0.mlp.linear_fc1.layer_norm_weight", "decoder.layers.1.pre_mlp_layernorm.weight",
            "decoder.layers.1.input_layernorm.weight", "decoder.layers.1.mlp.router.expert_bias",
            "decoder.layers.1.mlp.shared_experts.linear_fc1.weight",
            "decoder.layers.1.mlp.experts.linear_fc1.weight7"} <= names  # fmt: skip
