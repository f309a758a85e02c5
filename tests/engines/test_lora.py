"""Adapters of the Megatron engine under every parallelism, against Transformers and PEFT."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rlmca.algorithms.losses import SftLoss
from rlmca.engines.freeze import trained
from rlmca.layouts import ModelLayout
from rlmca.models.options import FreezeOptions
from rlmca.transfer.merged import MergedFolder
from rlmca.transfer.peft import initial_matrix
from rlmca.workers import SpmdGroup
from tests.helpers.engine import Layout, assert_same_numbers, gradients_on_rank, hf_reference, make_engine, random_batch
from tests.helpers.lora import (
    ALL,
    ALPHA,
    LEAVES,
    RANK,
    draw_adapter,
    hf_log_probs,
    hf_loss,
    merged_model,
    reference,
    save_adapter,
    train_adapter_plainly,
)
from tests.helpers.models import make_model, save_model
from tests.helpers.ranks import rank_pool
from tests.helpers.training import batches, learning_rate, resume_on_rank

pytestmark = pytest.mark.serial
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
DENSE = [
    Layout("one"),
    Layout("one_full_recompute", options=FULL),
    Layout("dp2", dp=2),
    Layout("dp2_overlap", dp=2, data_parallel=OVERLAP),
    Layout("tp2", tp=2),
    Layout("tp2_sp", tp=2, sp=True),
    Layout("tp2_sp_full_recompute", tp=2, sp=True, options=FULL),
    Layout("pp2", pp=2),
    Layout("pp2_vpp2", pp=2, vpp=2),
    Layout("cp2", cp=2),
    Layout("tp2_sp_pp2_packed", tp=2, sp=True, pp=2, packing=True, max_tokens=20),
]
MIXED = [
    Layout("one"),
    Layout("ep2", dp=2, ep=2),
    Layout("tp2_sp", tp=2, sp=True),
    Layout("tp2_sp_etp1", tp=2, sp=True, etp=1),
    Layout("etp2_ep2", dp=4, ep=2, etp=2, options={"moe_token_dispatcher_type": "alltoall"}),
    Layout("pp2_vpp2", pp=2, vpp=2),
    Layout("cp2_ep2", cp=2, ep=2),
    Layout("tp2_sp_pp2_ep2_etp1", tp=2, sp=True, pp=2, ep=2, etp=1, options=FULL),
]
IN_CI = ("one_full_recompute", "dp2_overlap", "tp2", "tp2_sp_full_recompute", "pp2_vpp2", "tp2_sp_pp2_packed", "tp2_sp_etp1", "etp2_ep2")
SHARED = [layout for layout in MIXED if layout.name in ("tp2_sp", "tp2_sp_etp1", "ep2")]
CASES = [("qwen3_untied", layout) for layout in DENSE] + [("qwen3_moe", layout) for layout in MIXED]
CASES += [(family, layout) for family in ("qwen2_moe", "mixtral", "deepseek_v3") for layout in SHARED]
LAYERS = {"num_hidden_layers": 4}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path, dict[str, Any]]]:
    """family -> (model, adapter, what Transformers computes)."""
    found = {}
    for family in ("qwen3_untied", "qwen3_moe", "qwen2_moe", "mixtral", "deepseek_v3"):
        root = tmp_path_factory.mktemp(family)
        model = make_model(family, **LAYERS)
        leaves = targets_of(family)
        adapter = draw_adapter(model, leaves)
        expected = reference(model, adapter, random_batch())
        found[family] = (save_model(family, root / "model", **LAYERS), save_adapter(root / "adapter", adapter, leaves), expected)
    return found


def targets_of(family: str) -> tuple[str, ...]:
    """Names of all linear layers with an adapter."""
    own = {
        "mixtral": (*LEAVES["attention"], "w1", "w2", "w3"),
        "deepseek_v3": ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", *LEAVES["mlp"]),
    }
    return own.get(family, ALL)


def with_adapter(layout: Layout, adapter: Path, **more: Any) -> Layout:
    return replace(layout, lora={"rank": RANK, "alpha": ALPHA, "targets": ALL, "start": adapter, **more})


@pytest.mark.parametrize(
    ("family", "layout"),
    [pytest.param(f, layout, id=f"{f}-{layout.name}", marks=[] if layout.name in IN_CI else pytest.mark.whole) for f, layout in CASES],
)
def test_numbers_equal_the_merged_model(family: str, layout: Layout, folders: dict[str, Any]) -> None:
    model, adapter, expected = folders[family]
    whole = with_adapter(layout, adapter, targets=targets_of(family))
    ours = rank_pool(layout.world).run(gradients_on_rank, model, whole, random_batch())[0]
    assert_same_numbers(ours, expected)
    if family == "qwen2_moe":
        assert sum("shared_expert." in name for name in expected["gradients"]) == 2 * 3 * 3


def test_a_plain_peft_model_has_the_same_gradients(folders: dict[str, Any]) -> None:
    """The oracle above against PEFT itself, on the Transformers model and from the same files."""
    model, adapter, expected = folders["qwen3_untied"]
    peft_model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), str(adapter), is_trainable=True)
    theirs = hf_loss(peft_model, random_batch())
    theirs.backward()
    assert abs(theirs.item() - expected["loss"]) < 1e-5
    seen = 0
    for name, parameter in peft_model.named_parameters():
        plain = name.replace(".default", "")
        if plain in expected["gradients"]:
            torch.testing.assert_close(parameter.grad, expected["gradients"][plain], rtol=0, atol=1e-5, msg=lambda m, n=plain: f"{n}: {m}")
            seen += 1
    assert seen == 56


@pytest.mark.parametrize(
    ("family", "rslora", "targets", "kept"),
    [
        ("qwen3_moe", False, ALL, "."),
        ("qwen3_moe", True, ALL, "."),
        ("mixtral", True, ("q_proj", "k_proj", "v_proj", "o_proj", "w1", "w2", "w3"), "."),
        ("qwen2_moe", False, ALL, "shared_expert.|self_attn."),
        ("deepseek_v3", False, ("q_b_proj", "o_proj", *LEAVES["mlp"]), ".experts.|self_attn."),
    ],
    ids=lambda value: value if value in ("qwen3_moe", "qwen2_moe", "mixtral", "deepseek_v3", True, False) else None,
)
def test_peft_reads_adapters_of_experts(family: str, rslora: bool, targets: tuple[str, ...], kept: str, tmp_path: Path) -> None:
    """Written expert by expert; PEFT joins them, as Transformers joins the experts themselves. Of some families it leaves a part
    out, as docs/finetuning.md says: `kept` is in the names of what it reads."""
    only = {"first_k_dense_replace": 0} if family == "deepseek_v3" else {} if family == "mixtral" else {"mlp_only_layers": []}
    over = {**only, "num_hidden_layers": 2}
    lora = {**FRESH, "rslora": rslora, "targets": targets}
    model, layout = save_model(family, tmp_path / "model", **over), Layout("ep2", dp=2, ep=2, lora=lora)
    ours = rank_pool(2).run(trained_on_rank, model, layout, tmp_path / "adapter")[0]
    read = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), str(tmp_path / "adapter"))
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    part = {name: tensor for name, tensor in tensors.items() if any(words in name for words in kept.split("|"))}
    scaling = ALPHA / (RANK**0.5 if rslora else RANK)
    expected = hf_log_probs(merged_model(make_model(family, **over), part, scaling), random_batch())
    torch.testing.assert_close(hf_log_probs(read, random_batch()), expected, rtol=0, atol=1e-5)
    assert len(part) == len(tensors) if kept == "." else 0 < len(part) < len(tensors)
    assert ((expected - ours["logp_BT"]).abs().max() < 1e-5) == (kept == ".")
    assert (ours["logp_BT"] - ours["base_BT"]).abs().max() > 1e-3


def trained_on_rank(folder: Path, layout: Layout, out: Path) -> dict[str, Any] | None:
    """Five steps: metrics, whether base weights kept their bits, log-probs with and without the adapter, merged weights."""
    engine = make_engine(folder, layout)
    group = SpmdGroup(engine, engine.parallel)
    before = {name: p.detach().clone() for name, p in engine.named_parameters()}
    start = group.log_probs(random_batch(), adapter=False).logp_BT
    metrics = [group.train_batch(batch, SftLoss(), learning_rate(step)) for step, batch in enumerate(batches(8, 5))]
    same = all(torch.equal(p, before[name]) for name, p in engine.named_parameters())
    base, with_adapter = group.log_probs(random_batch(), adapter=False).logp_BT, group.log_probs(random_batch()).logp_BT
    if engine.parallel.rank == 0:
        out.mkdir()
    engine.parallel.barrier()
    engine.export_adapter(out, "the base")
    merged = {name: tensor.clone() for name, tensor in engine.weights().tensors()}
    result = {
        "metrics": metrics,
        "base_kept": same and torch.equal(start, base),
        "logp_BT": with_adapter,
        "base_BT": base,
        "merged": merged,
    }
    return result if engine.parallel.rank == 0 else {"base_kept": same}


FRESH = {"rank": RANK, "alpha": ALPHA, "rslora": True, "seed": 5}
TRAINED = [
    ("qwen3_untied", Layout("one", lora=FRESH)),
    ("qwen3_untied", Layout("tp2_sp_pp2", tp=2, sp=True, pp=2, lora=FRESH, data_parallel={"use_distributed_optimizer": False})),
    ("qwen3_untied", Layout("tp2_dp2_overlap", tp=2, dp=2, lora=FRESH, data_parallel=OVERLAP)),
    ("qwen3_moe", Layout("etp2_ep2", dp=4, ep=2, etp=2, lora=FRESH)),
    ("qwen3_moe", Layout("tp2_sp_ep2_etp1", tp=2, sp=True, ep=2, etp=1, lora=FRESH)),
]


@pytest.mark.cases(2)
@pytest.mark.parametrize(("family", "layout"), TRAINED, ids=lambda value: value if isinstance(value, str) else value.name)
def test_training_equals_a_plain_loop(family: str, layout: Layout, folders: dict[str, Any], tmp_path: Path) -> None:
    """From drawn adapters on: losses, the norm that gradients are clipped by, merged weights, what PEFT reads back."""
    model = folders[family][0]
    ranks = rank_pool(layout.world).run(trained_on_rank, model, layout, tmp_path / "adapter")
    assert all(rank["base_kept"] for rank in ranks)
    ours = ranks[0]

    base = make_model(family, **LAYERS)
    drawn = {n: initial_matrix(n, tuple(t.shape), 5) for n, t in draw_adapter(base).items()}
    theirs, trained = train_adapter_plainly(base, drawn, 5, scaling=ALPHA / RANK**0.5)
    for step, (mine, expected) in enumerate(zip(ours["metrics"], theirs, strict=True)):
        assert abs(mine["loss"] - expected["loss"]) < 1e-5, f"step {step}"
        assert abs(mine["grad_norm"] - expected["grad_norm"]) < 1e-4 * max(1.0, expected["grad_norm"]), f"step {step}"

    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert saved.keys() == trained.keys()
    for name, tensor in trained.items():
        torch.testing.assert_close(saved[name], tensor, rtol=0, atol=2e-4, msg=lambda m, n=name: f"{n}: {m}")
    with MergedFolder(model, [tmp_path / "adapter"]) as files:
        assert files.shapes.keys() == ours["merged"].keys()
        for name in files.shapes:
            assert torch.equal(files.read(name), ours["merged"][name]), name  # base + delta once, to the bit
    if family != "qwen3_moe":  # PEFT drops the dense layers of a model that has experts in others
        read = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), str(tmp_path / "adapter"))
        torch.testing.assert_close(hf_log_probs(read, random_batch()), ours["logp_BT"], rtol=0, atol=1e-5)
        with read.disable_adapter():
            torch.testing.assert_close(hf_log_probs(read, random_batch()), ours["base_BT"], rtol=0, atol=1e-5)
    assert (ours["logp_BT"] - ours["base_BT"]).abs().max() > 1e-3


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("qwen3_untied", Layout("tp2_pp2", tp=2, pp=2, lora=FRESH)),
        ("qwen3_untied", Layout("dp2_dropout", dp=2, lora={**FRESH, "dropout": 0.3})),
        ("qwen3_tied", Layout("pp2_vpp2", pp=2, vpp=2, lora=FRESH)),
        ("qwen3_moe", Layout("etp2_ep2", dp=4, ep=2, etp=2, lora=FRESH)),
        ("qwen3_untied", Layout("freeze_pp2", pp=2, freeze={"layers": 1})),
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_resume_is_the_run_without_a_break(family: str, layout: Layout, tmp_path: Path) -> None:
    model = save_model(family, tmp_path / "model", **LAYERS)
    for rank in rank_pool(layout.world).run(resume_on_rank, model, layout, tmp_path / "checkpoint"):
        assert rank["resumed"] == rank["whole"] and rank["same_weights"]


def replicas_on_rank(folder: Path, layout: Layout) -> dict[str, Any]:
    """This rank's adapters after three steps under dropout."""
    engine = make_engine(folder, layout)
    group = SpmdGroup(engine, engine.parallel)
    for step, batch in enumerate(batches(8, 3)):
        group.train_batch(batch, SftLoss(), learning_rate(step + 5))
    return {name: p.detach().clone() for name, p in engine.adapters.parameters.items()}


