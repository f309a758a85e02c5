"""Adapters of the Hugging Face engine in one process: against plain PEFT, against the folders of adapters, against Megatron."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlmca.algorithms.losses import SftLoss
from rlmca.transfer.hf_folder import HFFolderError
from rlmca.transfer.merged import MergedFolder
from rlmca.transfer.peft import initial_matrix
from tests.helpers.engine import Layout, assert_same_numbers, make_engine, random_batch
from tests.helpers.huggingface import make_hf_engine
from tests.helpers.huggingface_lora import (
    adapter_gradients_on_rank,
    adapter_steps_on_rank,
    copies,
    lora_options,
    peft_names,
    peft_reference,
    plain_peft,
    same_bits,
    start_folder,
)
from tests.helpers.lora import ALL, ALPHA, RANK
from tests.helpers.models import save_model
from tests.helpers.training import batches, learning_rate, train_plainly

FAMILIES = ("qwen3_tied", "qwen2", "llama")
STEPS = 5


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: save_model(name, tmp_path_factory.mktemp(name)) for name in FAMILIES}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Adapters whose B is not zero."""
    return {name: start_folder(tmp_path_factory.mktemp("adapter") / name, name) for name in FAMILIES}


@pytest.fixture(scope="module")
def folder(models: dict[str, Path]) -> Path:
    return models["qwen3_tied"]


@pytest.fixture(scope="module")
def adapter(adapters: dict[str, Path]) -> Path:
    return adapters["qwen3_tied"]


def exported(engine: Any, path: Path, base: str = "some/model") -> Path:
    path.mkdir(parents=True)
    engine.export_adapter(path, base)
    return path


# ---- numbers


