"""The layout of distributed checkpoints on the plan alone: every element of every key once, every Hugging Face element used."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from rlmca.layouts import ModelLayout
from rlmca.layouts.distributed import Chunk, chunks, extra_states, layers_alike, wholes
from tests.helpers.models import FAMILIES, MIXTURES, make_model

VARIANTS: dict[str, dict[str, Any]] = {
    **{name: {} for name in (*FAMILIES, *MIXTURES)},
    "llama_biases": {"attention_bias": True, "mlp_bias": True},
    "qwen3_moe_alike": {"mlp_only_layers": []},
    "deepseek_v3_alike": {"first_k_dense_replace": 0},
    "deepseek_v3_plain_query": {"q_lora_rank": None},
}


def layout_of(variant: str, form: Any = "single") -> ModelLayout:
    name = next(name for name in sorted((*FAMILIES, *MIXTURES), key=len, reverse=True) if variant.startswith(name))
    return ModelLayout(make_model(name, **VARIANTS[variant]).config.to_dict(), form=form)


def numbered(layout: ModelLayout) -> dict[str, np.ndarray]:
    """Every Hugging Face tensor, each element with a number of its own."""
    tensors, at = {}, 1
    for name, shape in layout.hf_tensors().items():
        tensors[name] = np.arange(at, at + math.prod(shape)).reshape(shape)
        at += math.prod(shape)
    return tensors


def index(box: Any) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in box)


def filled(found: list[Chunk], hf: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The keys of a checkpoint; an element that is written twice fails, one that is not written is 0."""
    keys: dict[str, np.ndarray] = {}
    for chunk in found:
        key = keys.setdefault(chunk.key, np.zeros(chunk.shape, np.int64))
        assert chunk.size == (1,) * (len(chunk.size) - len(chunk.body)) + chunk.body
        body = np.zeros(chunk.body, np.int64)
        for name, src, dst in chunk.copies:
            assert not body[index(dst)].any()
            body[index(dst)] = hf[name][index(src)].reshape(body[index(dst)].shape)
        place = tuple(slice(o, o + n) for o, n in zip(chunk.offset, chunk.size, strict=True))
        assert not key[place].any(), f"{chunk.key} at {chunk.offset} is written twice"
        key[place] = body
    return keys


@pytest.mark.parametrize("form", ["single", "stacked"])
@pytest.mark.parametrize("stacked", [None, False])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_element_is_written_once_and_every_tensor_is_used(variant: str, stacked: bool | None, form: Any) -> None:
    layout = layout_of(variant, form)
    hf = numbered(layout)
    keys = filled(list(chunks(layout, stacked)), hf)
    assert all(value.all() for value in keys.values()), "an element that nothing fills"
    written = np.concatenate([value.ravel() for value in keys.values()])
    assert set(written.tolist()) == set(range(1, sum(value.size for value in hf.values()) + 1))
    twice = sum(math.prod(whole.shape) * (len(whole.names) - 1) for whole in wholes(layout))  # norms with a name in each layer spec
    assert len(written) == sum(value.size for value in hf.values()) + twice
    assert twice < 0.05 * len(written)


@pytest.mark.parametrize("variant", VARIANTS)
def test_stacked_keys_are_the_keys_of_the_layers_on_top_of_each_other(variant: str) -> None:
    layout = layout_of(variant)
    if not layers_alike(layout):
        assert {chunk.key for chunk in chunks(layout)} == {chunk.key for chunk in chunks(layout, False)}
        return
    hf = numbered(layout)
    stacked, single = filled(list(chunks(layout)), hf), filled(list(chunks(layout, False)), hf)
    for key, value in stacked.items():
        if not key.startswith("decoder.layers."):
            np.testing.assert_array_equal(value, single[key])
            continue
        for layer in range(layout.num_layers):
            np.testing.assert_array_equal(value[layer], single[key.replace("decoder.layers.", f"decoder.layers.{layer}.")])


