"""Keys of stage pt, mixing, streaming and tokenised rows: what contradicts what, and what a run does not use."""

from __future__ import annotations

from typing import Any

import pytest

from rlmca.config import ConfigError, Environment, make_config, to_yaml

MCA = Environment(use_mca=True)
SFT: dict[str, Any] = {"model_name_or_path": "m", "dataset": "d", "output_dir": "o"}
TWO: dict[str, Any] = {**SFT, "dataset": "d,e", "mix_strategy": "interleave_over"}
STREAM: dict[str, Any] = {**SFT, "streaming": True, "max_steps": 5}
GRPO: dict[str, Any] = {**SFT, "stage": "grpo", "rewards": "exact"}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({**TWO, "interleave_probs": "0.5"}, "has 1 numbers, and dataset names 2 sets"),
        ({**TWO, "interleave_probs": "0.5, 0.6"}, "sum to 1.1, not to 1"),
        ({**TWO, "interleave_probs": [1.0, 0.0]}, "e is never drawn"),
        ({**TWO, "interleave_probs": [0.5, -0.5]}, "too small"),
        ({**TWO, "interleave_probs": "a, b"}, "'a' is not a number"),
        ({**TWO, "mix_strategy": "concat", "interleave_probs": "0.5,0.5"}, "needs mix_strategy: interleave_under"),
        ({**TWO, "mix_strategy": "shuffle"}, "is not one of concat, interleave_under"),
        ({**SFT, "streaming": True}, "write max_steps"),
        ({**STREAM, "tokenized_path": "t"}, "contradict each other"),
        ({**STREAM, "val_size": 0.1}, "write a number of rows"),
        ({**STREAM, "dataset": "d,e", "mix_strategy": "interleave_over", "val_size": 2}, "write eval_dataset"),
        ({**STREAM, "save_strategy": "epoch"}, "epoch needs a known length"),
        ({**STREAM, "buffer_size": 0}, "at least 1"),
        ({**GRPO, "streaming": True, "max_steps": 5}, "streaming is for stages pt and sft"),
        ({**GRPO, "tokenized_path": "t"}, "tokenized_path is for stages pt and sft"),
        ({**SFT, "stage": "pt", "kl_coef": 0.1}, "kl_coef belongs to stage grpo, and stage is pt"),
        ({**SFT, "stage": "pt", "max_tokens_per_microbatch": 100, "cutoff_len": 128}, "cannot hold a sequence of cutoff_len 128"),
        ({**SFT, "stage": "pt", "eval_strategy": "epoch"}, "no eval_dataset and no val_size"),
    ],
)
def test_contradictions_are_one_error(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_config(values, env=MCA)
    assert len(caught.value.errors) == 1 and words in caught.value.errors[0], caught.value.errors


@pytest.mark.parametrize("values", [{**TWO, "interleave_probs": "0.25, 0.75"}, {**STREAM, "val_size": 3, "stage": "pt"}])
def test_what_is_accepted_is_written_back_as_it_was_read(values: dict[str, Any]) -> None:
    import yaml

    cfg = make_config(values, env=MCA)
    again = make_config(yaml.safe_load(to_yaml(cfg)), env=MCA)
    assert again == cfg


def test_stage_pt_packs_unless_told_otherwise() -> None:
    assert make_config({**SFT, "stage": "pt"}, env=MCA).data.packs
    assert not make_config({**SFT, "stage": "pt", "packing": False}, env=MCA).data.packs
    assert not make_config(SFT, env=MCA).data.packs


@pytest.mark.parametrize(
    ("values", "noted"),
    [
        ({**SFT, "stage": "pt", "mask_history": True, "max_new_tokens": 5}, ["mask_history", "max_new_tokens"]),
        ({**SFT, "buffer_size": 5, "mix_strategy": "interleave_under"}, ["buffer_size", "mix_strategy"]),
        (
            {**STREAM, "buffer_size": 5, "disable_shuffling": True, "data_shared_file_system": True},
            ["buffer_size", "data_shared_file_system"],
        ),
        ({**SFT, "overwrite_cache": True, "tokenized_path": "t"}, []),
        ({**GRPO, "buffer_size": 5, "preprocessing_batch_size": 5}, ["buffer_size", "preprocessing_batch_size"]),
        ({**STREAM, "preprocessing_batch_size": 5}, ["preprocessing_batch_size"]),
        (
            {
                **SFT,
                "stage": "dpo",
                "buffer_size": 5,
                "overwrite_cache": True,
                "preprocessing_batch_size": 5,
                "data_shared_file_system": True,
            },
            ["buffer_size", "data_shared_file_system", "overwrite_cache", "preprocessing_batch_size"],
        ),
    ],
)
def test_keys_without_effect_are_noted(values: dict[str, Any], noted: list[str]) -> None:
    assert sorted(note.split()[0] for note in make_config(values, env=MCA).notes) == noted
