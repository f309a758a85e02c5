"""Keys of packing and token budgets: what contradicts what."""

from __future__ import annotations

from typing import Any

import pytest

from rlmca.config import ConfigError, Environment, make_config

SFT: dict[str, Any] = {"model_name_or_path": "m", "dataset": "d", "output_dir": "o"}
GRPO: dict[str, Any] = {**SFT, "stage": "grpo", "rewards": "exact"}


@pytest.mark.parametrize("mca", [False, True])
@pytest.mark.parametrize("values", [{"packing": True}, {"neat_packing": True}, {"packing": True, "neat_packing": True}])
def test_both_names_pack_on_both_engines(values: dict[str, Any], mca: bool) -> None:
    for base in (SFT, GRPO):
        assert make_config({**base, **values}, env=Environment(use_mca=mca)).data.packs
    assert not make_config({**SFT, "packing": False, "neat_packing": False}, env=Environment(use_mca=mca)).data.packs


@pytest.mark.parametrize(
    ("base", "values", "words"),
    [
        (SFT, {"packing": True, "neat_packing": False}, "neat_packing: false would let packed rows see each other"),
        (SFT, {"packing": False, "neat_packing": True}, "write packing: true, or leave both out"),
        (SFT, {"max_tokens_per_microbatch": 100, "cutoff_len": 128}, "100 tokens cannot hold a sequence of cutoff_len 128 tokens"),
        (
            GRPO,
            {"max_tokens_per_microbatch": 100, "max_prompt_len": 64, "max_new_tokens": 64},
            "cannot hold a sequence of max_prompt_len 64 + max_new_tokens 64 = 128 tokens; write at least 128",
        ),
        (SFT, {"max_tokens_per_microbatch": 0}, "max_tokens_per_microbatch"),
        (SFT, {"sequence_packing": True}, "write packing"),
    ],
)
def test_contradictions_are_one_error(base: dict[str, Any], values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_config({**base, **values}, env=Environment(use_mca=True))
    assert len(caught.value.errors) == 1 and words in caught.value.errors[0]


def test_the_row_count_of_a_micro_batch_is_idle_under_a_token_budget_in_rl_alone() -> None:
    values = {"per_device_train_batch_size": 4, "max_tokens_per_microbatch": 4096}
    env = Environment(use_mca=True)
    assert any("per_device_train_batch_size has no effect" in note for note in make_config({**GRPO, **values}, env=env).notes)
    assert not make_config({**SFT, **values}, env=env).notes
