"""Prompts that would not fit are found before a run starts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlmca.config import Environment, RunConfig, make_config
from rlmca.rollout.base import RolloutError
from rlmca.run.source import check_lengths
from tests.helpers.models import save_model


def config(**changes: Any) -> RunConfig:
    values = {"model_name_or_path": "m", "dataset": "d", "output_dir": "o", "stage": "grpo", "rewards": "exact", "max_new_tokens": 8}
    return make_config({**values, **changes}, env=Environment(use_mca=True))


def test_the_longest_prompt_and_its_reply_must_fit(tmp_path: Path) -> None:
    source: Any = SimpleNamespace(folder=save_model("llama", tmp_path / "model"))  # 128 positions
    prompts: list[Any] = [SimpleNamespace(ids=[1] * n, row={}) for n in (3, 120, 9)]
    check_lengths(config(), source, prompts)
    with pytest.raises(RolloutError, match="longest prompt has 120 tokens and max_new_tokens is 9, .* max_position_embeddings 128"):
        check_lengths(config(max_new_tokens=9), source, prompts)
    served = config(rollout_engine="sglang", sglang_base_urls=["http://127.0.0.1:1"])
    check_lengths(served, source, prompts)
