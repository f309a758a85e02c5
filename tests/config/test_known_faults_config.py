"""Faults that users of comparable systems reported: ignored keys, numbers read as text, runs without a step, late layout errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlmca.config import ConfigError, Environment, batch_plan, layout_errors, load_config, make_config

MCA = Environment(use_mca=True)
SFT: dict[str, Any] = {"model_name_or_path": "m", "dataset": "d", "output_dir": "o"}
GRPO: dict[str, Any] = {**SFT, "stage": "grpo", "rewards": "exact"}
BASE = "model_name_or_path: m\ndataset: d\noutput_dir: o\n"


def write(folder: Path, text: str) -> Path:
    (folder / "x.yaml").write_text(BASE + text)
    return folder / "x.yaml"


def errors(values: dict[str, Any], env: Environment = MCA) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        make_config(values, env=env)
    return caught.value.errors


# ---- B3: a misspelt key is dropped, Megatron keys are refused without a hint, 1e-5 is text


def test_misspelt_keys_are_listed_exactly_with_the_nearest_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, "learning_rte: 1e-5\nseed: 3\nnum_genrations: 4\nxyzzy: 1\n"), env=MCA)
    assert caught.value.errors == [
        "learning_rte: unknown key, did you mean learning_rate?",
        "num_genrations: unknown key, did you mean num_generations?",
        "xyzzy: unknown key; rlmca-cli help lists all keys",
    ]


@pytest.mark.parametrize("key", ["tensor_model_parallel_size", "sequence_parallel", "use_distributed_optimizer", "recompute_granularity"])
def test_megatron_keys_without_the_engine_say_how_to_choose_it(key: str) -> None:
    values: dict[str, Any] = {"sequence_parallel": False, "use_distributed_optimizer": True, "recompute_granularity": "selective"}
    found = errors({**SFT, key: values.get(key, 2)}, Environment())
    assert found == [f"{key}: only the Megatron engine has this key: set USE_MCA=1"]


@pytest.mark.parametrize(("text", "value"), [("1e-5", 1e-5), ("5e-05", 5e-5), ("1E-6", 1e-6), ("2e-4", 2e-4), ("3", 3.0)])
def test_exponents_are_floats_in_files_and_overrides(tmp_path: Path, text: str, value: float) -> None:
    rate = load_config(write(tmp_path, f"learning_rate: {text}\n"), env=MCA).train.learning_rate
    assert type(rate) is float and rate == value
    rate = load_config(write(tmp_path, ""), [f"learning_rate={text}"], env=MCA).train.learning_rate
    assert type(rate) is float and rate == value


def test_a_learning_rate_that_is_no_number_names_the_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="learning_rate: 'abc' is not a number"):
        load_config(write(tmp_path, "learning_rate: abc\n"), env=MCA)


# ---- B5: training ends with no update


def test_a_run_without_a_step_is_an_error_with_both_numbers() -> None:
    cfg = make_config({**SFT, "per_device_train_batch_size": 64, "gradient_accumulation_steps": 16}, env=MCA)
    with pytest.raises(ConfigError) as caught:
        batch_plan(cfg, 1, 128)
    assert "128 rows" in str(caught.value) and "global batch 1024" in str(caught.value)
    with pytest.raises(ConfigError, match="1023 rows"):
        batch_plan(cfg, 1, 1023)
    assert batch_plan(cfg, 1, 1024).steps_per_epoch == 1


@pytest.mark.parametrize("max_steps", [-1, 5])
@pytest.mark.parametrize("rows", [0, 1, 31])
def test_too_few_rows_never_make_a_run(rows: int, max_steps: int) -> None:
    for base in ({**SFT, "per_device_train_batch_size": 32}, {**GRPO, "rollout_batch_size": 32}):
        with pytest.raises(ConfigError, match="no optimiser step"):
            batch_plan(make_config({**base, "max_steps": max_steps}, env=MCA), 1, rows)


@pytest.mark.parametrize("rows", [32, 33, 63, 64, 1000])
@pytest.mark.parametrize("epochs", [0.01, 0.5, 1, 3])
def test_every_accepted_run_makes_a_step(rows: int, epochs: float) -> None:
    cfg = make_config({**SFT, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "num_train_epochs": epochs}, env=MCA)
    plan = batch_plan(cfg, 2, rows)
    assert plan.global_batch == 32 and plan.total_steps >= 1 and plan.steps_per_epoch == rows // 32
    assert plan.total_steps - 1 < epochs * plan.steps_per_epoch <= plan.total_steps


# ---- R11: the world size is compared with the layout only deep inside


def test_a_world_that_the_layout_does_not_divide() -> None:
    cfg = make_config({**SFT, "tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 2}, env=MCA)
    (error,) = layout_errors(cfg, 12)
    assert error.startswith("world size 12 is not a multiple of tensor 4 x pipeline 2 = 8")
    with pytest.raises(ConfigError, match="world size 12 is not a multiple"):
        batch_plan(cfg, 12, 100)
    assert layout_errors(cfg, 16) == [] and layout_errors(cfg, 8) == []
    assert layout_errors(cfg, 1) == ["world size 1 is not a multiple of tensor 4 x pipeline 2 = 8; set NPROC_PER_NODE=8"]
    assert batch_plan(cfg, 16, 100).data_parallel == 2


# ---- B1's kind: a rollout that the ranks cannot share


def test_a_mini_batch_that_leaves_a_rank_without_a_sequence() -> None:
    cfg = make_config({**GRPO, "rollout_batch_size": 2, "mini_batch_size": 1, "num_generations": 2}, env=MCA)
    with pytest.raises(ConfigError, match="1 prompts x 2 replies = 2 sequences, fewer than 4 data-parallel ranks"):
        batch_plan(cfg, 4, 10)
    assert batch_plan(cfg, 2, 10).data_parallel == 2


def test_rollout_arithmetic() -> None:
    values = {
        "rollout_batch_size": 8,
        "num_generations": 4,
        "mini_batch_size": 2,
        "updates_per_rollout": 3,
        "per_device_train_batch_size": 3,
    }
    plan = batch_plan(make_config({**GRPO, **values, "max_steps": 5}, env=MCA), 1, 20)
    assert (plan.global_batch, plan.samples, plan.optimizer_steps_per_step) == (8, 32, 12)
    assert (plan.accumulation, plan.steps_per_epoch, plan.total_steps, plan.total_optimizer_steps) == (3, 2, 5, 60)
