"""Partial training on the Hugging Face engine, and which weights it means."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlmca.algorithms.losses import SftLoss
from rlmca.engines.freeze import FreezeError, layer_count, trained, trained_of
from rlmca.layouts import ModelLayout
from rlmca.models.options import FreezeOptions
from tests.helpers.engine import hf_reference, random_batch
from tests.helpers.huggingface import make_hf_engine
from tests.helpers.huggingface_lora import copies, same_bits
from tests.helpers.models import make_model, save_model
from tests.helpers.ranks import rank_pool

LAYERS = 3
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("qwen3_untied", tmp_path_factory.mktemp("model"), num_hidden_layers=LAYERS)


def layers(*numbers: int) -> list[str]:
    return [f"model.layers.{number}." for number in numbers]


CASES: list[tuple[dict[str, Any], list[str]]] = [
    ({"layers": 1}, layers(2)),
    ({"layers": 2}, layers(1, 2)),
    ({"layers": -1}, layers(0)),
    ({"layers": -9}, layers(0, 1, 2)),
    ({"layers": 1, "modules": ("self_attn",)}, ["model.layers.2.self_attn."]),
    ({"layers": -2, "modules": ("mlp", "input_layernorm")}, [f"{i}{part}" for i in layers(0, 1) for part in ("mlp.", "input_layernorm.")]),
    ({"layers": 0, "extra": ("lm_head",)}, ["lm_head."]),
    ({"layers": 1, "extra": ("embed_tokens", "norm")}, ["model.embed_tokens.", "model.norm.", *layers(2)]),
]


@pytest.mark.parametrize("checkpointing", [{}, {"gradient_checkpointing": True}, {"gradient_checkpointing": True, "use_reentrant": True}])
@pytest.mark.parametrize(("options", "prefixes"), CASES)
def test_the_chosen_weights_move_and_the_others_do_not(
    options: dict[str, Any], prefixes: list[str], checkpointing: dict[str, Any], folder: Path
) -> None:
    """Their gradients are those of the same weights in training of all."""
    engine = make_hf_engine(folder, freeze=FreezeOptions(**options), **checkpointing)
    before = load_file(folder / "model.safetensors")
    wanted = {name for name in before if name.startswith(tuple(prefixes))}
    assert {id(p) for group in engine.optimizer.param_groups for p in group["params"]} == {
        id(p) for name, p in engine.module.named_parameters() if name in wanted
    }
    engine.train_batch(random_batch(), SftLoss(), 0.0)
    of_all = hf_reference(make_model("qwen3_untied", num_hidden_layers=LAYERS), random_batch())["gradients"]
    scale = 1.0 / max(1.0, float(torch.stack([of_all[name].norm() for name in wanted]).norm()))  # train_batch clips at 1
    for name, parameter in engine.module.named_parameters():
        assert (parameter.grad is not None) == (name in wanted), name
        if name in wanted:
            torch.testing.assert_close(parameter.grad, scale * of_all[name], rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
    for seed in range(2):
        engine.train_batch(random_batch(seed=seed), SftLoss(), 1e-2)
    moved = {name for name, value in engine.weights().tensors() if not torch.equal(value, before[name])}
    assert moved == wanted


def resume_on_rank(folder: Path, settings: dict[str, Any], checkpoint: Path) -> dict[str, Any]:
    """Four steps in one go, and two, a save, a load into a new engine, and two more."""
    from rlmca.workers import SpmdGroup

    def steps(engine: Any, numbers: range) -> list[dict[str, float]]:
        group = SpmdGroup(engine, engine.parallel)
        return [group.train_batch(random_batch(rows=9, seed=s), SftLoss(), 1e-2) for s in numbers]

    engine = make_hf_engine(folder, **settings)
    steps(engine, range(2))
    engine.save(checkpoint)
    whole = steps(engine, range(2, 4))
    again = make_hf_engine(folder, **settings)
    steps(again, range(7, 8))
    again.load(checkpoint)
    resumed = steps(again, range(2, 4))
    found = [{name: tensor.clone() for name, tensor in e.module.named_parameters()} for e in (engine, again)]
    return {"whole": whole, "resumed": resumed, "same": same_bits(*found)}


@pytest.mark.serial
@pytest.mark.parametrize("dp", [1, 2])
def test_resume_continues_bit_by_bit_from_a_whole_model(dp: int, folder: Path, tmp_path: Path) -> None:
    options = FreezeOptions(layers=1, modules=("self_attn",), extra=("norm",))
    ranks = rank_pool(dp).run(resume_on_rank, folder, {"dp": dp, "freeze": options}, tmp_path / "checkpoint")
    assert all(rank["resumed"] == rank["whole"] == ranks[0]["whole"] and rank["same"] for rank in ranks)
    saved, moments = load_file(tmp_path / "checkpoint" / "model.safetensors"), torch.load(tmp_path / "checkpoint" / "optimizer.pt")
    assert saved.keys() == load_file(folder / "model.safetensors").keys()
    assert {name.split(".")[-2] for name in moments} == ATTENTION | {"norm"}
    other = make_hf_engine(folder, freeze=FreezeOptions(layers=1, modules=("mlp",)))
    with pytest.raises(ValueError, match="parameters that this run does not train: model.layers.2.self_attn"):
        other.load(tmp_path / "checkpoint")


def test_a_frozen_engine_and_a_fresh_one(folder: Path) -> None:
    assert make_hf_engine(folder, freeze=FreezeOptions(layers=1), trainable=False).optimizer is None
    engine = make_hf_engine(folder, freeze=FreezeOptions(layers=1), fresh=True)
    before = copies(engine.weights().params)
    engine.train_batch(random_batch(), SftLoss(), 1e-2)
    moved = {name for name, value in before.items() if not torch.equal(value, engine.weights().params[name])}
    assert moved == {name for name in before if name.startswith("model.layers.2.")}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"modules": ("self_attn", "attn")},
            "freeze_trainable_modules: attn is no part of a layer; write all, or some of "
            "input_layernorm, mlp, post_attention_layernorm, self_attn",
        ),
        ({"extra": ("head",)}, "freeze_extra_modules: head is no part outside of layers; there are embed_tokens, lm_head, norm"),
    ],
)
def test_parts_that_the_model_does_not_have_are_named(options: dict[str, Any], message: str, folder: Path) -> None:
    with pytest.raises(FreezeError) as caught:
        make_hf_engine(folder, freeze=FreezeOptions(**options))
    assert str(caught.value) == message


@pytest.mark.parametrize("options", [{"layers": 0}, {"layers": 2, "modules": ()}])
def test_an_engine_with_nothing_to_train_says_so(options: dict[str, Any], folder: Path) -> None:
    with pytest.raises(FreezeError, match="finetuning_type: freeze trains nothing of this model"):
        make_hf_engine(folder, freeze=FreezeOptions(**options))


@pytest.mark.parametrize("form", ["single", "stacked"])
@pytest.mark.parametrize("module", ["mlp", "block_sparse_moe"])
def test_a_part_is_known_by_its_name_in_either_form(module: str, form: Any) -> None:
    """Mixtral's experts are block_sparse_moe in published files and mlp in stacked ones; planner and engines ask `trained_of`."""
    layout = ModelLayout(make_model("mixtral").config.to_dict()).in_form(form)
    published = layout.in_form("single").hf_tensors()
    wanted = {name for name in published if name.startswith("model.layers.3.block_sparse_moe.")}
    assert trained_of(layout, FreezeOptions(layers=1, modules=(module,))) == wanted and len(wanted) == 8 * 3 + 1
    with pytest.raises(FreezeError, match="moe is no part of a layer; write all, or some of block_sparse_moe, input_layernorm"):
        trained_of(layout, FreezeOptions(layers=1, modules=("moe",)))


def test_names_of_other_families_tell_layers_too() -> None:
    names = ["transformer.wte.weight", "transformer.h.0.attn.c_attn.weight", "transformer.h.1.ln_1.bias", "transformer.ln_f.weight"]
    assert layer_count(names) == 2 and layer_count(["wte.weight"]) == 0
    assert trained(names, 2, FreezeOptions(layers=1, extra=("ln_f",))) == {"transformer.h.1.ln_1.bias", "transformer.ln_f.weight"}
    assert trained(names, 2, FreezeOptions(layers=-1, modules=("attn",))) == {"transformer.h.0.attn.c_attn.weight"}
