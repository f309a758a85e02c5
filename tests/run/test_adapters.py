"""Adapters from the YAML to the files: what a run writes, what reads it, what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rlmca.config import ConfigError, Environment, make_config
from rlmca.planner.preflight import preflight_errors
from rlmca.run.commands import run_export
from rlmca.transfer.merged import MergedFolder
from tests.helpers.ranks import rank_pool
from tests.helpers.runs import grpo_options, log_lines, make_project, run, sft_options, write_reward
from tests.helpers.stages import run_stage

LORA = {"finetuning_type": "lora", "lora_rank": 4, "lora_target": "all", "learning_rate": 2e-2}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_project(tmp_path_factory.mktemp("project"))
    write_reward(folder)
    return folder


@pytest.fixture(scope="module")
def trained(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("runs") / "lora"
    run("train", sft_options(project, output, **LORA, save_strategy="steps", save_steps=3))
    return output


def bits(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.serial
def test_a_run_writes_the_adapter_and_the_merged_model(project: Path, trained: Path) -> None:
    merged, base = bits(trained / "hf"), bits(project / "model")
    with MergedFolder(project / "model", [trained]) as files:
        for name, tensor in merged.items():
            assert torch.equal(files.read(name), tensor), name
    moved = {name.split(".")[-2] for name in merged if not torch.equal(merged[name], base[name])}
    assert moved == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    for folder in (trained, trained / "checkpoint-3", trained / "checkpoint-6"):
        config = json.loads((folder / "adapter_config.json").read_text())
        assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (4, 8, str(project / "model"))
    read = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(project / "model"), str(trained)).merge_and_unload()
    for name, tensor in read.state_dict().items():
        if name in merged:
            torch.testing.assert_close(tensor, merged[name], rtol=0, atol=1e-6)


@pytest.mark.serial
def test_export_merges_an_adapter(project: Path, trained: Path, tmp_path: Path) -> None:
    values = {"model_name_or_path": str(project / "model"), "adapter_name_or_path": str(trained), "export_dir": str(tmp_path / "out")}
    run_export(make_config({**values, "finetuning_type": "lora"}, env=Environment(), command="export"))
    merged, exported = bits(trained / "hf"), bits(tmp_path / "out")
    assert merged.keys() == exported.keys() and all(torch.equal(merged[name], exported[name]) for name in merged)


@pytest.mark.serial
def test_replies_come_from_the_merged_model(project: Path, trained: Path, tmp_path: Path) -> None:
    """`generate` with the adapter writes what it writes for the merged folder, and something else without it."""
    common = {"dataset_dir": str(project / "data"), "eval_dataset": "held", "max_prompt_len": 64, "max_new_tokens": 6, "do_sample": False}
    whole = {"merged": {"model_name_or_path": str(trained / "hf")}, "base": {"model_name_or_path": str(project / "model")}}
    whole["adapter"] = {**whole["base"], "adapter_name_or_path": str(trained)}
    found = {}
    for name, values in whole.items():
        run("generate", {**common, **values, "output_dir": str(tmp_path / name)})
        rows = (tmp_path / name / "generated_predictions.jsonl").read_text().splitlines()
        found[name] = [(json.loads(row)["ids"], json.loads(row)["logp"]) for row in rows]
    assert found["adapter"] == found["merged"] != found["base"]


@pytest.mark.serial
def test_training_goes_on_from_an_adapter_or_beside_a_merged_one(project: Path, trained: Path, tmp_path: Path) -> None:
    """Both start where the first run ended: with its adapter, or with it merged and a new one that adds nothing yet."""
    once = {"finetuning_type": "lora", "max_steps": 1, "warmup_steps": 0, "learning_rate": 1e-9, "adapter_name_or_path": str(trained)}
    further = {**once, "create_new_adapter": True, "lora_rank": 2}
    losses = {}
    for name, changes in (("further", once), ("new", further)):
        rank_pool(1).run(run_stage, sft_options(project, tmp_path / name, **changes), True)
        losses[name] = log_lines(tmp_path / name)[0]["loss"]
    merged = sft_options(project, tmp_path / "merged", max_steps=1, warmup_steps=0, learning_rate=1e-9)
    rank_pool(1).run(run_stage, {**merged, "model_name_or_path": str(trained / "hf")}, True)
    assert abs(losses["further"] - log_lines(tmp_path / "merged")[0]["loss"]) < 1e-5
    assert abs(losses["new"] - losses["further"]) < 1e-5
    assert json.loads((tmp_path / "further" / "adapter_config.json").read_text())["r"] == 4
    assert json.loads((tmp_path / "new" / "adapter_config.json").read_text())["r"] == 2


@pytest.mark.serial
def test_an_adapter_has_its_own_base_as_reference(project: Path, tmp_path: Path) -> None:
    """GRPO: no reference model is loaded, the KL starts at 0 and is measured against the weights without the adapter."""
    output = tmp_path / "grpo"
    rank_pool(1).run(run_stage, grpo_options(project, output, **LORA, kl_coef=0.1, mini_batch_size=4, max_steps=3), True)
    lines = log_lines(output)
    assert lines[0]["kl"] == 0.0 and 0 < lines[-1]["kl"] < 5.0
    assert all(line["logp_gap_max"] < 1e-5 for line in lines), "replies come from the merged weights"
    with MergedFolder(project / "model", [output]) as files:
        for name, tensor in bits(output / "hf").items():
            assert torch.equal(files.read(name), tensor), name


@pytest.mark.serial
@pytest.mark.parametrize("use_mca", [True, False])
def test_an_adapter_that_is_trained_further_has_its_start_as_reference(use_mca: bool, project: Path, trained: Path, tmp_path: Path) -> None:
    """GRPO: also after a break, when the policy has moved on."""
    own = {
        "finetuning_type": "lora",
        "adapter_name_or_path": str(trained),
        "learning_rate": 2e-2,
        "save_strategy": "steps",
        "save_steps": 2,
    }
    values = grpo_options(project, tmp_path / "grpo", **own, kl_coef=0.1, mini_batch_size=4, max_steps=3)
    rank_pool(1).run(run_stage, values, use_mca)
    lines = log_lines(tmp_path / "grpo")
    assert lines[0]["kl"] == 0.0 and lines[-1]["kl"] > 1e-4
    again = {**values, "output_dir": str(tmp_path / "again"), "resume_from_checkpoint": str(tmp_path / "grpo" / "checkpoint-2")}
    rank_pool(1).run(run_stage, again, use_mca)
    assert log_lines(tmp_path / "again")[-1]["kl"] == lines[-1]["kl"]


@pytest.mark.serial
@pytest.mark.parametrize("use_mca", [True, False])
def test_a_reference_of_its_own_gets_no_adapter_of_the_policy(use_mca: bool, project: Path, trained: Path, tmp_path: Path) -> None:
    """The policy starts as the base with an adapter merged, the reference is that merged model: they are one model."""
    own = {"finetuning_type": "lora", "adapter_name_or_path": str(trained), "create_new_adapter": True, "ref_model": str(trained / "hf")}
    values = grpo_options(project, tmp_path / "grpo", **own, kl_coef=0.1, mini_batch_size=4, max_steps=1)
    rank_pool(1).run(run_stage, values, use_mca)
    assert abs(log_lines(tmp_path / "grpo")[0]["kl"]) < 1e-6


@pytest.mark.serial
def test_a_checkpoint_is_for_the_adapter_that_it_holds(project: Path, trained: Path, tmp_path: Path) -> None:
    values = sft_options(project, tmp_path / "run", **LORA, resume_from_checkpoint=str(trained / "checkpoint-3"))
    rank_pool(1).run(run_stage, values, True)
    again, first = load_file(tmp_path / "run" / "adapter_model.safetensors"), load_file(trained / "adapter_model.safetensors")
    assert all(torch.equal(again[name], first[name]) for name in first)
    for changes, words in (({"lora_rank": 8}, "adapter of rank 8"),):
        out = run("train", {**values, "output_dir": str(tmp_path / words[:7]), **changes}, status=2)
        assert "was written by a run that trains an adapter of rank 4, alpha 8 / rank, beside all" in out.replace("\n", " ")
        assert words in out.replace("\n", " ") and "Traceback" not in out


@pytest.mark.serial
def test_partial_training_moves_what_it_names(project: Path, tmp_path: Path) -> None:
    values = sft_options(project, tmp_path / "run", finetuning_type="freeze", freeze_trainable_layers=1, freeze_trainable_modules="mlp")
    rank_pool(1).run(run_stage, values, True)
    base, after = bits(project / "model"), bits(tmp_path / "run" / "hf")
    moved = [name for name in base if not torch.equal(base[name], after[name])]
    assert sorted(moved) == [f"model.layers.1.mlp.{part}_proj.weight" for part in ("down", "gate", "up")]


def planned(values: dict[str, Any], *, use_mca: bool = True) -> list[str]:
    """Every error that a user would get before anything is loaded."""
    try:
        return preflight_errors(make_config(values, env=Environment(use_mca=use_mca)), 1)
    except ConfigError as error:
        return error.errors


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"finetuning_type": "full", "lora_rank": 4}, "lora_rank: for finetuning_type: lora, and it is full"),
        ({"lora_target": "q_prj"}, "lora_target: q_prj is no linear layer of qwen3; write all, or some of q_proj, k_proj"),
        ({"lora_target": "all,q_proj"}, "exclude each other"),
        ({"create_new_adapter": True}, "there is none"),
        ({"adapter_name_or_path": "nowhere"}, "nowhere has no adapter_config.json"),
        ({"train_from_scratch": True}, "train_from_scratch: true and finetuning_type: lora exclude each other"),
        ({"transformer_impl": "transformer_engine"}, "transformer_engine has no adapters"),
        ({"use_dora": True}, "DoRA is not in this version"),
        ({"loraplus_lr_ratio": 16}, "LoRA+ is not in this version"),
        ({"finetuning_type": "freeze", "freeze_trainable_modules": "mpl"}, "mpl is no part of a layer; write all, or some of"),
        ({"finetuning_type": "freeze", "freeze_extra_modules": "head"}, "there are embed_tokens, norm"),
        ({"finetuning_type": "freeze", "freeze_trainable_layers": 0}, "freeze_trainable_layers: 0 trains nothing"),
        ({"finetuning_type": "freeze", "freeze_trainable_modules": []}, "freeze_trainable_modules is empty and trains nothing"),
        ({"lora_dropout": 1.0}, "must be below 1"),
        ({"lora_rank": 0}, "at least 1"),
    ],
)
def test_a_mistake_is_one_error_before_anything_is_loaded(
    changes: dict[str, Any], words: str, project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = planned(sft_options(project, tmp_path / "out", **{"finetuning_type": "lora", **changes}))
    assert len(found) == 1 and words in found[0], found


@pytest.mark.serial
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"peft_type": "IA3"}, "peft_type IA3"),
        ({"use_dora": True}, "use_dora: True: only plain LoRA is read"),
        ({"target_modules": "all-linear"}, "target_modules is 'all-linear'"),
        ({"r": 5}, "has shape (4, 32), the model and adapter_config.json say (5, 32)"),
        ({"target_modules": ["q_proj"]}, "unexpected: base_model.model.model.layers.0.self_attn.k_proj"),
        ({"target_modules": ["c_attn"]}, "has another model's layers"),
    ],
    ids=str,
)
def test_an_adapter_that_does_not_fit_is_named(change: dict[str, Any], words: str, project: Path, trained: Path, tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()
    shutil.copy(trained / "adapter_model.safetensors", folder)
    config = json.loads((trained / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, **change}))
    found = planned(sft_options(project, tmp_path / "out", finetuning_type="lora", adapter_name_or_path=str(folder)))
    assert len(found) == 1 and words in found[0], found


@pytest.mark.serial
def test_an_adapter_without_its_tensors_is_named(project: Path, trained: Path, tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()
    shutil.copy(trained / "adapter_config.json", folder)
    found = planned(sft_options(project, tmp_path / "out", finetuning_type="lora", adapter_name_or_path=str(folder)))
    assert len(found) == 1 and "has no adapter_model.safetensors" in found[0]
    shutil.copy(trained / "adapter_config.json", folder / "adapter_model.safetensors")
    found = planned(sft_options(project, tmp_path / "out", finetuning_type="lora", adapter_name_or_path=str(folder)))
    assert len(found) == 1 and "is not a whole safetensors file" in found[0]