def test_keys_by_hand() -> None:
    """What Megatron stores for the fused tensors, written without this package's arithmetic."""
    layout = layout_of("qwen3_moe_alike")
    hf = numbered(layout)
    keys = filled(list(chunks(layout)), hf)
    experts = [
        [np.concatenate([hf[f"model.layers.{layer}.mlp.experts.{e}.{x}_proj.weight"] for x in ("gate", "up")]) for e in range(8)]
        for layer in range(4)
    ]
    np.testing.assert_array_equal(keys["decoder.layers.mlp.experts.experts.linear_fc1.weight"], np.array(experts))
    q, k, v = (hf[f"model.layers.2.self_attn.{x}_proj.weight"] for x in "qkv")
    groups = [part for g in range(2) for part in (q[g * 32 : g * 32 + 32], k[g * 16 : g * 16 + 16], v[g * 16 : g * 16 + 16])]
    np.testing.assert_array_equal(keys["decoder.layers.self_attention.linear_qkv.weight"][2], np.concatenate(groups))
    norm = "model.layers.3.post_attention_layernorm.weight"
    for name in ("decoder.layers.mlp.linear_fc1.layer_norm_weight", "decoder.layers.pre_mlp_layernorm.weight"):
        np.testing.assert_array_equal(keys[name][3], hf[norm])
    np.testing.assert_array_equal(keys["embedding.word_embeddings.weight"], hf["model.embed_tokens.weight"])


def test_norms_of_latent_attention_have_the_names_of_both_layer_specs() -> None:
    """megatron-core's local spec has norms of their own there, Transformer Engine's fuses them into what follows."""
    layout = layout_of("deepseek_v3")
    hf = numbered(layout)
    keys = filled(list(chunks(layout)), hf)
    attention, own = "decoder.layers.1.self_attention.", "model.layers.1.self_attn."
    for name, norm in {
        "q_layernorm.weight": "q_a_layernorm.weight",
        "linear_q_up_proj.layer_norm_weight": "q_a_layernorm.weight",
        "kv_layernorm.weight": "kv_a_layernorm.weight",
        "linear_kv_up_proj.layer_norm_weight": "kv_a_layernorm.weight",
    }.items():
        np.testing.assert_array_equal(keys[attention + name], hf[own + norm])
    for name in ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"):  # of the layer without experts
        np.testing.assert_array_equal(keys[f"decoder.layers.0.{name}"], hf["model.layers.0.post_attention_layernorm.weight"])
    assert "decoder.layers.1.mlp.linear_fc1.layer_norm_weight" not in keys
    np.testing.assert_array_equal(keys["decoder.layers.1.mlp.router.expert_bias"], hf["model.layers.1.mlp.gate.e_score_correction_bias"])


def test_a_tied_model_has_no_output_layer() -> None:
    assert "output_layer.weight" not in {chunk.key for chunk in chunks(layout_of("qwen3_tied"))}
    assert "output_layer.weight" in {chunk.key for chunk in chunks(layout_of("qwen3_untied"))}


def test_gate_and_up_are_chunks_of_their_own_and_experts_too() -> None:
    found = [chunk for chunk in chunks(layout_of("mixtral")) if chunk.key.endswith("experts.linear_fc1.weight")]
    assert {chunk.size for chunk in found} == {(1, 1, 48, 32)} and {chunk.shape for chunk in found} == {(4, 8, 96, 32)}
    assert {chunk.offset for chunk in found} == {(layer, e, row, 0) for layer in range(4) for e in range(8) for row in (0, 48)}


def test_extra_states_have_a_shard_for_each_layer_and_expert() -> None:
    found = extra_states(layout_of("mixtral"))
    assert len(found) == len(set(found))
    assert {"decoder.layers.mlp.experts.experts.linear_fc1._extra_state/shard_3.7_4.8",
            "decoder.layers.self_attention.linear_qkv._extra_state/shard_0_4",
            "decoder.layers.self_attention.core_attention._extra_state/shard_0_4",
            "decoder.final_layernorm._extra_state/shard_0_1"} <= set(found)  # fmt: skip
    assert "decoder.layers.3.mlp.experts.experts.linear_fc2._extra_state/shard_7_8" in extra_states(layout_of("qwen3_moe"))
    assert not [key for key in found if "router" in key or "embedding" in key]