@pytest.mark.parametrize("sp", [False, True])
def test_copies_stay_equal_under_dropout(sp: bool, folders: dict[str, Any]) -> None:
    """Matrices that tensor-parallel ranks hold whole: masks that differ between them would pull them apart."""
    layout = Layout("tp2", tp=2, sp=sp, lora={**FRESH, "dropout": 0.3})
    one, two = rank_pool(2).run(replicas_on_rank, folders["qwen3_untied"][0], layout)
    whole = [name for name in one if ("linear_qkv" in name or "fc1" in name) == name.endswith("lora_A")]
    assert len(whole) == 28
    for name in whole:
        assert torch.equal(one[name], two[name]), name


@pytest.mark.parametrize("targets", [("q_proj", "v_proj"), ("up_proj",), ("k_proj", "mlp.down_proj")], ids="+".join)
@pytest.mark.parametrize("layout", [Layout("one"), Layout("tp2_sp", tp=2, sp=True)], ids=lambda layout: layout.name)
def test_some_layers_only(layout: Layout, targets: tuple[str, ...], folders: dict[str, Any], tmp_path: Path) -> None:
    """Of a fused parameter only some rows have an adapter."""
    leaves = tuple(target.rsplit(".", 1)[-1] for target in targets)
    base = make_model("qwen3_untied", **LAYERS)
    tensors = draw_adapter(base, leaves)
    adapter = save_adapter(tmp_path / "adapter", tensors, targets)
    ours = rank_pool(layout.world).run(
        gradients_on_rank, folders["qwen3_untied"][0], with_adapter(layout, adapter, targets=targets), random_batch()
    )[0]
    assert_same_numbers(ours, reference(base, tensors, random_batch()))


