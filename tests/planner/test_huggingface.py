"""The dry run of the Hugging Face engine: data parallelism alone, any architecture, nothing of Megatron."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rlmca.config import ConfigError, Environment, RunConfig, make_config
from rlmca.planner import dry_run, preflight_errors
from tests.planner.test_dry_run import QWEN3, values

__all__ = ["values"]
GPT2 = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 67}


def cfg(values: dict[str, Any]) -> RunConfig:
    return make_config(values, env=Environment())


def printed(values: dict[str, Any], world_size: int) -> str:
    stream = StringIO()
    dry_run(cfg(values), world_size, Console(file=stream, width=200))
    return stream.getvalue()


def test_the_plan_names_data_parallelism_alone(values: dict[str, Any]) -> None:
    text = printed({**values, "bf16": True, "gradient_checkpointing": True}, 3)
    assert "huggingface, float32 weights, bfloat16 autocast" in text
    assert "data 3 = 3 processes" in text and "tensor" not in text and "pipeline" not in text
    assert "micro-batch 4 x accumulation 1 x data 3 = 12 rows" in text
    assert not Path(values["output_dir"]).exists()


def test_parameters_are_counted_where_the_family_is_known(values: dict[str, Any], tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**{k: v for k, v in QWEN3.items() if k != "architectures"})
    assert f"{sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters()):,}" in printed(values, 1)
    (tmp_path / "model" / "config.json").write_text(json.dumps(GPT2))
    assert "known once the model is loaded" in printed(values, 2)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "mamba9"}, "no causal language model of model_type 'mamba9'"),
        ({"model_type": "mine", "auto_map": {"AutoModelForCausalLM": "m.M"}}, "write trust_remote_code: true"),
        ({"quantization_config": {"quant_method": "fp8"}}, "training quantised weights is not in this version"),
        ({"output_router_logits": True}, "the router's auxiliary loss is not in this version"),
    ],
)
def test_a_config_that_cannot_be_trained_is_found_first(
    values: dict[str, Any], changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    assert preflight_errors(cfg(values), 2) == []
    (tmp_path / "model" / "config.json").write_text(json.dumps({**QWEN3, **changes}))
    (error,) = preflight_errors(cfg(values), 2)
    assert words in error
    with pytest.raises(ConfigError):
        dry_run(cfg(values), 2)


def test_kernels_that_are_not_here_come_with_the_other_problems(values: dict[str, Any]) -> None:
    found = preflight_errors(cfg({**values, "flash_attn": "fa2", "bf16": True, "dataset": "rowz"}), 1)
    assert len(found) == 2 and "flash_attn: fa2 needs the package flash-attn" in found[0]
    (error,) = preflight_errors(cfg({**values, "flash_attn": "fa3", "bf16": True, "model_name_or_path": "some/model"}), 1)
    assert "fa3" in error, "the kernel is checked also where config.json is still on the hub"
