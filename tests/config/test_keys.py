"""Every known option name is honoured, refused with a reason, or stated to have no effect."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlmca.config import ALIASES, FOREIGN, ConfigError, Environment, describe, keys, make_config

FIXTURES = Path(__file__).parents[1] / "fixtures"
MCA = Environment(use_mca=True)
SFT: dict[str, Any] = {"model_name_or_path": "m", "dataset": "d", "output_dir": "o"}
GRPO: dict[str, Any] = {**SFT, "stage": "grpo", "rewards": "exact"}


def errors(values: dict[str, Any], env: Environment = MCA, command: str = "train") -> list[str]:
    try:
        make_config(values, env=env, command=command)
    except ConfigError as error:
        return error.errors
    return []


def listed(name: str) -> list[str]:
    lines = (FIXTURES / name).read_text(encoding="utf-8").splitlines()
    return [word for line in lines if not line.startswith("#") for word in line.split()]


def training_arguments() -> list[str]:
    from transformers import Seq2SeqTrainingArguments

    return [field.name for field in dataclasses.fields(Seq2SeqTrainingArguments)]


@pytest.mark.parametrize(
    "read",
    [lambda: listed("option_names.txt"), lambda: listed("interface_keys.txt"), training_arguments],
    ids=["other programs", "interface", "TrainingArguments"],
)
def test_every_name_is_accounted_for(read: Callable[[], list[str]]) -> None:
    names = read()
    assert len(names) > 100
    states = {name: [name in keys(), name in ALIASES, name in FOREIGN] for name in names}
    assert {name: state for name, state in states.items() if sum(state) != 1} == {}
    unknown = {name: found for name in names for found in errors({**SFT, name: "surely not a value"}) if "unknown key" in found}
    assert unknown == {}


def test_no_name_is_honoured_and_foreign() -> None:
    assert set(keys()) & set(FOREIGN) == set()
    assert set(ALIASES) & (set(keys()) | set(FOREIGN)) == set()
    assert set(ALIASES.values()) <= set(keys())


@pytest.mark.parametrize("name", sorted(FOREIGN))
def test_foreign_names_say_what_happens(name: str) -> None:
    foreign = FOREIGN[name]
    assert len(foreign.reason) > 8
    value = "surely not a value"
    if foreign.kind == "refused":
        found = errors({**SFT, name: value})
        assert [text for text in found if text.startswith(f"{name}: ") and foreign.reason in text], found
        for accepted in foreign.accepted:
            assert errors({**SFT, name: accepted}) == []
    else:
        cfg = make_config({**SFT, name: value}, env=MCA)
        assert [note for note in cfg.notes if note.startswith(f"{name} has no effect: ")] == [f"{name} has no effect: {foreign.reason}"]


@pytest.mark.parametrize("name", sorted([*keys(), *FOREIGN, *ALIASES]))
def test_help_knows_every_name(name: str) -> None:
    lines = describe(name)
    assert lines[0].startswith(name) and len(lines) >= 2


def test_help_of_an_unknown_name_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="unknown key, did you mean clip_ratio_low"):
        describe("clip_ratio_lo")
    with pytest.raises(ConfigError, match="did you mean adapter_name_or_path"):  # a key, before the refused adapter_folder
        describe("adapter_name")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("beta", ("kl_coef", "pref_beta")),
        ("epsilon", ("clip_ratio_low", "clip_ratio_high")),
        ("epsilon_high", ("clip_ratio_high",)),
        ("num_iterations", ("updates_per_rollout",)),
        ("reward_funcs", ("rewards",)),
        ("loss_type", ("loss_agg", "pref_loss")),
        ("mask_truncated_completions", ("mask_truncated",)),
    ],
)
def test_names_of_trl_lead_to_the_key_of_the_same_meaning(name: str, words: tuple[str, ...]) -> None:
    (found,) = errors({**GRPO, name: 2})
    assert all(word in found for word in words) and "did you mean" not in found
    assert set(words) <= set(keys())


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("stage", "kto", "stage kto: not in this version"),
        ("stage", "simpo", "write stage: dpo and pref_loss: simpo"),
        ("pref_loss", "kto_pair", "kto_pair: not in this version"),
        ("ld_alpha", 0.5, "LD-DPO is not in this version"),
        ("stage", "rm", "stage rm: not in this version"),
        ("stage", "ppo", "stage ppo: not in this version"),
        ("finetuning_type", "oft", "oft: not in this version"),
        ("use_dora", True, "DoRA is not in this version"),
        ("cp_comm_type", "p2p", "not in this version"),
        ("moe_router_load_balancing_type", "global_aux_loss", "global_aux_loss: not in this version"),
        ("moe_router_load_balancing_type", "sinkhorn", "sinkhorn: not in this version"),
        ("num_layers_in_first_pipeline_stage", 2, "write pipeline_model_parallel_layout"),
        ("max_restarts", 3, "restarting ranks is not in this version"),
        ("fp8", "hybrid", "FP8 is not in this version"),
        ("deepspeed", "ds.json", "DeepSpeed is not in this version"),
        ("async_save", True, "saving in the background is not in this version"),
        ("calculate_per_token_loss", True, "inflates auxiliary losses"),
    ],
)
def test_what_comes_later_is_refused_by_name(key: str, value: Any, words: str) -> None:
    found = errors({**SFT, key: value})
    assert [text for text in found if words in text and value is not None], found


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("sync", {"method": "distributed"}, "sync: method: distributed: not in this version"),
        ("sync", {"delta": True}, "sync: delta: sending only what changed is not in this version"),
        ("rl_algorithm", "ppo", "ppo: not in this version"),
        ("advantage", "gae", "gae: not in this version"),
        ("kl_estimator", "k1", "gradient is not that of the KL"),
        ("rewards", "critic", "reward critic: not in this version"),
        ("gradient_accumulation_steps", 1, "stage grpo derives it"),
    ],
)
def test_rl_values_that_come_later_are_refused_by_name(key: str, value: Any, words: str) -> None:
    found = errors({**GRPO, key: value})
    assert len(found) == 1 and words in found[0], found


def test_values_that_mean_off_are_accepted() -> None:
    off = {
        "context_parallel_size": 1,
        "expert_model_parallel_size": "1",
        "packing": False,
        "streaming": "false",
        "use_ray": False,
        "fp16": False,
        "optim": "adamw_torch",
        "deepspeed": None,
        "async_staleness": 0,
    }
    assert errors({**SFT, **off}) == []


def test_a_number_is_no_switch() -> None:
    """1 equals True in Python, but a switch that is refused at true says nothing about the number 1, nor 0 about false."""
    assert len(errors({**SFT, "context_parallel_size": True})) == 1
    assert len(errors({**SFT, "full_determinism": 1})) == 1


def test_reward_names_are_those_that_exist() -> None:
    from rlmca.config.rewards import REGISTERED_REWARDS
    from rlmca.rewards import REGISTRY

    assert set(REGISTERED_REWARDS) == set(REGISTRY)


def test_schedulers_are_those_that_work() -> None:
    from rlmca.run.lr import scheduler_names

    rule = keys()["lr_scheduler_type"].rule
    assert set(rule.choices) == set(scheduler_names())


def test_config_needs_no_torch() -> None:
    import subprocess

    code = (
        "import json, sys, rlmca.config; print(json.dumps([m for m in ('torch', 'megatron', 'transformers', 'numpy') if m in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    assert json.loads(done.stdout) == []
