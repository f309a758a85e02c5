"""adapter_config.json: what is read as plain LoRA, and that everything else is refused instead of read with wrong numbers."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from rlmca.transfer.hf_folder import HFFolderError
from rlmca.transfer.merged import MergedFolder
from rlmca.transfer.peft import AdapterFolder, read_adapter_config
from tests.helpers.models import save_model

MEANT: dict[str, Any] = {"peft_type": "LORA", "r": 3, "lora_alpha": 7, "target_modules": ["q_proj"]}
FREE = {
    "task_type": "CAUSAL_LM",
    "auto_mapping": {"base_model_class": "Qwen3ForCausalLM"},
    "peft_version": "0.17.0",
    "base_model_name_or_path": "some/model",
    "revision": "main",
    "inference_mode": True,
    "lora_dropout": 0.1,
    "use_rslora": True,
    "megatron_core": "megatron.core",
    "qalora_group_size": 32,
    "runtime_config": {"ephemeral_gpu_offload": True},
}
"""Fields that change nothing about what a finished adapter computes, or that are read (use_rslora); values other than PEFT's own."""


def write(folder: Path, **fields: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(MEANT | fields))
    return folder


def test_every_field_of_peft_is_read_or_refused(tmp_path: Path) -> None:
    names = {field.name for field in dataclasses.fields(peft.LoraConfig)}
    assert set(MEANT) <= names and set(FREE) <= names
    for name in sorted(names - set(MEANT) - set(FREE)):
        for value in (True, 1, "something", ["something"], {"a": 1}):
            if (name, value) == ("init_lora_weights", True):
                continue
            with pytest.raises(HFFolderError, match=name):
                read_adapter_config(write(tmp_path / "adapter", **{name: value}))
    assert read_adapter_config(write(tmp_path / "adapter", **FREE)).scaling == 7 / 3**0.5


@pytest.mark.parametrize("fields", [{"init_lora_weights": "gaussian"}, {"init_lora_weights": False}, {"use_rslora": True}, {}], ids=str)
def test_what_peft_writes_for_plain_lora_is_read(fields: dict[str, Any], tmp_path: Path) -> None:
    peft.LoraConfig(r=3, lora_alpha=7, target_modules=["q_proj"], **fields).save_pretrained(str(tmp_path))
    found = read_adapter_config(tmp_path)
    assert (found.rank, found.alpha, found.targets, found.rslora) == (3, 7.0, ("q_proj",), "use_rslora" in fields)


def test_fields_that_nobody_knows_must_say_nothing(tmp_path: Path) -> None:
    read_adapter_config(write(tmp_path / "a", newer=None, newest=False, enable_lora=[], extra={}, layers_pattern=""))
    with pytest.raises(HFFolderError, match="use_something_new: 1: only plain LoRA is read"):
        read_adapter_config(write(tmp_path / "a", use_something_new=1))
    with pytest.raises(HFFolderError, match="layers_to_transform: 0:"):  # the first layer alone, which equals False in Python
        read_adapter_config(write(tmp_path / "a", layers_to_transform=0))


@pytest.mark.parametrize("start", ["pissa", "pissa_niter_4", "olora"])
def test_an_adapter_over_a_changed_base_is_refused_until_peft_has_converted_it(start: str, tmp_path: Path) -> None:
    """PEFT takes the first adapter out of the weights, so that B A alone is not what training added to the model of the folder."""
    model = save_model("qwen3_untied", tmp_path / "model")
    options = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], init_lora_weights=start, task_type="CAUSAL_LM")
    theirs = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(model), options)
    theirs.peft_config["default"].init_lora_weights = True  # as PEFT's guide says
    theirs.save_pretrained(str(tmp_path / "first"))
    theirs.peft_config["default"].init_lora_weights = start
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora_" in name:
                parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    theirs.save_pretrained(str(tmp_path / "trained"))
    with pytest.raises(HFFolderError, match="path_initial_model_for_weight_conversion"):
        AdapterFolder(tmp_path / "trained")

    theirs.save_pretrained(str(tmp_path / "converted"), path_initial_model_for_weight_conversion=str(tmp_path / "first"))
    merged = theirs.merge_and_unload().state_dict()
    with MergedFolder(model, [tmp_path / "converted"]) as files:
        assert files.changed
        for name in files.shapes:
            torch.testing.assert_close(files.read(name), merged[name], rtol=0, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")
