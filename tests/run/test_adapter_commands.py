"""Adapters in `eval`, `generate` and `export`: models whose files hold other tensors than the module has, and mistakes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PhiConfig, PhiForCausalLM

from rlmca.config import Environment, make_config
from rlmca.run.commands import CommandError, run_export, run_generate
from rlmca.transfer.hf_folder import HFFolderError
from rlmca.transfer.merged import MergedFolder
from tests.helpers.lora import ALL, ALPHA, RANK, draw_adapter, merged_model, save_adapter
from tests.helpers.models import make_model
from tests.helpers.runs import make_project

EXPERTS = {"mixtral": ("q_proj", "w1", "w2", "w3"), "deepseek_v3": ("q_b_proj", "o_proj", "gate_proj", "up_proj", "down_proj")}


def draw(folder: Path, out: Path, targets: tuple[str, ...]) -> tuple[Any, Path]:
    """The model in a folder with a random adapter merged into it by hand, and that adapter."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tensors = draw_adapter(model, targets)
    return merged_model(model, tensors, ALPHA / RANK), save_adapter(out, tensors, targets)


def replies(project: Path, output: Path, **changes: Any) -> list[Any]:
    values = {
        "model_name_or_path": str(project / "model"),
        "dataset_dir": str(project / "data"),
        "eval_dataset": "held",
        "max_prompt_len": 64,
        "max_new_tokens": 4,
        "do_sample": False,
        "use_cpu": True,
        "output_dir": str(output),
        **changes,
    }
    path = run_generate(make_config(values, env=Environment(), command="generate"))
    return [(row["ids"], row["logp"]) for row in map(json.loads, path.read_text().splitlines())]


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe", "mixtral", "deepseek_v3"])
def test_replies_of_models_with_experts(family: str, tmp_path: Path) -> None:
    """The files hold experts one by one, as published models do; the module holds those of a layer in one tensor."""
    project = make_project(tmp_path, family=family)
    assert any(".experts.0." in name for name in load_file(project / "model" / "model.safetensors"))
    merged, adapter = draw(project / "model", tmp_path / "adapter", EXPERTS.get(family, ALL))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        if (source := project / "model" / name).is_file():
            (tmp_path / "merged").mkdir(exist_ok=True)
            (tmp_path / "merged" / name).write_bytes(source.read_bytes())
    merged.save_pretrained(tmp_path / "merged")
    found = replies(project, tmp_path / "one", adapter_name_or_path=str(adapter))
    expected = replies(project, tmp_path / "two", model_name_or_path=str(tmp_path / "merged"))
    assert [ids for ids, _ in found] == [ids for ids, _ in expected] != [ids for ids, _ in replies(project, tmp_path / "three")]
    for (_, ours), (_, theirs) in zip(found, expected, strict=True):
        assert torch.tensor(ours).sub(torch.tensor(theirs)).abs().max() < 1e-5


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe", "mixtral", "deepseek_v3"])
def test_a_folder_is_read_in_either_form(family: str, stacked: bool, tmp_path: Path) -> None:
    base = make_model(family)
    base.save_pretrained(tmp_path / "model", save_original_format=not stacked)
    tensors = draw_adapter(make_model(family), targets := EXPERTS.get(family, ALL))
    adapter, merged = save_adapter(tmp_path / "adapter", tensors, targets), merged_model(make_model(family), tensors, ALPHA / RANK)
    merged.save_pretrained(tmp_path / "single")
    with MergedFolder(tmp_path / "model", [adapter]) as files:
        for form, expected in (("stacked", merged.state_dict()), ("single", load_file(tmp_path / "single" / "model.safetensors"))):
            found = dict(files.tensors(form))
            assert found.keys() == expected.keys()
            for name, tensor in found.items():
                torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def test_tied_copies_and_rotary_tables_stay_behind(tmp_path: Path) -> None:
    project = make_project(tmp_path, family="qwen3_tied")
    _, adapter = draw(project / "model", tmp_path / "adapter", ALL)
    expected = replies(project, tmp_path / "one", adapter_name_or_path=str(adapter))
    file = project / "model" / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(tensors, file, metadata={"format": "pt"})
    assert replies(project, tmp_path / "two", adapter_name_or_path=str(adapter)) == expected


def test_mistakes_show_before_a_model_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = make_project(tmp_path)

    def loaded(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the rollout engine was started")

    monkeypatch.setattr("rlmca.run.commands.rollout_engine", loaded)
    with pytest.raises(HFFolderError, match=r"nowhere has no adapter_config.json"):
        replies(project, tmp_path / "out", adapter_name_or_path=str(tmp_path / "nowhere"))


def test_a_family_of_transformers_alone(tmp_path: Path) -> None:
    """Replies come from merged weights; `export` says what it cannot do."""
    project = make_project(tmp_path)
    tokens = json.loads((project / "model" / "config.json").read_text())["vocab_size"]
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 128}
    PhiForCausalLM(PhiConfig(vocab_size=tokens, **sizes)).save_pretrained(project / "model")
    merged, adapter = draw(project / "model", tmp_path / "adapter", ("q_proj", "fc1"))
    found = replies(project, tmp_path / "one", adapter_name_or_path=str(adapter))
    base = replies(project, tmp_path / "three")
    merged.save_pretrained(project / "model")
    assert found == replies(project, tmp_path / "two") != base
    values = {"model_name_or_path": str(project / "model"), "adapter_name_or_path": str(adapter), "export_dir": str(tmp_path / "out")}
    with pytest.raises(CommandError, match="phi.*merge_and_unload"):
        run_export(make_config(values, env=Environment(), command="export"))
    assert not (tmp_path / "out").exists()
