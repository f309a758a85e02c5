"""The dry run: its numbers against a model that Transformers builds, its errors, and that it loads nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rlmca.config import ConfigError, Environment, RunConfig, make_config
from rlmca.layouts import Topology
from rlmca.planner import count_rows, dry_run, preflight_errors, rank_parameters
from tests.helpers.models import save_model

ROOT = Path(__file__).parents[2]
QWEN3 = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 66,
    "tie_word_embeddings": True,
}


@pytest.fixture
def values(tmp_path: Path) -> dict[str, Any]:
    """Keys of a run whose model folder has a config.json and nothing else."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(QWEN3))
    (tmp_path / "info").mkdir()
    rows = [{"instruction": f"{i}", "input": "", "output": "x"} for i in range(37)]
    (tmp_path / "info" / "rows.json").write_text(json.dumps(rows))
    (tmp_path / "info" / "dataset_info.json").write_text(json.dumps({"rows": {"file_name": "rows.json"}}))
    return {
        "model_name_or_path": str(tmp_path / "model"),
        "dataset": "rows",
        "dataset_dir": str(tmp_path / "info"),
        "output_dir": str(tmp_path / "out"),
        "per_device_train_batch_size": 4,
        "num_train_epochs": 2,
    }


def cfg(values: dict[str, Any]) -> RunConfig:
    return make_config(values, env=Environment(use_mca=True))


def printed(values: dict[str, Any], world_size: int) -> str:
    stream = StringIO()
    dry_run(cfg(values), world_size, Console(file=stream, width=200))
    return stream.getvalue()


def test_parameters_are_those_of_the_model_that_transformers_builds() -> None:
    from transformers import AutoModelForCausalLM, Qwen3Config

    config = {k: v for k, v in QWEN3.items() if k not in ("model_type", "architectures")}
    model = AutoModelForCausalLM.from_config(Qwen3Config(**config))
    total, ranks = rank_parameters(QWEN3, Topology())
    assert total == sum(p.numel() for p in model.parameters()) == ranks[0].parameters
    split, four = rank_parameters(QWEN3, Topology(tp=2, pp=2))
    # the tied embedding is held by the first and the last stage; norms are on both tensor ranks
    norms = sum(p.numel() for n, p in model.named_parameters() if "norm" in n)
    assert split == total and sum(rank.parameters for rank in four) == total + QWEN3["vocab_size"] * QWEN3["hidden_size"] + norms  # type: ignore[operator]


def test_the_plan_of_a_supervised_run(values: dict[str, Any]) -> None:
    text = printed({**values, "tensor_model_parallel_size": 2, "gradient_accumulation_steps": 2, "overwrite_cache": True}, 4)
    assert "tensor 2 x pipeline 1 x data 2 = 4 processes" in text
    assert "37 rows" in text and "micro-batch 4 x accumulation 2 x data 2 = 16 rows" in text
    assert "4 (2 an epoch, 2.00 epochs)" in text
    assert "note: overwrite_cache has no effect" in text and "nothing was loaded or started" in text
    assert not Path(values["output_dir"]).exists()


def test_the_plan_of_a_rollout_run(values: dict[str, Any]) -> None:
    rl = {"stage": "grpo", "rewards": "exact", "rollout_batch_size": 8, "num_generations": 4, "mini_batch_size": 4, "max_steps": 3}
    text = printed({**values, **rl}, 1)
    assert "8 prompts x 4 replies = 32 samples" in text
    assert "2 optimiser steps of 4 prompts, 4 micro-batches of 4 a rank" in text and "3 (4 an epoch" in text and "6 optimiser steps" in text


def test_the_plan_of_experts_names_their_ranks(values: dict[str, Any], tmp_path: Path) -> None:
    save_model("qwen3_moe", tmp_path / "experts")
    text = printed({**values, "model_name_or_path": str(tmp_path / "experts"), "expert_model_parallel_size": 2}, 2)
    assert "data 2 = 2 processes, expert 2 x expert tensor 1" in text
    assert "tensor 0, pipeline 0" in text and "tensor 0, group 1, pipeline 0" in text


@pytest.mark.parametrize(
    ("change", "world_size", "words"),
    [
        ({"per_device_train_batch_size": 64}, 1, "37 rows make no step with global batch 64"),
        ({"pipeline_model_parallel_size": 3}, 3, "4 layers do not split evenly over 3 stages"),
        ({"tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 2}, 12, "world size 12 is not a multiple"),
        ({"dataset": "rowz"}, 1, "nearest: rows"),
        ({"val_size": 0.9, "per_device_train_batch_size": 8}, 1, "3 rows make no step with global batch 8"),
        ({"max_samples": 3}, 1, "3 rows make no step"),
    ],
)
def test_what_would_stop_a_run_is_found_first(values: dict[str, Any], change: dict[str, Any], world_size: int, words: str) -> None:
    found = preflight_errors(cfg({**values, **change}), world_size)
    assert [text for text in found if words in text], found
    with pytest.raises(ConfigError):
        dry_run(cfg({**values, **change}), world_size)


def test_a_model_that_is_not_supported_is_named(values: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "model" / "config.json").write_text(json.dumps({**QWEN3, "model_type": "mamba"}))
    found = preflight_errors(cfg(values), 1)
    assert len(found) == 1 and "mamba" in found[0]
    (tmp_path / "model" / "config.json").unlink()
    found = preflight_errors(cfg(values), 1)
    assert len(found) == 1 and "config.json" in found[0]


def test_several_problems_come_together(values: dict[str, Any]) -> None:
    found = preflight_errors(cfg({**values, "tensor_model_parallel_size": 2, "dataset": "rowz", "model_name_or_path": "./nowhere"}), 3)
    assert len(found) == 3


@pytest.mark.parametrize(
    ("rewards", "words"),
    [([{"name": "exact", "options": {"ignore_cse": True}}], "ignore_cse"), ("nowhere.py:score", "nowhere.py"), ("exact", "")],
)
def test_rewards_are_built_once_before_a_run(values: dict[str, Any], rewards: Any, words: str) -> None:
    found = preflight_errors(cfg({**values, "stage": "grpo", "rewards": rewards}), 1)
    assert [words in text for text in found] == ([True] if words else [])


def test_rows_of_a_procedural_set_are_counted(values: dict[str, Any]) -> None:
    rl = {"stage": "grpo", "rewards": "reasoning_gym", "dataset": "reasoning_gym:chain_sum?size=11&seed=1"}
    assert count_rows(cfg({**values, **rl})) == {rl["dataset"]: 11}


def test_the_command_prints_the_plan_and_writes_nothing(values: dict[str, Any], tmp_path: Path) -> None:
    """`--gpus` speaks of other machines: a kernel that this one may lack is accepted."""
    (tmp_path / "x.json").write_text(json.dumps({**values, "apply_rope_fusion": True}))
    command = [sys.executable, "-m", "rlmca.cli.main", "train", str(tmp_path / "x.json"), "--dry_run", "--gpus", "2", "seed=3"]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env={"USE_MCA": "1", "PATH": "/usr/bin:/bin", "COLUMNS": "150"}, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "data 2 = 2 processes" in done.stdout and not Path(values["output_dir"]).exists()
