"""Keys around the update that contradict each other or do nothing."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from rlmca.config import ConfigError, Environment, make_config
from rlmca.config.dump import to_yaml

GRPO: dict[str, Any] = {"stage": "grpo", "model_name_or_path": "m", "dataset": "d", "output_dir": "o", "rewards": "exact"}
MCA = Environment(use_mca=True)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"oversample": 0.9}, "oversample: 0.9 is too small: at least 1"),
        ({"dynamic_sampling": True, "num_generations": 1}, "num_generations: 1"),
        (
            {"dynamic_sampling": True, "num_generations": 1, "rl_algorithm": "reinforce_plus_plus"},
            "dynamic_sampling: one reply",
        ),
        ({"dynamic_sampling_max_batches": 0}, "dynamic_sampling_max_batches: 0 is too small"),
        ({"overlong_buffer": 600}, "overlong_buffer: 600 tokens are more than max_new_tokens 512"),
        ({"curriculum_range": [0.9, 0.1]}, "curriculum_range"),
        ({"curriculum_range": [0.1, 1.5]}, "1.5 is too large"),
        ({"curriculum_range": None}, "curriculum_range: has no value"),
        ({"thinking_ratio": 1.1}, "thinking_ratio: 1.1 is too large"),
        ({"reward_normalize": "group"}, "'group' is not one of none, batch, running"),
        ({"prompt_filter": "keep"}, "write path/file.py:function"),
        ({"prompt_filter": "nowhere/filters.py:keep"}, "prompt_filter: there is no file nowhere/filters.py"),
        ({"stage": "sft", "dynamic_sampling": True}, "dynamic_sampling belongs to stage grpo"),
    ],
)
def test_contradictions_are_found_before_anything_is_loaded(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        make_config({**GRPO, **changes}, env=MCA)
    assert [text for text in error.value.errors if words in text], error.value.errors


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dynamic_sampling_max_batches": 3}, "dynamic_sampling_max_batches has no effect: dynamic_sampling is false"),
        ({"dynamic_sampling": True, "drop_zero_std_groups": True}, "drop_zero_std_groups has no effect"),
        ({"curriculum_range": [0.1, 0.9]}, "curriculum_range has no effect: curriculum is none"),
        ({"overlong_penalty": 2.0}, "overlong_penalty has no effect: overlong_buffer is 0"),
        ({"reward_normalize": "batch"}, "reward_normalize: batch changes next to nothing"),
    ],
)
def test_keys_without_effect_are_said(changes: dict[str, Any], words: str) -> None:
    assert [note for note in make_config({**GRPO, **changes}, env=MCA).notes if words in note]


def test_values_come_back_from_the_written_file() -> None:
    given = {"curriculum": "pass_rate", "curriculum_range": "0.2,0.8", "thinking_ratio": 0.9, "oversample": "1.5", "dynamic_sampling": True,
             "overlong_buffer": 100, "reward_normalize": "running", "advantage_std": "none"}  # fmt: skip
    cfg = make_config({**GRPO, **given}, env=MCA)
    assert cfg.gathering.curriculum_range == [0.2, 0.8] and cfg.notes == ()
    assert make_config(yaml.safe_load(to_yaml(cfg)), env=MCA).gathering == cfg.gathering