@pytest.mark.parametrize("layout", [Layout("one"), Layout("tp2_sp", tp=2, sp=True), Layout("pp2", pp=2)], ids=lambda layout: layout.name)
@pytest.mark.parametrize("options", [{"layers": 1}, {"layers": -1, "modules": ("mlp",)}, {"layers": 0, "extra": ("lm_head",)}], ids=str)
@pytest.mark.parametrize("recompute", [False, True])
def test_partial_training_has_the_gradients_of_full_training(
    layout: Layout, options: dict[str, Any], recompute: bool, folders: dict[str, Any]
) -> None:
    model = folders["qwen3_untied"][0]
    whole = replace(layout, freeze=options, options=FULL if recompute else {})
    ours = rank_pool(layout.world).run(gradients_on_rank, model, whole, random_batch())[0]
    theirs = hf_reference(make_model("qwen3_untied", **LAYERS), random_batch())
    wanted = trained(theirs["gradients"], 4, FreezeOptions(**options))
    assert wanted and len(wanted) < len(theirs["gradients"]) / 2
    kept = {name: g if name in wanted else torch.zeros_like(g) for name, g in theirs["gradients"].items()}
    assert_same_numbers(ours, {**theirs, "gradients": kept})


@pytest.mark.parametrize(
    "layout", [Layout("tp2_sp_etp1", tp=2, sp=True, etp=1), Layout("etp2_ep2", dp=4, ep=2, etp=2)], ids=lambda v: v.name
)
def test_stacked_experts_are_merged_in_their_own_form(layout: Layout, folders: dict[str, Any], tmp_path: Path) -> None:
    """On the way out of the ranks and between files, from a folder that holds all experts of a layer in one tensor."""
    _, adapter, expected = folders["qwen3_moe"]
    base = make_model("qwen3_moe", **LAYERS)
    base.save_pretrained(tmp_path / "stacked", save_original_format=False)
    ours = rank_pool(layout.world).run(merged_on_rank, tmp_path / "stacked", with_adapter(layout, adapter))[0]
    live = merged_model(base, load_file(adapter / "adapter_model.safetensors"), ALPHA / RANK).state_dict()
    with MergedFolder(tmp_path / "stacked", [adapter]) as files:
        assert files.shapes.keys() == ours.keys() and any(len(shape) == 3 for shape in files.shapes.values())
        for name in files.shapes:
            whole = files.read(name)
            assert torch.equal(whole, ours[name]), name
            torch.testing.assert_close(whole, live[name], rtol=0, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}")
            if whole.dim() == 3:
                assert torch.equal(files.read(name, ((2, 5), (7, 20), (3, 9))), whole[2:5, 7:20, 3:9])