@pytest.mark.parametrize(
    "settings",
    [
        {"micro_batch": 3},
        {"packing": True, "max_tokens_per_microbatch": 20},
        {"gradient_checkpointing": True},
        {"gradient_checkpointing": True, "use_reentrant": True},
        {"attention": "eager", "micro_batch": 8},
    ],
    ids=["plain", "packed", "checkpointing", "reentrant", "eager"],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_gradients_and_log_probs_equal_peft(
    family: str, settings: dict[str, Any], models: dict[str, Path], adapters: dict[str, Path]
) -> None:
    """Also that no base weight gets a gradient, see the helper."""
    ours = adapter_gradients_on_rank(models[family], {**settings, "lora": lora_options(start=adapters[family])}, random_batch())
    theirs = peft_reference(plain_peft(family, adapters[family]), random_batch())
    assert all(value.abs().max() > 1e-4 for value in theirs["gradients"].values()), "a gradient of zero would prove nothing"
    assert_same_numbers(ours, theirs)


@pytest.mark.parametrize(
    ("targets", "rslora", "expected"),
    [(("all",), False, ALL), (("v_proj", "mlp.down_proj"), True, ("v_proj", "mlp.down_proj")), (("self_attn.q_proj",), False, ("q_proj",))],
)
def test_targets_and_scaling_mean_what_they_mean_to_peft(
    targets: tuple[str, ...], rslora: bool, expected: tuple[str, ...], folder: Path, tmp_path: Path
) -> None:
    leaves = tuple(name.rsplit(".", 1)[-1] for name in expected)
    start = start_folder(tmp_path / "start", "qwen3_tied", targets=leaves, use_rslora=rslora)
    options = lora_options(targets=targets, rslora=rslora, start=start)
    ours = adapter_gradients_on_rank(folder, {"lora": options}, random_batch())
    assert_same_numbers(ours, peft_reference(plain_peft("qwen3_tied", start), random_batch()))
    assert {name.split(".")[-3] for name in ours["gradients"]} == set(leaves)
    written = json.loads((exported(make_hf_engine(folder, lora=options), tmp_path / "out") / "adapter_config.json").read_text())
    assert sorted(written["target_modules"]) == sorted(expected if targets == ("all",) else targets)


def test_gradient_checkpointing_changes_no_number(folder: Path, adapter: Path) -> None:
    found = [
        adapter_gradients_on_rank(folder, {"lora": lora_options(start=adapter, dropout=0.3), **more}, random_batch())
        for more in ({}, {"gradient_checkpointing": True}, {"gradient_checkpointing": True, "use_reentrant": True})
    ]
    assert all(same_bits(found[0]["gradients"], other["gradients"]) for other in found[1:])
    dry = adapter_gradients_on_rank(folder, {"lora": lora_options(start=adapter)}, random_batch())
    assert dry["loss"] != found[0]["loss"], "dropout drops something"
    torch.testing.assert_close(dry["logp_BT"], found[0]["logp_BT"], rtol=0, atol=0)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_training_equals_a_plain_loop_of_peft_and_leaves_the_base_alone(
    weight_decay: float, folder: Path, adapter: Path, tmp_path: Path
) -> None:
    from rlmca.engines.options import OptimizerOptions

    own, rates = batches(8), [learning_rate(step) for step in range(20)]
    settings = {"lora": lora_options(start=adapter), "optimizer": OptimizerOptions(weight_decay=weight_decay)}
    ours = adapter_steps_on_rank(folder, settings, own, rates)
    model = plain_peft("qwen3_tied", adapter).train()
    theirs = train_plainly(model, 8, weight_decay=weight_decay)
    for step, (mine, expected) in enumerate(zip(ours["metrics"], theirs, strict=True)):
        assert abs(mine["loss"] - expected["loss"]) < 1e-5, f"step {step}"
        assert abs(mine["grad_norm"] - expected["grad_norm"]) < 1e-4 * max(1.0, expected["grad_norm"]), f"step {step}"
    assert ours["metrics"][-1]["loss"] < ours["metrics"][0]["loss"]
    expected = peft_names({name: p.detach() for name, p in model.named_parameters() if p.requires_grad})
    for name, value in ours["adapters"].items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
    assert same_bits(ours["base"], load_file(folder / "model.safetensors"))
    for name, value in model.merge_and_unload().named_parameters():
        torch.testing.assert_close(ours["merged"][name], value, rtol=0, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("half", ["bf16", "fp16"])
def test_half_precision_computes_in_it_and_keeps_adapters_in_float32(half: str, folder: Path, adapter: Path) -> None:
    from rlmca.engines.options import LossScaleOptions

    own: dict[str, Any] = {"bf16": True} if half == "bf16" else {"loss_scale": LossScaleOptions(initial=128.0)}
    rough, exact = (make_hf_engine(folder, lora=lora_options(start=adapter), **more) for more in (own, {}))
    metrics, fine = (engine.train_batch(random_batch(seed=3), SftLoss(), 1e-6) for engine in (rough, exact))
    assert 0 < abs(metrics["loss"] - fine["loss"]) < 0.05 and metrics["skipped"] == 0.0
    assert abs(metrics["grad_norm"] / fine["grad_norm"] - 1) < 0.05
    assert {p.dtype for p in rough.module.parameters()} == {torch.float32}
    start = load_file(adapter / "adapter_model.safetensors")
    moved = [float((p - start[name]).abs().max().detach()) for name, p in rough.adapters.parameters.items()]
    assert min(moved) > 0 and max(moved) < 1e-5, "too small a step for half-precision matrices of this size"


# ---- the beginning


def test_a_new_adapter_changes_nothing_and_is_drawn_from_the_seed_and_its_name(folder: Path) -> None:
    before = torch.get_rng_state()
    engine, base = make_hf_engine(folder, lora=lora_options(seed=5)), make_hf_engine(folder)
    states = torch.get_rng_state()
    type(engine)(folder, engine.parallel, engine.options)
    assert torch.equal(states, torch.get_rng_state()), "a resumed run builds models after its random state is restored"
    torch.set_rng_state(before)
    found = copies(engine.adapters.parameters)
    assert same_bits(found, {name: initial_matrix(name, tuple(value.shape), 5) for name, value in found.items()})
    assert all((".lora_B." in name) == (not value.any()) for name, value in found.items())
    assert torch.equal(engine.log_probs(random_batch()).logp_BT, base.log_probs(random_batch()).logp_BT)
    assert same_bits(copies(engine.weights().params), copies(base.weights().params))


def test_log_probs_of_the_base_are_the_bases_bit_by_bit(folder: Path, adapter: Path) -> None:
    engine, base = make_hf_engine(folder, lora=lora_options(start=adapter, dropout=0.2)), make_hf_engine(folder)
    batch = random_batch(seed=5)
    without, with_ = engine.log_probs(batch, entropy=True, adapter=False), engine.log_probs(batch, entropy=True)
    expected = base.log_probs(batch, entropy=True, adapter=False)
    assert torch.equal(without.logp_BT, expected.logp_BT) and torch.equal(without.entropy_BT, expected.entropy_BT)
    assert (with_.logp_BT - expected.logp_BT).abs().max() > 1e-2
    assert torch.equal(engine.log_probs(batch).logp_BT, with_.logp_BT)
    assert all(p.requires_grad for p in engine.adapters.parameters.values())


def test_a_frozen_engine_is_the_base_with_the_adapters_that_are_merged(folder: Path, adapter: Path) -> None:
    """The reference of a run that trains an adapter on others."""
    frozen = make_hf_engine(folder, trainable=False, lora=lora_options(merged=(adapter,)))
    trained = make_hf_engine(folder, lora=lora_options(merged=(adapter,)))
    assert frozen.adapters is None and frozen.optimizer is None
    assert not any(p.requires_grad for p in frozen.module.parameters())
    with MergedFolder(folder, [adapter]) as files:
        expected = {name: files.read(name) for name in files.shapes}
    assert same_bits(copies(frozen.weights().params), expected) and same_bits(copies(trained.adapters.base), expected)
    assert expected.keys() == load_file(folder / "model.safetensors").keys()
    assert not same_bits(expected, load_file(folder / "model.safetensors"))
    batch = random_batch()
    assert torch.equal(frozen.log_probs(batch).logp_BT, trained.log_probs(batch, adapter=False).logp_BT)


# ---- the way out


@pytest.mark.parametrize("family", FAMILIES)
def test_merged_weights_equal_peft_and_the_merged_folder(
    family: str, models: dict[str, Path], adapters: dict[str, Path], tmp_path: Path
) -> None:
    engine = make_hf_engine(models[family], lora=lora_options(start=adapters[family]))
    engine.train_batch(random_batch(seed=1), SftLoss(), 1e-2)
    path, base = exported(engine, tmp_path / "adapter"), load_file(models[family] / "model.safetensors")
    weights = engine.weights()
    found = {name: tensor.clone() for name, tensor in weights.tensors()}
    assert weights.shapes() == {name: tuple(value.shape) for name, value in base.items()} and weights.dtype == torch.float32
    with MergedFolder(models[family], [path]) as files:
        assert same_bits(found, {name: files.read(name) for name in files.shapes})
    plain = dict(plain_peft(family, path).merge_and_unload().named_parameters())
    for name, value in found.items():
        torch.testing.assert_close(value, plain[name].detach(), rtol=0, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
        of_target = name.endswith(".weight") and name.split(".")[-2] in ALL
        assert torch.equal(value, base[name]) != of_target, name
    assert same_bits(copies(engine.adapters.base), base), "merging touches no weight in memory"


def test_an_exported_adapter_is_one_of_peft(folder: Path, adapter: Path, tmp_path: Path) -> None:
    engine = make_hf_engine(folder, lora=lora_options(start=adapter, dropout=0.1))
    engine.train_batch(random_batch(seed=1), SftLoss(), 1e-2)
    path = exported(engine, tmp_path / "adapter", "me/base")
    assert {p.name for p in path.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    model = plain_peft("qwen3_tied", path).eval()
    config = model.peft_config["default"]
    assert (config.r, config.lora_alpha, config.lora_dropout, config.use_rslora) == (RANK, ALPHA, 0.1, False)
    assert (config.target_modules, config.task_type, config.base_model_name_or_path) == (set(ALL), "CAUSAL_LM", "me/base")
    theirs = peft_names({name: p.detach() for name, p in model.named_parameters() if ".lora_" in name})
    assert same_bits(theirs, copies(engine.adapters.parameters)) and same_bits(theirs, copies(engine.adapter_weights().params))
    ids_BT = random_batch(rows=1).ids_BT
    engine.module.eval()
    with torch.no_grad():
        assert torch.equal(engine.module(ids_BT).logits, model(ids_BT).logits)


def test_weights_that_are_offloaded_are_not_read(folder: Path, adapter: Path, tmp_path: Path) -> None:
    engine = make_hf_engine(folder, lora=lora_options(start=adapter))
    engine.train_batch(random_batch(seed=1), SftLoss(), 1e-2)
    stream, before = engine.weights().tensors(), engine.log_probs(random_batch()).logp_BT
    assert engine.offload() > 0
    for read in (lambda: next(stream), engine.weights, engine.adapter_weights, lambda: engine.export_adapter(tmp_path, "x")):
        with pytest.raises(RuntimeError):
            read()
    engine.onload()
    assert torch.equal(engine.log_probs(random_batch()).logp_BT, before)
    engine.train_batch(random_batch(seed=2), SftLoss(), 1e-2)


# ---- both engines


@pytest.mark.parametrize("targets", [("all",), ("q_proj", "down_proj")])
def test_both_engines_start_alike_and_train_alike(targets: tuple[str, ...], models: dict[str, Path], tmp_path: Path) -> None:
    own = {"rank": 4, "alpha": 8.0, "targets": targets, "seed": 11}
    ours = make_hf_engine(models["llama"], lora=lora_options(**own))
    theirs = make_engine(models["llama"], Layout("one", lora=own))
    assert same_bits(*({n: t.clone() for n, t in engine.adapter_weights().tensors()} for engine in (ours, theirs)))
    for step in range(STEPS):
        mine, other = (engine.train_batch(random_batch(seed=step), SftLoss(), 1e-2) for engine in (ours, theirs))
        assert mine.keys() == other.keys()
        assert abs(mine["loss"] - other["loss"]) < 1e-5, f"step {step}: {mine} {other}"
    for kind, read in (("adapter", lambda e: e.adapter_weights()), ("merged", lambda e: e.weights())):
        found = [{n: t.clone() for n, t in read(engine).tensors()} for engine in (ours, theirs)]
        assert found[0].keys() == found[1].keys()
        for name, value in found[0].items():
            torch.testing.assert_close(value, found[1][name], rtol=0, atol=1e-4, msg=lambda m, n=name, k=kind: f"{k} {n}: {m}")


def test_both_engines_merge_to_the_same_bits(models: dict[str, Path], adapters: dict[str, Path]) -> None:
    ours = make_hf_engine(models["llama"], lora=lora_options(start=adapters["llama"]))
    theirs = make_engine(models["llama"], Layout("one", lora={"rank": RANK, "alpha": ALPHA, "targets": ALL, "start": adapters["llama"]}))
    assert same_bits(*({n: t.clone() for n, t in engine.weights().tensors()} for engine in (ours, theirs)))


# ---- what is refused


def test_layers_that_the_model_does_not_have_are_named(folder: Path, tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    known = "write all, or some of q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj"
    for name in ("lm_head", "q_pro", "embed_tokens", "norm"):
        with pytest.raises(ValueError, match=f"lora_target: {name} is no linear layer of qwen3; {known}"):
            make_hf_engine(folder, lora=lora_options(targets=("q_proj", name)))
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=67, n_embd=32, n_layer=1, n_head=4, n_positions=64))
    gpt2.save_pretrained(tmp_path / "gpt2")
    with pytest.raises(ValueError, match="GPT2LMHeadModel has no linear layers besides its head"):
        make_hf_engine(tmp_path / "gpt2", lora=lora_options())


def test_adapters_that_do_not_fit_are_named(models: dict[str, Path], folder: Path, adapter: Path, tmp_path: Path) -> None:
    with pytest.raises(HFFolderError, match="does not fit the model:\n.*lora_A.weight has shape"):
        make_hf_engine(folder, lora=lora_options(rank=2, start=adapter))
    with pytest.raises(HFFolderError, match="unexpected: base_model.model.model.layers.0.self_attn.k_proj.lora_A.weight"):
        make_hf_engine(folder, lora=lora_options(targets=("q_proj",), start=adapter))
    with pytest.raises(HFFolderError, match="has no adapter_config.json"):
        make_hf_engine(folder, lora=lora_options(start=tmp_path))
    with pytest.raises(HFFolderError, match="has no place there"):
        make_hf_engine(models["llama"], lora=lora_options(merged=(adapter,)))


def test_adapters_need_weights_and_an_engine_without_one_has_none(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="adapters need weights"):
        make_hf_engine(folder, fresh=True, lora=lora_options())
    engine = make_hf_engine(folder)
    for read in (engine.adapter_weights, lambda: engine.export_adapter(tmp_path, "x")):
        with pytest.raises(ValueError, match="this engine trains no adapter"):
            read()


def test_a_model_with_an_adapter_in_its_folder_is_refused(adapter: Path, tmp_path: Path) -> None:
    """Transformers would load the model that the adapter names in place of the one beside it."""
    both = save_model("qwen3_tied", tmp_path / "both")
    for file in adapter.iterdir():
        (both / file.name).write_bytes(file.read_bytes())
    with pytest.raises(HFFolderError, match="holds an adapter beside the model"):
        make_hf_engine(both)
