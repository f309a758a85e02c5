"""Mixtures of experts under expert, tensor, pipeline, context and data parallelism, against Transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.engine import Layout, gradients_on_rank, hf_reference, make_engine, random_batch
from tests.helpers.models import MIXTURES, make_model, save_model
from tests.helpers.ranks import rank_pool
from tests.helpers.training import resume_on_rank, train_on_rank, train_plainly

pytestmark = pytest.mark.serial
ALLTOALL = {"moe_token_dispatcher_type": "alltoall"}
LAYOUTS = [
    Layout("one"),
    Layout("packed", packing=True, max_tokens=20),
    Layout("dp2", dp=2),
    Layout("ep2", dp=2, ep=2),
    Layout("ep2_alltoall", dp=2, ep=2, options=ALLTOALL),
    Layout("ep2_replicated", dp=2, ep=2, data_parallel={"use_distributed_optimizer": False}),
    Layout("tp2_sp", tp=2, sp=True),
    Layout("tp2_sp_etp1", tp=2, sp=True, etp=1),
    Layout("tp2_sp_ep2_etp1", tp=2, sp=True, ep=2, etp=1, options=ALLTOALL),
    Layout("pp2", pp=2),
    Layout("pp2_vpp2", pp=2, vpp=2),
    Layout("cp2_ep2", cp=2, ep=2),
    Layout("ep4", dp=4, ep=4, options=ALLTOALL),
    Layout("ep2_dp4", dp=4, ep=2),
    Layout("etp2_ep2", dp=4, ep=2, etp=2, options=ALLTOALL),
    Layout("tp2_sp_ep2", tp=2, sp=True, dp=2, ep=2),
    Layout("pp2_ep2", pp=2, dp=2, ep=2, options=ALLTOALL),
    Layout("tp2_sp_pp2_ep2_etp1_packed", tp=2, sp=True, pp=2, ep=2, etp=1, packing=True, max_tokens=20),
]
IN_CI = {
    "qwen3_moe": ("ep2_alltoall", "tp2_sp_etp1", "cp2_ep2", "etp2_ep2", "tp2_sp_pp2_ep2_etp1_packed"),
    "qwen2_moe": ("tp2_sp_etp1",),
    "mixtral": ("etp2_ep2",),
    "deepseek_v3": ("tp2_sp_pp2_ep2_etp1_packed",),  # more of it in test_deepseek.py
}


def named(*names: str) -> list[Layout]:
    return [layout for layout in LAYOUTS if layout.name in names]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: save_model(name, tmp_path_factory.mktemp(name)) for name in MIXTURES}


@pytest.fixture(scope="module")
def references() -> dict[str, dict[str, Any]]:
    return {name: hf_reference(make_model(name), random_batch()) for name in MIXTURES}


@pytest.mark.parametrize(
    ("layout", "family"),
    [
        pytest.param(layout, family, id=f"{layout.name}-{family}", marks=[] if layout.name in IN_CI[family] else pytest.mark.whole)
        for layout in LAYOUTS
        for family in MIXTURES
    ],
)
def test_numbers_equal_transformers(layout: Layout, family: str, models: dict[str, Path], references: dict[str, dict[str, Any]]) -> None:
    ours = rank_pool(layout.world).run(gradients_on_rank, models[family], layout, random_batch())[0]
    theirs = references[family]
    assert abs(ours["loss"] - theirs["loss"]) < 1e-5
    torch.testing.assert_close(ours["logp_BT"], theirs["logp_BT"], rtol=0, atol=1e-5)
    assert set(ours["gradients"]) == set(theirs["gradients"])
    for name, expected in theirs["gradients"].items():
        allowed = 1e-5 * max(float(expected.abs().max()), 1.0)
        torch.testing.assert_close(ours["gradients"][name], expected, rtol=0, atol=allowed, msg=lambda m, n=name: f"{n}: {m}")


def exported_on_rank(folder: Path, layout: Layout) -> dict[str, torch.Tensor] | None:
    """The live weights under Hugging Face names; rank 0 answers."""
    engine = make_engine(folder, layout)
    found = {name: tensor.clone() for name, tensor in engine.weights().tensors()}
    return found if engine.parallel.rank == 0 else None


def stacked_on_rank(folder: Path, layout: Layout) -> dict[str, Any] | None:
    """Log-probs with the weights of the folder, and these weights in its own form and one by one; rank 0 answers."""
    from rlmca.workers import SpmdGroup

    engine = make_engine(folder, layout)
    group = SpmdGroup(engine, engine.parallel)
    logp_BT = group.log_probs(random_batch()).logp_BT
    own, single = ({name: t.clone() for name, t in group.hf_tensors(form)} for form in (None, "single"))
    return {"logp_BT": logp_BT, "own": own, "single": single} if engine.parallel.rank == 0 else None


@pytest.mark.parametrize(
    ("family", "layout"),
    [("qwen3_moe", "etp2_ep2"), ("qwen2_moe", "tp2_sp_pp2_ep2_etp1_packed"), ("mixtral", "tp2_sp_etp1")],
)
def test_a_folder_of_stacked_experts_loads_and_comes_back(
    family: str, layout: str, models: dict[str, Path], references: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    make_model(family).save_pretrained(tmp_path, save_original_format=False)
    (row,) = named(layout)
    ours = rank_pool(row.world).run(stacked_on_rank, tmp_path, row)[0]
    torch.testing.assert_close(ours["logp_BT"], references[family]["logp_BT"], rtol=0, atol=1e-5)
    for form, folder in (("own", tmp_path), ("single", models[family])):
        stored = load_file(folder / "model.safetensors")
        assert ours[form].keys() == stored.keys()
        for name, tensor in stored.items():
            assert torch.equal(ours[form][name], tensor), f"{form}: {name}"


@pytest.mark.parametrize("layout", named("tp2_sp_etp1", "etp2_ep2", "pp2_vpp2"), ids=lambda layout: layout.name)
@pytest.mark.parametrize("family", list(MIXTURES))
def test_weights_come_back_bit_by_bit(family: str, layout: Layout, models: dict[str, Path]) -> None:
    stored = load_file(models[family] / "model.safetensors")
    found = rank_pool(layout.world).run(exported_on_rank, models[family], layout)[0]
    assert found.keys() == stored.keys()
    for name, tensor in stored.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("family", "layout"),
    [*(("qwen3_moe", layout) for layout in named("ep2", "tp2_sp_etp1")), *(("qwen2_moe", layout) for layout in named("tp2_sp"))],
    ids=lambda value: getattr(value, "name", value),
)
def test_ten_steps_equal_a_plain_loop(family: str, layout: Layout, models: dict[str, Path]) -> None:
    """Also the norm that gradients are clipped by: experts count once, wherever their parts and copies are."""
    ours = rank_pool(layout.world).run(train_on_rank, models[family], layout, 8)[0][:10]
    theirs = train_plainly(make_model(family).train(), 8)[:10]
    for step, (mine, expected) in enumerate(zip(ours, theirs, strict=True)):
        assert abs(mine["loss"] - expected["loss"]) < 1e-4, f"step {step}"
        assert abs(mine["grad_norm"] - expected["grad_norm"]) < 1e-3 * max(1.0, expected["grad_norm"]), f"step {step}"


@pytest.mark.cases(1)
@pytest.mark.parametrize("layout", named("ep2", "etp2_ep2"), ids=lambda layout: layout.name)
def test_resume_is_the_run_without_a_break(layout: Layout, models: dict[str, Path], tmp_path: Path) -> None:
    for rank in rank_pool(layout.world).run(resume_on_rank, models["qwen3_moe"], layout, tmp_path / "checkpoint"):
        assert rank["resumed"] == rank["whole"] and rank["same_weights"]


CHANGES = ("one number of an expert", "two experts swapped", "the router's rows swapped")


@pytest.mark.parametrize(
    ("family", "change"),
    [*((family, change) for family in MIXTURES for change in CHANGES), ("qwen2_moe", "no shared expert"), ("qwen2_moe", "its gate shut")],
)
def test_a_change_of_the_experts_is_seen(family: str, change: str, references: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    """The comparison above is no formality: what a wrong row of the family's table would do moves log-probs."""
    model = make_model(family)
    experts, gate = model.model.layers[2].mlp.experts, model.model.layers[2].mlp.gate
    with torch.no_grad():
        if change == "one number of an expert":
            experts.down_proj[5, 3, 2] += 1.0
        elif change == "two experts swapped":
            experts.gate_up_proj[[0, 1]] = experts.gate_up_proj[[1, 0]]
        elif change == "the router's rows swapped":
            gate.weight[[2, 3]] = gate.weight[[3, 2]]
        elif change == "no shared expert":
            model.model.layers[2].mlp.shared_expert.down_proj.weight.zero_()
        else:
            model.model.layers[2].mlp.shared_expert_gate.weight.zero_()
    model.save_pretrained(tmp_path)
    ours = rank_pool(2).run(gradients_on_rank, tmp_path, named("ep2")[0], random_batch())[0]
    assert (ours["logp_BT"] - references[family]["logp_BT"]).abs().max() > 1e-3
