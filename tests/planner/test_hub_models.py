"""Models that are named as on the hub: the same checks as for a folder, before a run, and again once the folder is there."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
from rich.console import Console

from rlmca.config import ConfigError, Environment, make_config
from rlmca.planner import check_model, dry_run, preflight_errors
from tests.helpers.hub import cached_model, loopback_hub
from tests.helpers.models import make_model
from tests.helpers.ranks import rank_pool
from tests.helpers.runs import make_project, run, sft_options
from tests.helpers.stages import run_stage
from tests.planner.test_dry_run import QWEN3, cfg, values

__all__ = ["values"]
FILLED = {"moe_expert_capacity_factor": 4, "moe_pad_expert_input_to_capacity": True, "moe_token_dispatcher_type": "alltoall"}
AUX = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1}
MISTAKES: list[tuple[str, dict[str, Any], str]] = [
    ("qwen3_tied", AUX, "moe_router_load_balancing_type, moe_aux_loss_coeff: a qwen3 model has no experts"),
    ("qwen3_tied", {"moe_expert_capacity_factor": 1.0}, "moe_expert_capacity_factor: a qwen3 model has no experts"),
    ("qwen3_tied", {"finetuning_type": "lora", "lora_target": "q_projj"}, "lora_target: q_projj is no linear layer of qwen3"),
    ("qwen3_moe", FILLED, "moe_expert_capacity_factor is 4 and 3 of 8 experts are chosen"),
    ("deepseek_v3", {"stage": "grpo", "rewards": "exact"}, "stage grpo of deepseek_v3: replies of such models are not in this version"),
]


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


def config_of(family: str, folder: Path) -> dict[str, bytes]:
    make_model(family).config.save_pretrained(folder)
    return {"config.json": (folder / "config.json").read_bytes()}


@pytest.mark.parametrize(("family", "changes", "words"), MISTAKES)
def test_a_cached_config_is_checked_like_that_of_a_folder(
    family: str, changes: dict[str, Any], words: str, values: dict[str, Any], tmp_path: Path, offline: None
) -> None:
    cached_model(tmp_path / "cache", "some/model", config_of(family, tmp_path / "written"))
    on_hub = {**values, "model_name_or_path": "some/model", "cache_dir": str(tmp_path / "cache")}
    assert preflight_errors(cfg(on_hub), 1) == []
    (error,) = preflight_errors(cfg({**on_hub, **changes}), 1)
    assert words in error


def test_the_revision_of_the_run_is_the_one_that_is_read(values: dict[str, Any], tmp_path: Path, offline: None) -> None:
    cached_model(tmp_path / "cache", "some/model", config_of("qwen3_moe", tmp_path / "written"))
    dense = {"config.json": json.dumps(QWEN3).encode()}
    cached_model(tmp_path / "cache", "some/model", dense, revision="v2", sha="f" * 40)
    on_hub = {**values, **AUX, "model_name_or_path": "some/model", "cache_dir": str(tmp_path / "cache")}
    assert preflight_errors(cfg(on_hub), 1) == []
    (error,) = preflight_errors(cfg({**on_hub, "model_revision": "v2"}), 1)
    assert "a qwen3 model has no experts" in error


def test_a_model_that_is_out_of_reach_is_looked_at_later(values: dict[str, Any], tmp_path: Path, offline: None) -> None:
    run = cfg({**values, **AUX, "model_name_or_path": "some/model", "cache_dir": str(tmp_path / "cache")})
    assert preflight_errors(run, 1) == []
    stream = StringIO()
    dry_run(run, 1, Console(file=stream, width=200))
    assert "known once the model's config.json is fetched from the hub" in stream.getvalue()
    with pytest.raises(ConfigError, match="a qwen3 model has no experts"):
        check_model(run, Path(values["model_name_or_path"]))


def test_config_json_is_fetched_alone(values: dict[str, Any], tmp_path: Path) -> None:
    weights = {"model.safetensors": b"not read"}
    with loopback_hub({"some/model": {"config.json": json.dumps(QWEN3).encode(), **weights}}, kind="models") as (endpoint, seen):
        on_hub = {**values, **AUX, "model_name_or_path": "some/model", "cache_dir": str(tmp_path / "cache")}
        printed = run("train", on_hub, "--dry_run", status=2, HF_ENDPOINT=endpoint, HF_HUB_OFFLINE="0")
        assert "a qwen3 model has no experts" in printed
        absent = run(
            "train", {**on_hub, "model_name_or_path": "some/other"}, "--dry_run", status=2, HF_ENDPOINT=endpoint, HF_HUB_OFFLINE="0"
        )
        assert "some/other is neither a local folder nor could it be fetched from the hub" in absent.replace("\n", " ")
    assert seen and all("safetensors" not in request for request in seen), seen
    assert [path.name for path in (tmp_path / "cache").rglob("*") if path.suffix == ".safetensors"] == []


@pytest.mark.serial
@pytest.mark.parametrize("use_mca", [True, False])
@pytest.mark.parametrize("stage", ["sft", "grpo"])
def test_the_loop_asks_again_before_it_loads_weights(stage: str, use_mca: bool, tmp_path: Path) -> None:
    """Its own check: a stage that was started without preflight, on a model whose weights are not there to be read."""
    project = make_project(tmp_path)
    (project / "model" / "model.safetensors").unlink()
    changes = {"finetuning_type": "lora", "lora_target": "q_projj"}
    values = sft_options(project, tmp_path / "out", **changes)
    if stage == "grpo":
        values = {**values, "stage": "grpo", "rewards": "exact"}
        del values["gradient_accumulation_steps"], values["cutoff_len"]
    make_config(values, env=Environment(use_mca=use_mca))
    with pytest.raises(AssertionError, match="ConfigError.*lora_target: q_projj is no linear layer of qwen3"):
        rank_pool(1).run(run_stage, values, use_mca)
