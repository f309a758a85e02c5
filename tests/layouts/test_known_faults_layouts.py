"""Row A5 of the field's known faults: biases of the fused projection, and KV heads that tensor parallelism cannot share out."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from rlmca.layouts import Coord, LayoutError, ModelLayout, Topology
from rlmca.planner import preflight_errors
from tests.helpers.config_mutations import base_config
from tests.planner.test_dry_run import cfg, values

__all__ = ["values"]
BIAS = "decoder.layers.0.self_attention.linear_qkv.bias"
HF_BIAS = {f"model.layers.0.self_attn.{x}_proj.bias": start for x, start in (("q", 0), ("k", 100), ("v", 200))}


def small(model_type: str, **changes: Any) -> dict[str, Any]:
    return {**base_config(model_type), "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 8, **changes}


def fused(layout: ModelLayout, topology: Topology, coord: Coord) -> list[int]:
    """The bias of the fused projection on a rank, from q = 0.., k = 100.., v = 200..."""
    plan = layout.rank_plan(topology, coord)[BIAS]
    found = [-1] * plan.shape[0]
    for hf, source, target in plan.copies:
        for offset in range(source[0][1] - source[0][0]):
            found[target[0][0] + offset] = HF_BIAS[hf] + source[0][0] + offset
    return found


def test_a5_biases_of_q_k_and_v_are_fused_one_group_of_kv_heads_after_the_other() -> None:
    layout = ModelLayout(small("qwen2"))
    assert layout.megatron.config["kv_channels"] == 2
    whole = [0, 1, 2, 3, 100, 101, 200, 201, 4, 5, 6, 7, 102, 103, 202, 203]
    assert fused(layout, Topology(), Coord()) == whole
    assert [fused(layout, Topology(tp=2), Coord(tp=rank)) for rank in (0, 1)] == [whole[:8], whole[8:]]


def test_a5_no_bias_is_invented_and_none_dropped() -> None:
    biases = {
        kind: [name for name in ModelLayout(small(kind)).hf_tensors() if name.endswith(".bias")] for kind in ("llama", "qwen2", "qwen3")
    }
    assert biases["llama"] == biases["qwen3"] == []
    layers = base_config("qwen2")["num_hidden_layers"]
    assert len(biases["qwen2"]) == 3 * layers and set(HF_BIAS) <= set(biases["qwen2"])
    for kind in ("llama", "qwen2"):
        fused_names = [name for name in ModelLayout(small(kind)).rank_plan(Topology(), Coord()) if name.endswith(".bias")]
        assert len(fused_names) == (layers if kind == "qwen2" else 0)


def test_a5_fewer_kv_heads_than_ranks_are_refused_before_a_run(values: dict[str, Any]) -> None:
    config = small("qwen2", num_attention_heads=8, hidden_size=32, intermediate_size=64)
    layout = ModelLayout(config)
    assert layout.megatron.config["kv_channels"] == 4
    with pytest.raises(LayoutError, match="tensor_model_parallel_size is 8, but num_key_value_heads is 2") as caught:
        layout.rank_plan(Topology(tp=8), Coord())
    (Path(values["model_name_or_path"]) / "config.json").write_text(json.dumps(config))
    (error,) = preflight_errors(cfg({**values, "tensor_model_parallel_size": 8}), 8)
    assert error == str(caught.value) and error.endswith("use one of [1, 2]")
    assert preflight_errors(cfg({**values, "tensor_model_parallel_size": 2}), 2) == []


@pytest.mark.parametrize(
    ("changes", "world_size", "words"),
    [
        ({"tensor_model_parallel_size": 3}, 3, "tensor_model_parallel_size is 3, but num_key_value_heads is 2"),
        ({"pipeline_model_parallel_size": 3}, 3, "4 layers do not split evenly over 3 stages"),
        ({"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 3}, 2, "4 layers .* 2 .* 3"),
        ({"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "Ett|tL"}, 2, "holds 3 layers, the model has 4"),
        (
            {"tensor_model_parallel_size": 2, "context_parallel_size": 4, "cp_comm_type": "a2a"},
            8,
            "deals out 4 attention heads to tensor 2 x context 4 = 8 ranks",
        ),
        ({"tensor_model_parallel_size": 2, "context_parallel_size": 2}, 6, "world size 6 is not a multiple of tensor 2 .* context 2 = 4"),
        (
            {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 3},
            1,
            r"recompute_num_layers is 3 with .* uniform, but .* holds 4 layers, .* use one of \[1, 2, 4\]",
        ),
        (
            {
                "pipeline_model_parallel_size": 2,
                "recompute_granularity": "full",
                "recompute_method": "uniform",
                "recompute_num_layers": 2,
                "pipeline_model_parallel_layout": "Ettt|tL",
            },
            2,
            r"holds 3 and 1 layers, which units of 2 do not fill; use one of \[1\]",
        ),
        (
            {
                "pipeline_model_parallel_size": 2,
                "recompute_granularity": "full",
                "recompute_method": "block",
                "recompute_num_layers": 3,
            },
            2,
            "recompute_num_layers is 3 with .* block, but .* holds 2 layers; 2 recomputes all of them",
        ),
    ],
)
def test_numbers_that_do_not_come_out_even_are_named_before_a_run(
    values: dict[str, Any], changes: dict[str, Any], world_size: int, words: str
) -> None:
    (error,) = preflight_errors(cfg({**values, **changes}), world_size)
    assert re.search(words, error), error


def test_several_of_them_come_together(values: dict[str, Any]) -> None:
    wrong = {"tensor_model_parallel_size": 3, "pipeline_model_parallel_size": 3, "context_parallel_size": 3, "cp_comm_type": "a2a"}
    found = preflight_errors(cfg({**values, **wrong}), 8)
    for word in ("world size 8", "3 stages", "num_key_value_heads is 2", "4 attention heads"):
        assert [text for text in found if word in text], word
    assert len(found) == 4


def test_what_is_padded_by_itself_is_no_error(values: dict[str, Any]) -> None:
    """67 tokens of the vocabulary over 4 ranks, and rows of a length that no layout divides."""
    model = Path(values["model_name_or_path"]) / "config.json"
    model.write_text(json.dumps({**json.loads(model.read_text()), "num_key_value_heads": 4, "vocab_size": 67}))
    odd = {"tensor_model_parallel_size": 4, "context_parallel_size": 2, "sequence_parallel": True, "cutoff_len": 4099}
    assert preflight_errors(cfg({**values, **odd}), 8) == []
