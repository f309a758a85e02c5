"""Windows and angles that SGLang would compute otherwise are refused, before a server is started."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from rlmca.config import ConfigError
from rlmca.config.generation import GenerationConfig
from rlmca.planner import preflight_errors
from rlmca.rollout.sglang.attention import attention_error
from rlmca.rollout.sglang.setup import sglang_engine
from tests.helpers.config_mutations import YARN, base_config
from tests.helpers.models import save_model
from tests.planner.test_dry_run import cfg, values

__all__ = ["values"]
SERVED: dict[str, Any] = {"stage": "grpo", "rewards": "exact", "sglang_base_urls": ["http://127.0.0.1:9"]}


LONGEST = 4096


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "mistral"}, ""),
        ({"model_type": "mistral", "sliding_window": LONGEST}, ""),
        ({"model_type": "mistral", "sliding_window": LONGEST - 1}, r"window 4095.*max_new_tokens = 4096; lower them to 4095"),
        ({"model_type": "mistral", "sliding_window": None}, ""),
        ({"model_type": "qwen2", "sliding_window": 9}, ""),
        ({"model_type": "qwen2", "sliding_window": 9, "use_sliding_window": True}, "sliding_window 9"),
        ({"model_type": "qwen2", "sliding_window": None, "use_sliding_window": True}, ""),
        ({"model_type": "mixtral"}, ""),
        ({"model_type": "mixtral", "sliding_window": 8}, "sliding_window 8"),
        ({"model_type": "llama", "rope_parameters": YARN}, ""),
        ({"model_type": "llama", "rope_parameters": YARN | {"attention_factor": 1.5}}, "attention_factor 1.5.*local"),
        ({"model_type": "qwen3", "rope_scaling": {"type": "yarn", "factor": 4.0, "mscale": 0.7}}, "mscale 0.7"),
        ({"model_type": "deepseek_v3", "rope_parameters": YARN | {"mscale": 1.0}}, ""),
    ],
    ids=str,
)
def test_what_servers_do_not_follow(config: dict[str, Any], words: str) -> None:
    error = attention_error(config, GenerationConfig(max_prompt_len=LONGEST - 96, max_new_tokens=96))
    assert (error is None) if not words else re.search(words, error or "")


def test_it_is_said_before_the_run_and_again_when_a_server_is_asked_for(values: dict[str, Any], tmp_path: Path) -> None:
    model = Path(values["model_name_or_path"]) / "config.json"
    model.write_text(json.dumps(base_config("mistral")))
    found = preflight_errors(cfg({**values, **SERVED}), 1)
    assert [text for text in found if "sliding_window 4, and SGLang attends to whole rows" in text], found
    within = {**values, **SERVED, "max_prompt_len": 3, "max_new_tokens": 1}
    assert not [text for text in [*preflight_errors(cfg(within), 1), *preflight_errors(cfg(values), 1)] if "window" in text]
    with pytest.raises(ConfigError, match="sliding_window 5"):
        sglang_engine(cfg({**values, **SERVED}), save_model("mistral", tmp_path / "m"), dtype=torch.float32, log_dir=tmp_path)


def test_a_fused_kernel_that_leaves_out_the_factor_is_named_before_the_run(values: dict[str, Any]) -> None:
    model = Path(values["model_name_or_path"]) / "config.json"
    model.write_text(json.dumps({**json.loads(model.read_text()), "rope_parameters": YARN}))
    found = preflight_errors(cfg({**values, "apply_rope_fusion": True}), 1)
    assert [text for text in found if "attention factor of the model's YaRN (1.139)" in text], found
    assert preflight_errors(cfg(values), 1) == []
