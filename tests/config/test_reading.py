"""Files and overrides become values: YAML 1.2 scalars, duplicates, nesting, types."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlmca.config import ConfigError, Environment, RewardSpec, load_config, make_config, to_yaml
from rlmca.config.reading import apply_overrides, parse_yaml, read_file

MCA = Environment(use_mca=True)
SFT: dict[str, Any] = {"model_name_or_path": "m", "dataset": "d", "output_dir": "o"}
GRPO: dict[str, Any] = {**SFT, "stage": "grpo", "rewards": "exact"}


def only_error(values: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        make_config(values, env=MCA)
    assert len(caught.value.errors) == 1, caught.value.errors
    return caught.value.errors[0]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("5e-05", 5e-5),
        ("1.0e-5", 1e-5),
        ("-1E3", -1000.0),
        (".5", 0.5),
        ("1.", 1.0),
        ("+2", 2),
        ("010", 10),
        ("0x1F", 31),
        ("0o17", 15),
        ("no", "no"),
        ("yes", "yes"),
        ("on", "on"),
        ("True", True),
        ("~", None),
        ("", None),
        ("2024-01-01", "2024-01-01"),
        ("1:30", "1:30"),
        ("1_000", "1_000"),
        ("abc", "abc"),
        ("'1e-5'", "1e-5"),
        ("[a, 1e-3]", ["a", 1e-3]),
    ],
)
def test_scalars_follow_yaml_1_2(text: str, value: Any) -> None:
    found, problems = parse_yaml(text, "here")
    assert problems == [] and found == value and type(found) is type(value)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_way_python_writes_a_float_is_read_as_that_float(value: float) -> None:
    assert parse_yaml(repr(value), "here") == (value, [])


def test_duplicate_keys_are_named_with_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("seed: 1\nadditional_configs: {a: 1, a: 2}\nseed: 2\n")
    _, problems = read_file(path)
    assert len(problems) == 2
    assert any("seed is written twice, in line 1 and in line 3" in p for p in problems)
    assert any("a is written twice, in line 2 and in line 2" in p for p in problems)


def test_json_is_read_and_its_duplicates_are_errors(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps({**SFT, "learning_rate": 1e-5}))
    assert load_config(path, env=MCA).train.learning_rate == 1e-5
    path.write_text('{"seed": 1, "seed": 2}')
    assert read_file(path)[1] == [f"{path}: seed is written twice: keep one"]


@pytest.mark.parametrize("text", ["a: [1", "a: b: c", "\t- x", "- 1\n- 2", "{", "!!python/object:os.system x"])
def test_what_is_no_set_of_keys_is_one_clear_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_file(path)
    assert len(caught.value.errors) == 1 and str(path) in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: there is no such file"):
        load_config(tmp_path / "nowhere.yaml", env=MCA)


def test_overrides_win_and_reach_into_dicts_and_lists() -> None:
    values: dict[str, Any] = {"seed": 1, "rewards": [{"name": "math"}], "additional_configs": None}
    problems = apply_overrides(
        values,
        ["seed=2", "seed=3", "additional_configs.attention_dropout=0.1", "rewards.0.weight=2", "rewards.0.options.a.b=1e-5", "stop=[a, b]"],
    )
    assert problems == []
    assert values == {
        "seed": 3,
        "additional_configs": {"attention_dropout": 0.1},
        "rewards": [{"name": "math", "weight": 2, "options": {"a": {"b": 1e-5}}}],
        "stop": ["a", "b"],
    }


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("seed", "write key=value"),
        ("=3", "write key=value"),
        ("rewards.3.weight=1", "list of 1"),
        ("seed.x=1", "which has no parts"),
        ("seed=[1", "not valid YAML"),
    ],
)
def test_a_wrong_override_is_named(override: str, words: str) -> None:
    problems = apply_overrides({"seed": 1, "rewards": [{"name": "math"}]}, [override])
    assert len(problems) == 1 and words in problems[0]


@pytest.mark.parametrize(
    ("key", "value", "result"),
    [
        ("bf16", "true", True),
        ("bf16", "No", False),
        ("bf16", 1, True),
        ("num_train_epochs", 2, 2.0),
        ("max_steps", "-1", -1),
        ("max_steps", 8.0, 8),
        ("max_steps", "1e2", 100),
        ("learning_rate", "5e-05", 5e-5),
        ("run_name", 2024, "2024"),
        ("report_to", "none", []),
        ("report_to", "tensorboard, wandb", ["tensorboard", "wandb"]),
        ("save_total_limit", None, None),
        ("resume_from_checkpoint", True, "auto"),
        ("resume_from_checkpoint", "false", None),
        ("resume_from_checkpoint", "out/checkpoint-3", "out/checkpoint-3"),
    ],
)
def test_values_take_the_type_of_their_key(key: str, value: Any, result: Any) -> None:
    made = getattr(make_config({**SFT, key: value}, env=MCA).train, key)
    assert made == result and type(made) is type(result)


def test_a_comma_list_is_split_but_a_stop_text_is_not() -> None:
    cfg = make_config({**GRPO, "dataset": "a, b,", "stop": "Therefore, "}, env=MCA)
    assert cfg.data.dataset == ["a", "b"] and cfg.generation.stop == ["Therefore, "]


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("learning_rate", "abc", "learning_rate: 'abc' is not a number"),
        ("learning_rate", True, "learning_rate: True is not a number"),
        ("learning_rate", float("nan"), "learning_rate: nan is not a finite number"),
        ("learning_rate", -1e-5, "learning_rate: -1e-05 is too small: at least 0"),
        ("max_steps", 1.5, "max_steps: 1.5 is not a whole number"),
        ("max_steps", True, "max_steps: True is not a number"),
        ("bf16", "maybe", "bf16: 'maybe' is neither true nor false"),
        ("seed", None, "seed: has no value"),
        ("save_strategy", "often", "save_strategy: 'often' is not one of no, steps, epoch"),
        ("save_steps", 0.1, "save_steps: 0.1 as a share of the run is not in this version"),
        ("adam_beta1", 1.0, "adam_beta1: 1.0 is too large: it must be below 1"),
        ("report_to", "wandbb", "report_to: 'wandbb' is not one of"),
        ("output_dir", ["a"], "output_dir: expected text"),
        ("additional_configs", "x", "additional_configs: expected `name: value` pairs"),
        ("warmup_ratio", 1.0, "warmup_ratio: 1.0 is too large"),
    ],
)
def test_a_value_that_does_not_fit_names_its_key(key: str, value: Any, words: str) -> None:
    assert words in only_error({**SFT, key: value})


def test_warmup_steps_below_one_is_a_share() -> None:
    train = make_config({**SFT, "warmup_steps": 0.1}, env=MCA).train
    assert (train.warmup_steps, train.warmup_ratio) == (0, 0.1)
    assert "leave one out" in only_error({**SFT, "warmup_steps": 0.1, "warmup_ratio": 0.2})
    assert "leave one out" in only_error({**SFT, "warmup_ratio": 0.2, "warmup_steps": 0.1})
    assert "leave one out" in only_error({**SFT, "warmup_ratio": 0.2, "warmup_steps": 10})


def test_rewards_in_every_form() -> None:
    assert make_config({**GRPO, "rewards": "math,my/file.py:score"}, env=MCA).rewards.rewards == [
        RewardSpec("math"),
        RewardSpec("my/file.py:score"),
    ]
    long = [{"name": "format", "weight": 0.5, "options": {"tags": ["think"]}}, "exact"]
    assert make_config({**GRPO, "rewards": long}, env=MCA).rewards.rewards == [
        RewardSpec("format", 0.5, {"tags": ["think"]}),
        RewardSpec("exact"),
    ]


@pytest.mark.parametrize(
    ("rewards", "words"),
    [
        ([{"name": "math", "wieght": 2}], "did you mean weight"),
        ([{"name": "math", "tolerance": 2}], "go under options"),
        ([{"weight": 2}], "write a name"),
        ([{"name": "math", "weight": "x"}], "reward math: weight 'x' is not a number"),
        ("maht", "there is no reward maht; did you mean math?"),
        ([3], "write a name"),
    ],
)
def test_a_wrong_reward_is_named(rewards: Any, words: str) -> None:
    assert words in only_error({**GRPO, "rewards": rewards})


def test_the_same_key_under_two_names() -> None:
    assert only_error({**SFT, "eval_strategy": "no", "evaluation_strategy": "no"}) == (
        "eval_strategy and evaluation_strategy are the same key: leave one out"
    )


TEXTS = ["1e-5", "no", "yes", "null", "0x1", "010", "a: b", "# x", "ü, 日本", "'", '"', "{}", "", " x ", "<<", "~", "2024-01-01", "1:30"]


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_the_round_trip(tmp_path: Path, text: str) -> None:
    values = {**GRPO, "stop": [text], "default_system": text or None, "additional_configs": {"x": text}}
    cfg = make_config(values, env=MCA)
    (tmp_path / "config.yaml").write_text(to_yaml(cfg), encoding="utf-8")
    assert load_config(tmp_path / "config.yaml", env=MCA) == cfg


@pytest.mark.parametrize(
    "values",
    [
        SFT,
        {**SFT, "warmup_steps": 0.03, "learning_rate": 1e-5, "eval_strategy": "steps", "val_size": 0.1, "resume_from_checkpoint": True},
        {
            **SFT,
            "tensor_model_parallel_size": 2,
            "sequence_parallel": True,
            "recompute_granularity": "selective",
            "recompute_modules": "mlp",
        },
        GRPO,
        {**GRPO, "policy_loss": "ppo", "rollout_engine": "torch", "ref_model": "r", "mini_batch_size": 8, "seed": 7},
        {**GRPO, "loss_agg": "seq_mean_token_sum_norm", "rewards": [{"name": "math", "weight": 2, "options": {"a": [1, {"b": None}]}}]},
    ],
)
def test_the_resolved_file_loads_back_to_the_same_configuration(tmp_path: Path, values: dict[str, Any]) -> None:
    cfg = make_config(values, env=MCA)
    (tmp_path / "config.yaml").write_text(to_yaml(cfg), encoding="utf-8")
    again = load_config(tmp_path / "config.yaml", env=MCA)
    assert again == cfg
    assert to_yaml(again) == to_yaml(cfg)


def test_no_secret_is_printed_or_written() -> None:
    cfg = make_config(
        {
            **GRPO,
            "hf_hub_token": "hf_SECRET",
            "rewards": [
                {
                    "name": "a.py:f",
                    "options": {"api_key": "SECRET", "OPENAI-API-KEY": "SECRET", "headers": {"Authorization": "SECRET"}, "max_tokens": 3},
                }
            ],
        },
        env=MCA,
    )
    text = to_yaml(cfg)
    assert "SECRET" not in text and "max_tokens: 3" in text
    assert "hf_SECRET" not in repr(cfg.model) and cfg.model.hf_hub_token == "hf_SECRET"


def test_defaults_that_follow_from_other_keys() -> None:
    cfg = make_config({**GRPO, "policy_loss": "ppo", "rollout_batch_size": 16, "seed": 5}, env=MCA)
    assert (cfg.rl.loss_agg, cfg.rl.mini_batch_size, cfg.data.data_seed) == ("token_mean", 16, 5)
    cfg = make_config({**GRPO, "policy_loss": "ppo", "loss_agg": "seq_mean_token_sum_norm", "max_new_tokens": 6}, env=MCA)
    assert (cfg.rl.loss_agg, cfg.rl.loss_agg_constant) == ("seq_mean_token_sum_norm", 6.0)
    assert make_config({**SFT, "eval_strategy": "steps", "val_size": 2, "logging_steps": 7}, env=MCA).train.eval_steps == 7
