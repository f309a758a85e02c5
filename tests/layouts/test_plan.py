"""The copy plan, proved without tensors, and checked against plain slicing."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from rlmca.layouts import Coord, LayoutError, ModelLayout, Topology
from tests.helpers.config_mutations import base_config
from tests.helpers.shards import numbered, shards_of


@st.composite
def models(draw: st.DrawFn) -> tuple[dict[str, Any], Topology]:
    family = draw(st.sampled_from(["qwen3", "qwen2", "llama"]))
    tp, pp = draw(st.sampled_from([1, 2, 3, 4])), draw(st.sampled_from([1, 2, 3]))
    kv = tp * draw(st.integers(1, 2))
    bias = family == "llama" and draw(st.booleans())
    config = {
        "model_type": family,
        "vocab_size": draw(st.integers(2, 40)),
        "hidden_size": draw(st.integers(1, 6)),
        "intermediate_size": tp * draw(st.integers(1, 3)),
        "num_hidden_layers": pp * draw(st.integers(1, 2)),
        "num_attention_heads": kv * draw(st.integers(1, 3)),
        "num_key_value_heads": kv,
        "head_dim": 2 * draw(st.integers(1, 2)),
        "tie_word_embeddings": draw(st.booleans()),
        **({"attention_bias": True, "mlp_bias": True} if bias else {}),
    }
    return config, Topology(tp, pp, draw(st.integers(1, 5)))


def at(box: tuple[tuple[int, int], ...]) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in box)


@given(models())
def test_every_element_of_every_parameter_is_written_once(model: tuple[dict[str, Any], Topology]) -> None:
    config, topology = model
    layout = ModelLayout(config)
    vocab, shapes = config["vocab_size"], layout.hf_tensors()
    for coord in topology.coords():
        for name, param in layout.rank_plan(topology, coord).items():
            writes = np.zeros(param.shape, int)
            for hf, src, dst in param.copies:
                assert [b - a for a, b in src] == [b - a for a, b in dst]
                assert all(0 <= a < b <= n for (a, b), n in zip(src, shapes[hf], strict=True))
                assert all(0 <= a < b <= n for (a, b), n in zip(dst, param.shape, strict=True))
                writes[at(dst)] += 1
            real = param.shape[0]
            if name.startswith(("embedding.", "output_layer.")):  # rows past the vocabulary are padding
                real = min(max(vocab - coord.tp * param.shape[0], 0), param.shape[0])
            assert (writes[:real] == 1).all() and (writes[real:] == 0).all(), (name, coord)


@given(models())
def test_every_element_of_every_hf_tensor_is_read_once(model: tuple[dict[str, Any], Topology]) -> None:
    config, topology = model
    layout = ModelLayout(config)
    plan = layout.hf_plan(topology)
    assert {name: hf.shape for name, hf in plan.items()} == layout.hf_tensors()
    params = {c: layout.rank_plan(topology, c) for c in topology.coords()}
    for name, hf in plan.items():
        reads = np.zeros(hf.shape, int)
        for piece in hf.pieces:
            shape = params[piece.coord][piece.param].shape
            assert all(0 <= a < b <= n for (a, b), n in zip(piece.param_box, shape, strict=True))
            reads[at(piece.hf_box)] += 1
        assert (reads == 1).all(), name


@given(models())
def test_values_equal_plain_slicing_in_both_directions(model: tuple[dict[str, Any], Topology]) -> None:
    config, topology = model
    layout = ModelLayout(config)
    hf = numbered(layout.hf_tensors())
    want = shards_of(config, hf, tp=topology.tp, pp=topology.pp, multiple=topology.vocab_multiple)
    for coord in topology.coords():
        have = {}
        for name, param in layout.rank_plan(topology, coord).items():
            have[name] = np.zeros(param.shape, np.int64)
            for source, src, dst in param.copies:
                have[name][at(dst)] = hf[source][at(src)]
        assert have.keys() == want[coord.tp, coord.pp].keys()
        for name in have:
            np.testing.assert_array_equal(have[name], want[coord.tp, coord.pp][name], err_msg=f"{name} at {coord}")
    for name, plan in layout.hf_plan(topology).items():
        back = np.zeros(plan.shape, np.int64)
        for piece in plan.pieces:
            back[at(piece.hf_box)] = want[piece.coord.tp, piece.coord.pp][piece.param][at(piece.param_box)]
        np.testing.assert_array_equal(back, hf[name], err_msg=name)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("family", "extra"), [("qwen3", {}), ("qwen2", {}), ("llama", {}), ("llama", {"attention_bias": True, "mlp_bias": True})]
)
def test_hf_names_and_shapes_are_those_of_transformers(family: str, extra: dict[str, Any], tied: bool) -> None:
    config = {**base_config(family), "tie_word_embeddings": tied, **extra}
    kwargs = {k: v for k, v in config.items() if k != "model_type"}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **kwargs))
    theirs = {name: tuple(p.shape) for name, p in model.named_parameters()}
    ours = ModelLayout(config).hf_tensors()
    assert ours == theirs
    assert next(iter(ours)) == "model.embed_tokens.weight" and list(ours)[-1] == ("model.norm.weight" if tied else "lm_head.weight")
    layers = [int(found[1]) for name in ours if (found := re.search(r"layers\.(\d+)\.", name))]
    assert layers == sorted(layers)  # a shard of an export holds neighbouring layers


def test_replicated_weights_and_tied_embeddings_have_one_source() -> None:
    config = {**base_config("qwen3"), "tie_word_embeddings": True}
    layout, topology = ModelLayout(config), Topology(tp=2, pp=2)
    plan = layout.hf_plan(topology)
    assert {p.coord for p in plan["model.layers.1.input_layernorm.weight"].pieces} == {Coord(tp=0, pp=1)}
    assert {p.coord for p in plan["model.embed_tokens.weight"].pieces} == {Coord(0, 0), Coord(1, 0)}
    assert "output_layer.weight" in layout.rank_plan(topology, Coord(0, 1))
    assert "output_layer.weight" not in layout.rank_plan(Topology(tp=2), Coord(0, 0))
    assert "lm_head.weight" not in layout.hf_tensors()


@pytest.mark.parametrize(
    ("vocab", "tp", "multiple", "padded"), [(67, 1, 1, 67), (67, 2, 1, 68), (67, 2, 64, 128), (128, 2, 64, 128), (129, 1, 128, 256)]
)
def test_padded_vocabulary(vocab: int, tp: int, multiple: int, padded: int) -> None:
    layout, topology = ModelLayout({**base_config("qwen3"), "vocab_size": vocab}), Topology(tp=tp, vocab_multiple=multiple)
    assert layout.padded_vocab(topology) == padded
    assert layout.rank_plan(topology, Coord())["embedding.word_embeddings.weight"].shape == (padded // tp, 32)


@pytest.mark.parametrize(
    ("change", "topology", "words"),
    [
        ({}, Topology(tp=4), ["4", "num_key_value_heads is 2", "[1, 2]"]),
        ({"num_key_value_heads": 4, "intermediate_size": 50}, Topology(tp=4), ["intermediate_size is 50", "[1, 2]"]),
        ({"num_hidden_layers": 6}, Topology(pp=4), ["6 layers", "4 stages", "[1, 2, 3, 6]"]),
    ],
)
def test_models_that_do_not_split_are_refused_with_numbers(change: dict[str, Any], topology: Topology, words: list[str]) -> None:
    layout = ModelLayout({**base_config("qwen3"), **change})
    for plan in (lambda: layout.rank_plan(topology, Coord()), lambda: layout.hf_plan(topology)):
        with pytest.raises(LayoutError) as caught:
            plan()
        assert all(word in str(caught.value) for word in words), str(caught.value)


def test_topology_checks_itself() -> None:
    with pytest.raises(LayoutError, match="pp is 0"):
        Topology(pp=0)
    assert Topology(2, 2).coords() == [Coord(0, 0), Coord(1, 0), Coord(0, 1), Coord(1, 1)]
    assert list(Topology(pp=2).layers_of(1, 6)) == [3, 4, 5]


def test_layouts_need_no_torch() -> None:
    code = "import sys, rlmca.layouts; print([m for m in ('torch', 'megatron', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