def merged_on_rank(folder: Path, layout: Layout) -> dict[str, torch.Tensor] | None:
    """The merged weights under Hugging Face names; rank 0 answers."""
    engine = make_engine(folder, layout)
    found = {name: tensor.clone() for name, tensor in engine.weights().tensors()}
    return found if engine.parallel.rank == 0 else None


def trained_parameters(folder: Path, options: dict[str, Any]) -> set[str]:
    """Hugging Face names of what an engine of one rank trains."""
    engine = make_engine(folder, Layout("one", freeze=options))
    plan = engine.layout.in_form("single").rank_plan(engine.topology, engine.coord)
    return {copy.hf for name, parameter in engine.named_parameters() if parameter.requires_grad for copy in plan[name].copies}


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("module", ["block_sparse_moe", "mlp"])
def test_partial_training_takes_the_names_of_either_form_of_a_folder(module: str, stacked: bool, tmp_path: Path) -> None:
    """What preflight lets pass is what the engine trains, however the files hold experts."""
    model = make_model("mixtral", **LAYERS)
    model.save_pretrained(tmp_path, save_original_format=not stacked)
    options = {"layers": 1, "modules": (module,)}
    found = rank_pool(1).run(trained_parameters, tmp_path, options)[0]
    assert found == {
        name for name in ModelLayout(model.config.to_dict()).hf_tensors() if name.startswith("model.layers.3.block_sparse_moe.")
    }
    assert len(found) == 1 + 3 * 8


def test_an_engine_with_nothing_to_train_says_so(folders: dict[str, Any]) -> None:
    for options in ({"layers": 0}, {"layers": 2, "modules": ()}):
        with pytest.raises(AssertionError, match="FreezeError: finetuning_type: freeze trains nothing of this model"):
            rank_pool(1).run(trained_parameters, folders["qwen3_untied"][0], options)
