"""Load and export are bit-exact under every topology, across real processes and inside one."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rlmca.layouts import Coord, Topology
from rlmca.transfer.export import export_hf
from rlmca.transfer.load import load_ranks
from rlmca.transfer.module import copy_to_module
from rlmca.transfer.stream import hf_tensors
from tests.helpers.models import FAMILIES, make_model
from tests.helpers.ranks import rank_pool
from tests.helpers.shards import shards_of
from tests.helpers.transfer import dirty, layout_of, live, stored, stream_and_export

TOPOLOGIES = [Topology(), Topology(vocab_multiple=64), Topology(tp=2), Topology(pp=2), Topology(2, 2), Topology(2, 2, vocab_multiple=16)]


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_loaded_shards_equal_plain_slicing(family: str, topology: Topology, hf_folders: dict[str, Path]) -> None:
    folder = hf_folders[family]
    layout = layout_of(folder)
    hf = {name: tensor.numpy() for name, tensor in stored(folder).items()}
    want = shards_of(layout.hf_config, hf, tp=topology.tp, pp=topology.pp, multiple=topology.vocab_multiple)
    for coord in topology.coords():
        params = dirty(layout, topology, coord, torch.float32)
        load_ranks(folder, layout, topology, coord, params)
        assert params.keys() == want[coord.tp, coord.pp].keys()
        for name, param in params.items():
            np.testing.assert_array_equal(param.detach().numpy(), want[coord.tp, coord.pp][name], err_msg=name)


@pytest.mark.parametrize(
    ("topology", "options"),
    [
        (Topology(tp=2), {}),
        (Topology(pp=2), {"dst_rank": 1, "shard_gb": 2e-5}),
        (Topology(tp=1), {"dp": 2}),
        (Topology(tp=2, pp=2), {"bucket_bytes": 1}),
        (Topology(tp=2, pp=2, vocab_multiple=16), {"bucket_bytes": 9000, "shard_gb": 1e-5, "dst_rank": 3}),
        (Topology(tp=2), {"dp": 2, "dst_rank": 1}),
    ],
    ids=str,
)
@pytest.mark.serial
def test_ranks_give_back_what_they_loaded(topology: Topology, options: dict, hf_folders: dict[str, Path], tmp_path: Path) -> None:
    pool = rank_pool(topology.tp * topology.pp * options.get("dp", 1))
    for family in FAMILIES:
        source, out = hf_folders[family], tmp_path / family
        results = pool.run(stream_and_export, source, out, topology, torch.float32, options)
        want = stored(source)
        dst = options.get("dst_rank", 0)
        assert [bool(r) for r in results] == [rank == dst for rank in range(pool.world_size)]
        assert list(results[dst]) == list(layout_of(source).hf_tensors())
        written = stored(out)
        assert written.keys() == results[dst].keys() == want.keys()
        for name in want:
            assert torch.equal(results[dst][name], want[name]) and torch.equal(written[name], want[name]), name


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_through_fp32_masters_comes_back_bit_for_bit(family: str, hf_folders: dict[str, Path], tmp_path: Path) -> None:
    source = hf_folders[family + "_bf16"]
    weights = live(source, Topology(vocab_multiple=64), torch.float32)
    export_hf(weights, tmp_path / "out", source, dtype=torch.bfloat16)
    have, want = stored(tmp_path / "out"), stored(source)
    assert have.keys() == want.keys() and all(torch.equal(have[n].view(torch.uint8), want[n].view(torch.uint8)) for n in want)
    assert (tmp_path / "out" / "config.json").read_bytes() == (source / "config.json").read_bytes()


def test_loading_casts_to_the_type_of_the_parameter(hf_folders: dict[str, Path]) -> None:
    weights = live(hf_folders["qwen2"], Topology(), torch.bfloat16)
    want = stored(hf_folders["qwen2"])
    for name, tensor in hf_tensors(weights):
        assert tensor.dtype == torch.bfloat16 and torch.equal(tensor, want[name].bfloat16()), name


@pytest.mark.parametrize("family", FAMILIES)
def test_exported_folder_computes_the_same_logits(family: str, hf_folders: dict[str, Path], tmp_path: Path) -> None:
    export_hf(live(hf_folders[family], Topology(), torch.float32), tmp_path / "out", hf_folders[family], shard_gb=2e-5)
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 1
    ids = torch.arange(1, 20)[None]
    ours, theirs = (AutoModelForCausalLM.from_pretrained(f).eval() for f in (tmp_path / "out", hf_folders[family]))
    with torch.no_grad():
        assert torch.equal(ours(ids).logits, theirs(ids).logits)


def test_exporting_fp32_from_a_bf16_source_does_not_round_when_loaded(hf_folders: dict[str, Path], tmp_path: Path) -> None:
    source = hf_folders["llama_bf16"]
    weights = live(source, Topology(), torch.float32)
    with torch.no_grad():
        weights.params["decoder.final_layernorm.weight"].add_(1e-4)
    export_hf(weights, tmp_path / "out", source)
    config, before = (json.loads((f / "config.json").read_text()) for f in (tmp_path / "out", source))
    assert config == {**before, "dtype": "float32"}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(model.model.norm.weight, weights.params["decoder.final_layernorm.weight"])


@pytest.mark.parametrize("family", FAMILIES)
def test_copy_to_module(family: str, hf_folders: dict[str, Path]) -> None:
    module = make_model(family, seed=5)
    weights = live(hf_folders[family], Topology(vocab_multiple=32), torch.float32)
    copy_to_module(hf_tensors(weights), module)
    want = stored(hf_folders[family])
    for name, param in module.named_parameters():
        assert torch.equal(param, want[name]) and param.requires_grad, name
    with torch.no_grad():  # the plan refers to live parameters: the next stream carries the update
        weights.params["decoder.final_layernorm.weight"].mul_(2)
    weights.params["decoder.layers.0.mlp.linear_fc2.weight"].data = torch.zeros(32, 48)  # moved to other storage
    copy_to_module(hf_tensors(weights), module)
    assert torch.equal(module.model.norm.weight, 2 * want["model.norm.weight"])
    assert not module.model.layers[0].mlp.down_proj.weight.any()


def test_copy_to_module_wants_every_parameter_once(hf_folders: dict[str, Path]) -> None:
    weights = live(hf_folders["qwen2"], Topology(), torch.float32)
    stream = {name: tensor.clone() for name, tensor in hf_tensors(weights)}
    with pytest.raises(ValueError, match="no weights came for model.norm.weight"):
        copy_to_module([(n, t) for n, t in stream.items() if n != "model.norm.weight"], make_model("qwen2"))
    with pytest.raises(ValueError, match="model.norm.weight came twice"):
        copy_to_module([*stream.items(), ("model.norm.weight", stream["model.norm.weight"])], make_model("qwen2"))
    with pytest.raises(ValueError, match="no parameter model.extra"):
        copy_to_module([("model.extra", torch.zeros(1))], make_model("qwen2"))
    with pytest.raises(ValueError, match=r"\(33,\).*\(32,\)"):
        copy_to_module([("model.norm.weight", torch.zeros(33))], make_model("qwen2"))


def test_one_process_copies_only_what_is_interleaved(hf_folders: dict[str, Path]) -> None:
    weights = live(hf_folders["qwen3_untied"], Topology(vocab_multiple=64), torch.float32)
    storages = {p.untyped_storage().data_ptr() for p in weights.params.values()}
    copied = {name.split(".", 3)[-1] for name, t in hf_tensors(weights) if t.untyped_storage().data_ptr() not in storages}
    assert copied == {f"self_attn.{x}_proj.weight" for x in "qkv"}
    assert not any(t.requires_grad for _, t in hf_tensors(weights))


def test_streaming_leaves_the_consumers_grad_mode_alone(hf_folders: dict[str, Path]) -> None:
    for _ in hf_tensors(live(hf_folders["qwen3_tied"], Topology(), torch.float32)):
        assert torch.is_grad_enabled()


def test_gradients_travel_by_the_same_plan(hf_folders: dict[str, Path]) -> None:
    weights = live(hf_folders["qwen2"], Topology(), torch.bfloat16)
    gradients = weights.with_params({name: torch.ones_like(p, dtype=torch.float32) for name, p in weights.params.items()})
    seen = {name: (tuple(t.shape), t.dtype, bool((t == 1).all())) for name, t in hf_tensors(gradients)}
    assert seen == {name: (shape, torch.float32, True) for name, shape in weights.layout.hf_tensors().items()}


def test_live_weights_check_what_they_are_given(hf_folders: dict[str, Path]) -> None:
    weights = live(hf_folders["qwen2"], Topology(), torch.float32)
    some = dict(weights.params)
    del some["decoder.final_layernorm.weight"]
    with pytest.raises(ValueError, match="lacks decoder.final_layernorm.weight"):
        weights.with_params(some)
    with pytest.raises(ValueError, match="one dtype"):
        weights.with_params({**weights.params, "decoder.final_layernorm.weight": torch.zeros(32, dtype=torch.float64)})
    with pytest.raises(ValueError, match="process group"):
        type(weights)(weights.layout, Topology(tp=2), Coord(), {})
