"""DeepSeek-V3: latent attention, a biased router by groups, a shared expert, layers for multi-token prediction.

`test_experts` compares its numbers under most layouts; here are its other shapes, and what its files hold beside weights.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlmca.transfer.hf_folder import HFFolderError
from rlmca.transfer.kept import KeptTensors, kept_note
from tests.helpers.engine import Layout, assert_same_numbers, gradients_on_rank, hf_reference, make_engine, random_batch
from tests.helpers.models import make_model, save_model
from tests.helpers.ranks import rank_pool
from tests.helpers.training import resume_on_rank, train_on_rank, train_plainly

pytestmark = pytest.mark.serial
EVERYWHERE = Layout("tp2_sp_pp2_ep2_etp1", tp=2, sp=True, pp=2, ep=2, etp=1)
PLAIN: dict[str, Any] = {
    "q_lora_rank": None, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}, "n_group": 1, "topk_group": 1,
    "num_experts_per_tok": 3, "first_k_dense_replace": 0, "n_shared_experts": 1, "routed_scaling_factor": 1.0,
    "tie_word_embeddings": True, "qk_rope_head_dim": 4, "v_head_dim": 16,
}  # fmt: skip
"""Queries that are not narrowed, plain angles, one group, no dense layer, values larger than the part of keys that is not rotated."""
BIAS = ".e_score_correction_bias"


@pytest.mark.parametrize(
    "layout",
    [
        Layout("one"),
        Layout("tp2_sp_etp1_pp2", tp=2, sp=True, etp=1, pp=2),
        pytest.param(Layout("cp2_a2a", cp=2, options={"cp_comm_type": "a2a"}), marks=pytest.mark.whole),
    ],
    ids=lambda layout: layout.name,
)
def test_another_shape_equals_transformers(layout: Layout, tmp_path: Path) -> None:
    folder = save_model("deepseek_v3", tmp_path, **PLAIN)
    ours = rank_pool(layout.world).run(gradients_on_rank, folder, layout, random_batch())[0]
    assert_same_numbers(ours, hf_reference(make_model("deepseek_v3", **PLAIN), random_batch()))


@pytest.mark.parametrize(
    "layout",
    [
        Layout("cp2_a2a", cp=2, options={"cp_comm_type": "a2a"}),
        Layout("cp2_packed", cp=2, packing=True, max_tokens=24),
        Layout("recompute", options={"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}),
        Layout("recompute_parts", options={"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}),
    ],
    ids=lambda layout: layout.name,
)
def test_long_rows_equal_transformers(layout: Layout, tmp_path: Path) -> None:
    folder = save_model("deepseek_v3", tmp_path)
    ours = rank_pool(layout.world).run(gradients_on_rank, folder, layout, random_batch())[0]
    assert_same_numbers(ours, hf_reference(make_model("deepseek_v3"), random_batch()))


@pytest.mark.cases(1)
@pytest.mark.parametrize("layout", [Layout("ep2", dp=2, ep=2), Layout("tp2_sp_etp1", tp=2, sp=True, etp=1)], ids=lambda layout: layout.name)
def test_ten_steps_equal_a_plain_loop(layout: Layout, tmp_path: Path) -> None:
    folder = save_model("deepseek_v3", tmp_path)
    ours = rank_pool(layout.world).run(train_on_rank, folder, layout, 8)[0][:10]
    theirs = train_plainly(make_model("deepseek_v3").train(), 8)[:10]
    for step, (mine, expected) in enumerate(zip(ours, theirs, strict=True)):
        assert abs(mine["loss"] - expected["loss"]) < 1e-4, f"step {step}"
        assert abs(mine["grad_norm"] - expected["grad_norm"]) < 1e-3 * max(1.0, expected["grad_norm"]), f"step {step}"


@pytest.mark.cases(1)
@pytest.mark.parametrize("dense", [1, 2], ids=["experts_on_both_stages", "none_on_the_first"])
def test_resume_is_the_run_without_a_break(dense: int, tmp_path: Path) -> None:
    folder = save_model("deepseek_v3", tmp_path / "model", first_k_dense_replace=dense)
    layout = Layout("pp2_ep2", pp=2, dp=2, ep=2)
    for rank in rank_pool(layout.world).run(resume_on_rank, folder, layout, tmp_path / "checkpoint"):
        assert rank["resumed"] == rank["whole"] and rank["same_weights"]


# ---- what is not trained


def further_layer(folder: Path, number: int = 4) -> dict[str, Tensor]:
    """Add a layer for multi-token prediction to the folder, in types of its own; its tensors."""
    draw = torch.Generator().manual_seed(3)
    start = f"model.layers.{number}."
    tensors = {
        start + "enorm.weight": torch.randn(32, generator=draw).bfloat16(),
        start + "eh_proj.weight": torch.randn(32, 64, generator=draw).bfloat16(),
        start + "shared_head.norm.weight": torch.randn(32, generator=draw),
        start + "mlp.gate" + BIAS: torch.randn(8, generator=draw),
        start + "mlp.experts.0.up_proj.weight": torch.randn(24, 32, generator=draw).half(),
    }
    save_file({**load_file(folder / "model.safetensors"), **tensors}, folder / "model.safetensors", {"format": "pt"})
    return tensors


def exported_on_rank(folder: Path, layout: Layout, out: Path, steps: int = 0, checkpoint: Path | None = None) -> list[Any]:
    """Train `steps`, go through a checkpoint, export; what was exported by its own account."""
    from rlmca.algorithms.losses import SftLoss
    from rlmca.transfer.export import export_hf
    from rlmca.workers import SpmdGroup

    engine = make_engine(folder, layout)
    for step in range(steps):
        SpmdGroup(engine, engine.parallel).train_batch(random_batch(seed=step), SftLoss(), 1e-2)
    if checkpoint is not None:
        engine.save(checkpoint)
        engine = make_engine(folder, layout)
        for name, tensor in engine.weights().params.items():
            if name.endswith("expert_bias"):
                tensor.zero_()  # what the load does not bring back stays lost
        engine.load(checkpoint)
    export_hf(engine.weights(), out, folder)
    return sorted(engine.weights().shapes())


@pytest.mark.parametrize("layout", [EVERYWHERE, Layout("pp2_vpp2", pp=2, vpp=2)], ids=lambda layout: layout.name)
def test_a_folder_comes_back_bit_by_bit(layout: Layout, tmp_path: Path) -> None:
    folder = save_model("deepseek_v3", tmp_path / "model")
    further_layer(folder)
    rank_pool(layout.world).run(exported_on_rank, folder, layout, tmp_path / "out")
    before, after = load_file(folder / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype and torch.equal(after[name].view(torch.uint8), tensor.view(torch.uint8)), name


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("layout", "dtype"),
    [(Layout("one"), torch.bfloat16), (Layout("one"), torch.float16), (EVERYWHERE, torch.bfloat16)],
    ids=["one_bf16", "one_fp16", "everywhere_bf16"],
)
def test_g6_biases_stay_what_they_are_in_a_narrow_run(layout: Layout, dtype: torch.dtype, tmp_path: Path) -> None:
    """238 biases from 6.817 to 7.063, two of them a near tie, over training, a checkpoint and an export."""
    folder = tmp_path / "model"
    bias = torch.linspace(6.817, 7.063, 238)
    bias[[80, 81]] = torch.tensor([6.900, 6.905])
    assert len(bias.unique()) == 238 and len(bias.bfloat16().unique()) < 20
    shape = {"n_routed_experts": 238, "n_group": 1, "topk_group": 1, "num_hidden_layers": 2, "moe_intermediate_size": 4}
    model = make_model("deepseek_v3", **shape)
    model.model.layers[1].mlp.gate.e_score_correction_bias.copy_(bias)
    model.save_pretrained(folder)
    further = further_layer(folder, 2)
    narrow = Layout(**{**layout.__dict__, "options": {"dtype": dtype}})
    rank_pool(layout.world).run(exported_on_rank, folder, narrow, tmp_path / "out", 3, tmp_path / "checkpoint")
    found = load_file(tmp_path / "out" / "model.safetensors")
    name = "model.layers.1.mlp.gate" + BIAS
    assert found[name].dtype == torch.float32 and torch.equal(found[name].view(torch.uint8), bias.view(torch.uint8))
    assert found["model.layers.1.mlp.gate.weight"].dtype == dtype
    assert not torch.equal(found["model.layers.1.mlp.gate.weight"], load_file(folder / "model.safetensors")[name[: -len(BIAS)] + ".weight"])
    for name, tensor in further.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def test_further_layers_come_from_the_files_that_were_opened(tmp_path: Path) -> None:
    folder = save_model("deepseek_v3", tmp_path / "model")
    further = further_layer(folder)
    kept = KeptTensors(folder, ("model.layers.4.",))
    shutil.copytree(folder, tmp_path / "copy")
    shutil.rmtree(folder)  # taken away, the open files stay
    assert {name: torch.equal(tensor, further[name]) for name, tensor in kept.tensors()} == dict.fromkeys(further, True)
    kept.close()
    kept = KeptTensors(tmp_path / "copy", ("model.layers.4.",))
    file = tmp_path / "copy" / "model.safetensors"
    data = file.read_bytes()
    with file.open("r+b") as handle:
        handle.write(data)
    os.utime(file, ns=(1, 1))
    with pytest.raises(HFFolderError, match="written over during the run"):
        list(kept.tensors())


def test_what_becomes_of_further_layers_is_said_in_one_line(tmp_path: Path) -> None:
    folder = save_model("deepseek_v3", tmp_path / "model")
    prefixes = ("model.layers.4.", "model.layers.5.")
    assert kept_note(folder, ()) is None
    assert "model.layers.4 is for multi-token prediction in config.json and not in" in str(kept_note(folder, prefixes[:1]))
    further_layer(folder)
    assert str(kept_note(folder, prefixes[:1])).startswith("model.layers.4 is for multi-token prediction not trained; exports carry")
    both = str(kept_note(folder, prefixes))
    assert "model.layers.4 is for multi-token prediction not trained" in both and "model.layers.5 is for" in both and "\n" not in both


def test_layers_behind_the_declared_ones_are_unexpected(tmp_path: Path) -> None:
    folder = save_model("deepseek_v3", tmp_path / "model")
    further_layer(folder, 5)
    with pytest.raises(HFFolderError, match="unexpected: model.layers.5"):
        make_engine(folder, Layout("one"))


def test_fp8_is_refused_with_what_to_do(tmp_path: Path) -> None:
    from rlmca.layouts import ModelLayout, UnsupportedField

    folder = save_model("deepseek_v3", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    with pytest.raises(UnsupportedField, match="quantization_config.*weight_scale_inv.*convert the folder to bf16"):
        ModelLayout({**config, "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}})
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.self_attn.o_proj.weight"
    save_file({**tensors, name: tensors[name].to(torch.float8_e4m3fn)}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(HFFolderError, match="F8_E4M3.*convert the folder to bf16"):
        make_engine(folder, Layout("one"))


@pytest.mark.parametrize(
    "change", ["two experts swapped", "no shared expert", "one bias moved", "two biases swapped", "rotated rows of keys swapped"]
)
def test_a_wrong_row_would_be_seen(change: str, tmp_path: Path) -> None:
    """What a wrong row of the family's table would do moves log-probs."""
    model = make_model("deepseek_v3")
    layer = model.model.layers[2]
    with torch.no_grad():
        if change == "two experts swapped":
            layer.mlp.experts.gate_up_proj[[0, 1]] = layer.mlp.experts.gate_up_proj[[1, 0]]
        elif change == "no shared expert":
            layer.mlp.shared_experts.down_proj.weight.zero_()
        elif change == "one bias moved":
            layer.mlp.gate.e_score_correction_bias[3] += 0.5
        elif change == "two biases swapped":
            layer.mlp.gate.e_score_correction_bias[[0, 4]] = layer.mlp.gate.e_score_correction_bias[[4, 0]]
        else:
            rows = layer.self_attn.kv_a_proj_with_mqa.weight
            rows[[16, 17]] = rows[[17, 16]]
    model.save_pretrained(tmp_path)
    ours = rank_pool(2).run(gradients_on_rank, tmp_path, Layout("ep2", dp=2, ep=2), random_batch())[0]
    assert (ours["logp_BT"] - hf_reference(make_model("deepseek_v3"), random_batch())["logp_BT"]).abs().max() > 1e-3
