"""Mistakes that only the model, the folder or the function shows: a sentence and status 2, no traceback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tests.helpers.runs import make_project, run, sft_options


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_project(tmp_path_factory.mktemp("project"))


def test_mistakes_of_other_commands_are_sentences(project: Path, tmp_path: Path) -> None:
    base = {"model_name_or_path": str(project / "model"), "dataset_dir": str(project / "data"), "output_dir": str(tmp_path / "out")}
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    bad_option = [{"name": "exact", "options": {"foo": 1}}]
    for command, keys, words in (
        ("export", {"export_dir": str(tmp_path / "taken")}, "export_dir: "),
        ("eval", {"eval_dataset": "held", "rewards": bad_option}, "has no option 'foo'"),
        ("generate", {"eval_dataset": "held", "stop": ["two words"]}, "write texts that are one token each"),
    ):
        printed = run(command, {**base, **keys}, status=2)
        assert words in printed and "Traceback" not in printed, printed


def test_a_finished_run_is_not_run_again(project: Path, tmp_path: Path) -> None:
    options = sft_options(project, tmp_path / "out", max_steps=2, save_strategy="steps", save_hf_model=False)
    run("train", options)
    before = (tmp_path / "out" / "train_results.json").read_bytes()
    printed = run("train", options, status=2)
    assert "it would make no optimizer step" in printed and "Traceback" not in printed
    assert (tmp_path / "out" / "train_results.json").read_bytes() == before


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"finetuning_type": "lora", "lora_target": "q_projj"},
            "lora_target: q_projj is no linear layer of phi; write all, or some of q_proj",
        ),
        (
            {"finetuning_type": "freeze", "freeze_trainable_modules": "attn"},
            "freeze_trainable_modules: attn is no part of a layer; write all",
        ),
    ],
)
def test_a_model_that_only_transformers_knows_has_its_mistakes_said_when_it_is_built(
    changes: dict[str, Any], words: str, project: Path, tmp_path: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(project / "model")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": len(tokenizer)}
    AutoModelForCausalLM.from_config(AutoConfig.for_model("phi", **sizes)).save_pretrained(tmp_path / "phi")
    tokenizer.save_pretrained(tmp_path / "phi")
    options = sft_options(project, tmp_path / "out", model_name_or_path=str(tmp_path / "phi"), **changes)
    printed = " ".join(run("train", options, status=2, USE_MCA="0").split())
    assert words in printed and "Traceback" not in printed, printed
