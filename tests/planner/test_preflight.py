"""What would stop a run only after the model is loaded, found before."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch

from rlmca.config import ConfigError, Environment, ModelConfig, make_config
from rlmca.planner import dry_run, preflight_errors
from rlmca.run.commands import run_eval, run_export, run_generate
from rlmca.transfer.source import ModelNotFound, resolve_model
from tests.helpers.hub import cached_model
from tests.helpers.models import make_model, save_model
from tests.planner.test_dry_run import cfg, values

__all__ = ["values"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"template": "qwne3"}, "nearest: qwen3"),
        ({"template": "qwen2_vl"}, "not in this version"),
        ({"lr_scheduler_kwargs": {"foo": 1}}, "lr_scheduler_kwargs"),
        ({"additional_configs": {"hidden_dropuot": 0.1}}, "hidden_dropuot is no field"),
        ({"additional_configs": {"hidden_size": 64}}, "follows from the model's config.json"),
    ],
)
def test_a_key_that_only_a_stage_reads_is_checked_before(values: dict[str, Any], changes: dict[str, Any], words: str) -> None:
    assert preflight_errors(cfg(values), 1) == []
    (error,) = preflight_errors(cfg({**values, **changes}), 1)
    assert words in error
    assert len(preflight_errors(cfg({**values, **changes, "dataset": "nowhere", "tensor_model_parallel_size": 2}), 1)) == 3


def test_a_run_may_not_export_over_the_model_it_starts_from(values: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "model").rename(tmp_path / "out" / "hf")
    again = {**values, "model_name_or_path": str(tmp_path / "out"), "overwrite_output_dir": True}
    (error,) = preflight_errors(cfg(again), 1)
    assert "holds the model that the run starts from" in error
    assert preflight_errors(cfg({**again, "save_hf_model": False}), 1) == []
    (tmp_path / "link").symlink_to(tmp_path / "out" / "hf")
    assert preflight_errors(cfg({**again, "model_name_or_path": str(tmp_path / "link")}), 1) == [error]


@pytest.mark.skipif(torch.cuda.is_available(), reason="speaks of machines without CUDA; hide the devices with CUDA_VISIBLE_DEVICES=")
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"apply_rope_fusion": True}, "a CUDA device and the package transformer-engine are missing here"),
        ({"transformer_impl": "transformer_engine"}, "transformer_impl: transformer_engine needs a CUDA device"),
    ],
)
def test_kernels_that_this_machine_lacks_are_refused_here_and_accepted_for_another(
    values: dict[str, Any], changes: dict[str, Any], words: str
) -> None:
    (error,) = preflight_errors(cfg({**values, **changes}), 1)
    assert words in error
    assert preflight_errors(cfg({**values, **changes}), 1, here=False) == []
    further = {"additional_configs": {"hidden_dropout": 0.1}}
    assert preflight_errors(cfg({**values, **changes, **further}), 1, here=False) == []


def test_fusions_without_a_kernel_of_their_own_run_anywhere(values: dict[str, Any]) -> None:
    names = ("bias_activation_fusion", "bias_dropout_fusion", "masked_softmax_fusion", "cross_entropy_loss_fusion")
    for name in names:
        assert preflight_errors(cfg({**values, name: True}), 1) == preflight_errors(cfg({**values, name: False}), 1) == []


@pytest.mark.parametrize(
    ("changes", "world", "words"),
    [
        (
            {"expert_model_parallel_size": 3},
            3,
            "is 3, but 8 experts do not split over it; use one of [1, 2, 4, 8]",
        ),
        ({"expert_tensor_parallel_size": 5}, 5, "expert_tensor_parallel_size is 5, but moe_intermediate_size is 24"),
        ({"tensor_model_parallel_size": 2}, 2, "tensor_model_parallel_size is 2 and the model has experts"),
        ({"expert_model_parallel_size": 4}, 2, "world size 2 is not a multiple of expert tensor 1 x expert 4 x pipeline 1 = 4"),
        ({"stage": "grpo", "rewards": "exact", "sglang_base_urls": ["http://127.0.0.1:9"]}, 1, "SGLang gives experts to every layer"),
        (
            {
                "moe_expert_capacity_factor": 3,
                "moe_pad_expert_input_to_capacity": True,
                "moe_token_dispatcher_type": "alltoall",
            },
            1,
            "moe_expert_capacity_factor is 3 and 3 of 8 experts are chosen: there are not enough tokens to pad an expert to its capacity; "
            "write at most 2.66, or",
        ),
    ],
)
def test_what_experts_need_is_said_with_the_numbers(
    values: dict[str, Any], changes: dict[str, Any], world: int, words: str, tmp_path: Path
) -> None:
    save_model("qwen3_moe", tmp_path / "experts")
    mixture = {**values, "model_name_or_path": str(tmp_path / "experts")}
    assert preflight_errors(cfg(mixture), 1) == preflight_errors(cfg({**mixture, "stage": "grpo", "rewards": "exact"}), 1) == []
    assert any(words in error for error in preflight_errors(cfg({**mixture, **changes}), world))
    (error,) = preflight_errors(cfg({**values, "expert_model_parallel_size": 2}), 2)
    assert "expert_model_parallel_size is 2, but the model has no experts" in error
    for idle in ({"moe_token_dispatcher_type": "alltoall"}, {"expert_tensor_parallel_size": 1, "moe_grouped_gemm": False}):
        (error,) = preflight_errors(cfg({**values, **idle}), 1)
        assert error == f"{', '.join(idle)}: a qwen3 model has no experts; leave it out"


@pytest.mark.parametrize("dry", [False, True])
def test_a_set_without_a_usable_row_is_named_with_its_columns(values: dict[str, Any], dry: bool, tmp_path: Path) -> None:
    info = {
        "rows": {"file_name": "rows.json"},
        "wrong": {"file_name": "rows.json", "columns": {"prompt": "question", "response": "output"}},
    }
    (tmp_path / "info" / "dataset_info.json").write_text(json.dumps(info))
    for names in ("wrong", "rows,wrong"):
        run = cfg({**values, "dataset": names})
        with pytest.raises(ConfigError) if dry else contextlib.nullcontext() as caught:
            errors = preflight_errors(run, 1) if not dry else dry_run(run, 1)
        (error,) = caught.value.errors if dry else errors
        assert "no usable row in data set 'wrong'" in error and "question" in error and "instruction" in error


def test_a_family_that_transformers_fuses_is_refused_by_its_engine_before_it_is_loaded(values: dict[str, Any], tmp_path: Path) -> None:
    save_model("qwen3_moe", tmp_path / "experts")
    run = make_config({**values, "model_name_or_path": str(tmp_path / "experts")}, env=Environment())
    (error,) = preflight_errors(run, 1)
    assert "renames or fuses weights of qwen3_moe models" in error and "USE_MCA=1" in error


def test_servers_of_experts_are_refused_where_they_would_compute_otherwise(values: dict[str, Any], tmp_path: Path) -> None:
    served = {"stage": "grpo", "rewards": "exact", "sglang_base_urls": ["http://127.0.0.1:9"]}
    for family, words in (("mixtral", None), ("qwen2_moe", "a shared expert by SGLang's servers is not in this version")):
        save_model(family, tmp_path / family, **({} if words is None else {"mlp_only_layers": []}))
        errors = preflight_errors(cfg({**values, **served, "model_name_or_path": str(tmp_path / family)}), 1)
        assert errors == [] if words is None else words in errors[0]
    make_model("mixtral").save_pretrained(tmp_path / "stacked", save_original_format=False)
    (error,) = preflight_errors(cfg({**values, **served, "model_name_or_path": str(tmp_path / "stacked")}), 1)
    assert "hold the experts of a layer in one tensor" in error


def test_what_latent_attention_does_not_have_is_said_before_a_run(values: dict[str, Any], tmp_path: Path) -> None:
    save_model("deepseek_v3", tmp_path / "latent")
    latent = {**values, "model_name_or_path": str(tmp_path / "latent")}
    assert preflight_errors(cfg(latent), 1) == []
    errors = preflight_errors(cfg({**latent, "apply_rope_fusion": True}), 1)
    assert any("apply_rope_fusion: not in this version with the latent attention of deepseek_v3" in error for error in errors)
    errors = preflight_errors(cfg({**latent, "stage": "grpo", "rewards": "exact"}), 1)
    assert any("stage grpo of deepseek_v3: replies of such models are not in this version" in error for error in errors)
    errors = preflight_errors(cfg({**latent, "tensor_model_parallel_size": 8, "sequence_parallel": True}), 8)
    assert any("num_attention_heads is 4 and does not split over 8 ranks" in error for error in errors)


@pytest.mark.parametrize("use_mca", [True, False])
def test_a_model_folder_that_holds_an_adapter_is_refused_by_all_commands(use_mca: bool, values: dict[str, Any], tmp_path: Path) -> None:
    """Transformers would load the adapter with the model, unasked, and only where Transformers loads it."""
    (tmp_path / "model" / "adapter_config.json").write_text("{}")
    for stage in ({}, {"stage": "grpo", "rewards": "exact"}):
        (error,) = preflight_errors(make_config({**values, **stage}, env=Environment(use_mca=use_mca)), 1)
        assert "holds an adapter beside the model (adapter_config.json): move it to a folder of its own" in error
    commands = {"eval": {"rewards": "exact"}, "generate": {}, "export": {"export_dir": str(tmp_path / "exported")}}
    for command, keys in commands.items():
        started = make_config({**values, **keys}, env=Environment(use_mca=use_mca), command=command)
        with pytest.raises(ModelNotFound, match="holds an adapter beside the model"):
            {"eval": run_eval, "generate": run_generate, "export": run_export}[command](started)


def test_the_hub_may_hold_an_adapter_beside_a_model_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    options = ModelConfig(model_name_or_path="some/model", cache_dir=str(tmp_path))
    snapshot = cached_model(tmp_path, "some/model", {"config.json": b"{}"})
    assert resolve_model("some/model", options) == snapshot
    (snapshot / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelNotFound, match="holds an adapter beside the model"):
        resolve_model("some/model", options)


def test_an_adapter_is_not_written_beside_its_model(values: dict[str, Any]) -> None:
    own = {**values, "output_dir": values["model_name_or_path"], "overwrite_output_dir": True}
    assert preflight_errors(cfg(own), 1) == []
    (error,) = preflight_errors(cfg({**own, "finetuning_type": "lora"}), 1)
    assert "is the model's own folder, and an adapter beside it would change it; name another folder" in error
