"""Presets of `rl_algorithm`: the specification's table, what overrides them, what contradicts, what config.yaml keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlmca.config import ConfigError, Environment, RunConfig, keys, load_config, make_config, to_yaml
from rlmca.config.presets import PRESETS

MCA = Environment(use_mca=True)
GRPO: dict[str, Any] = {"stage": "grpo", "model_name_or_path": "m", "dataset": "d", "output_dir": "o", "rewards": "exact"}
RATIO = ("grpo", "ppo")


def config(**values: Any) -> RunConfig:
    return make_config({**GRPO, **values}, env=MCA)


def errors(**values: Any) -> list[str]:
    try:
        config(**values)
    except ConfigError as error:
        return error.errors
    return []


# advantage (std, eps), loss, aggregation, clip low/high, KL (coef, in, estimator), updates: the table of the specification
TABLE: dict[str, tuple[Any, ...]] = {
    "grpo": ("grpo", "sample", 1e-6, RATIO, "seq_mean_token_mean", 0.2, 0.2, 0.001, "loss", "k3"),
    "dapo": ("grpo", "sample", 1e-6, RATIO, "token_mean", 0.2, 0.28, 0, None, None),
    "dr_grpo": ("dr_grpo", "none", None, RATIO, "seq_mean_token_sum_norm", 0.2, 0.2, 0, None, None),
    "cispo": ("grpo", "population", 1e-4, ("cispo",), "seq_mean_token_mean", None, None, 0.1, "loss", "k3"),
    "gspo": ("grpo", "sample", 1e-6, ("gspo",), "seq_mean_token_mean", 3e-4, 4e-4, 0, None, None),
    "gspo_token": ("grpo", "sample", 1e-6, ("gspo_token",), "seq_mean_token_mean", 3e-4, 4e-4, 0, None, None),
    "rloo": ("rloo", "none", None, ("reinforce",), "seq_mean_token_sum", None, None, 0.05, "reward", "k1"),
    "reinforce_plus_plus": ("reinforce_plus_plus", "none", None, RATIO, "token_mean", 0.2, 0.2, 0.01, "reward", "k1"),
    "reinforce_plus_plus_baseline": ("reinforce_plus_plus_baseline", "none", None, RATIO, "token_mean", 0.2, 0.2, 0.01, "loss", "k2"),
    "nemotron_grpo": ("grpo", "sample", 1e-6, ("reinforce",), "token_mean", None, None, 0, None, None),
}


@pytest.mark.parametrize("name", TABLE)
def test_a_preset_is_the_row_of_the_specification(name: str) -> None:
    advantage, std, eps, losses, agg, low, high, coef, where, estimator = TABLE[name]
    rl = config(rl_algorithm=name).rl
    assert (rl.advantage, rl.advantage_std, rl.loss_agg) == (advantage, std, agg)
    assert rl.policy_loss in losses and (rl.clip_ratio_low, rl.clip_ratio_high, rl.kl_coef) == (low, high, coef)
    assert eps is None or rl.advantage_eps == eps
    assert where is None or (rl.kl_in, rl.kl_estimator) == (where, estimator)
    assert rl.cispo_cap == (5.0 if name == "cispo" else None)
    assert rl.loss_agg_constant == (512 if name == "dr_grpo" else None)
    assert rl.updates_per_step == rl.updates_per_rollout == 1
    assert (rl.kl_target, rl.early_stop_kl, rl.advantage_clip, rl.dual_clip) == (None,) * 4
    assert rl.old_logp == "trainer" and rl.rollout_correction == "none" and config(rl_algorithm=name).notes == ()


def test_dapo_gathers_and_shapes_as_its_paper() -> None:
    cfg = config(rl_algorithm="dapo", max_new_tokens=20480)
    assert cfg.gathering.dynamic_sampling and cfg.gathering.overlong_buffer == 4096 and cfg.gathering.overlong_penalty == 1.0
    kept = config(rl_algorithm="dapo", dynamic_sampling=False, overlong_buffer=0).gathering
    assert not kept.dynamic_sampling and kept.overlong_buffer == 0
    assert set(PRESETS["dapo"].keys) <= set(keys()), "a preset sets keys that there are"
    for name in TABLE:
        if name != "dapo":
            assert config(rl_algorithm=name).gathering == config().gathering and not config().gathering.dynamic_sampling


def test_every_preset_is_in_the_table_and_ppo_is_refused() -> None:
    assert set(PRESETS) == set(TABLE)
    for name, value in (("rl_algorithm", "ppo"), ("advantage", "gae")):
        (found,) = errors(**{name: value})
        assert f"{value}: not in this version; write grpo" in found


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"rl_algorithm": "dapo", "clip_ratio_high": 0.3}, {"clip_ratio_high": 0.3, "clip_ratio_low": 0.2, "loss_agg": "token_mean"}),
        ({"rl_algorithm": "cispo", "clip_ratio_high": 0.3}, {"clip_ratio_high": 0.3, "cispo_cap": None}),
        ({"rl_algorithm": "cispo", "cispo_cap": 2}, {"cispo_cap": 2.0}),
        ({"rl_algorithm": "cispo", "cispo_cap": None}, {"cispo_cap": 5.0}),
        ({"policy_loss": "gspo"}, {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4, "loss_agg": "seq_mean_token_mean", "kl_coef": 0.001}),
        ({"policy_loss": "ppo"}, {"loss_agg": "token_mean", "clip_ratio_high": 0.2}),
        ({"rl_algorithm": "dapo", "policy_loss": "grpo"}, {"loss_agg": "seq_mean_token_mean", "clip_ratio_high": 0.28}),
        ({"policy_loss": "reinforce", "kl_coef": 0}, {"clip_ratio_low": None, "loss_agg": "token_mean"}),
        ({"advantage": "rloo"}, {"advantage_std": "none", "policy_loss": "grpo"}),
        ({"rl_algorithm": "rloo", "advantage": "grpo"}, {"advantage_std": "sample"}),
        ({"kl_in": "reward"}, {"kl_estimator": "k1"}),
        ({"rl_algorithm": "reinforce_plus_plus", "kl_in": "loss"}, {"kl_estimator": "k3"}),
        ({"rollout_correction": "tis"}, {"rollout_correction_cap": 2.0, "rollout_correction_range": []}),
        ({"rollout_correction": "icepop_sequence"}, {"rollout_correction_cap": None, "rollout_correction_range": [0.5, 2.0]}),
        ({"rollout_correction": "icepop", "rollout_correction_range": "0.8,1.25"}, {"rollout_correction_range": [0.8, 1.25]}),
        ({"rl_algorithm": "dr_grpo", "max_new_tokens": 77}, {"loss_agg_constant": 77.0}),
        ({"rl_algorithm": "dr_grpo", "loss_agg_constant": 9}, {"loss_agg_constant": 9.0}),
    ],
)
def test_what_is_given_wins_and_brings_its_own_defaults(given: dict[str, Any], expected: dict[str, Any], tmp_path: Path) -> None:
    cfg = config(**given)
    assert {name: getattr(cfg.rl, name) for name in expected} == expected
    reloaded(cfg, tmp_path)


@pytest.mark.parametrize("name", TABLE)
def test_config_yaml_of_a_preset_is_the_same_run(name: str, tmp_path: Path) -> None:
    cfg = config(rl_algorithm=name, max_new_tokens=40, kl_target=0.1 if TABLE[name][7] else None)
    text = to_yaml(cfg)
    assert f"advantage: {cfg.rl.advantage}\n" in text and f"policy_loss: {cfg.rl.policy_loss}\n" in text
    given = {note.split()[0] for note in reloaded(cfg, tmp_path).notes}
    assert not given & set(PRESETS[name].keys), "what a preset set has no effect in its own config.yaml"


def reloaded(cfg: RunConfig, folder: Path) -> RunConfig:
    (folder / "config.yaml").write_text(to_yaml(cfg), encoding="utf-8")
    again = load_config(folder / "config.yaml", env=MCA)
    assert again == cfg and to_yaml(again) == to_yaml(cfg)
    return again


def test_a_preset_has_no_say_in_supervised_training() -> None:
    cfg = make_config({key: value for key, value in GRPO.items() if key not in ("stage", "rewards")}, env=MCA)
    assert "rl_algorithm" not in to_yaml(cfg)


CONTRADICTIONS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"rl_algorithm": "nemotron_grpo", "updates_per_rollout": 2}, {"updates_per_rollout": 1}, "nemotron_grpo takes the ratio as 1"),
    ({"rl_algorithm": "nemotron_grpo", "kl_coef": 0.1}, {"kl_coef": 0}, "nemotron_grpo keeps no reference"),
    ({"rl_algorithm": "rloo", "mini_batch_size": 8}, {"policy_loss": "ppo"}, "policy_loss: reinforce takes the ratio as 1"),
    ({"rl_algorithm": "rloo", "clip_ratio_low": 0.2}, {"clip_ratio_low": None}, "no ratio to clip"),
    ({"rl_algorithm": "rloo", "kl_in": "loss"}, {"kl_coef": 0}, "policy gradient alone"),
    ({"kl_estimator": "k1"}, {"kl_in": "reward"}, "its gradient is not that of the KL"),
    ({"kl_estimator": "abs"}, {"kl_in": "reward"}, "its gradient is not that of the KL"),
    ({"rl_algorithm": "dapo", "kl_target": 0.1}, {"kl_coef": 0.01}, "write its start above 0"),
    ({"rl_algorithm": "gspo", "dual_clip": 3}, {"policy_loss": "ppo"}, "dual_clip belongs to policy_loss ppo or grpo"),
    ({"cispo_cap": 5}, {"policy_loss": "cispo"}, "cispo_cap belongs to policy_loss cispo"),
    ({"rl_algorithm": "cispo", "cispo_cap": 5, "clip_ratio_high": 0.2}, {"cispo_cap": None}, "one absolute, one relative to 1"),
    ({"rollout_correction": "tis", "old_logp": "rollout"}, {"old_logp": "trainer"}, "takes one for the other"),
    ({"rollout_correction_cap": 3}, {"rollout_correction": "tis_sequence"}, "belongs to rollout_correction tis"),
    ({"rollout_correction": "tis", "rollout_correction_range": [0.1, 2]}, {"rollout_correction": "icepop"}, "rollout_correction is tis"),
    ({"rollout_correction": "icepop", "rollout_correction_range": [2, 0.5]}, {"rollout_correction_range": [0.5, 2]}, "low below high"),
    ({"gamma": 0.9}, {"rl_algorithm": "reinforce_plus_plus"}, "gamma belongs to advantage: reinforce_plus_plus"),
    ({"rl_algorithm": "dr_grpo", "advantage_std": "sample"}, {"advantage": "grpo"}, "advantage_std: sample belongs to advantage: grpo"),
    ({"num_generations": 1}, {"rl_algorithm": "reinforce_plus_plus"}, "gives every reply advantage 0"),
    (
        {"rl_algorithm": "reinforce_plus_plus", "drop_zero_std_groups": True, "kl_coef": 0},
        {"drop_zero_std_groups": False},
        "whitens over all replies",
    ),
    ({"rl_algorithm": "reinforce_plus_plus_baseline", "drop_zero_std_groups": True}, {"drop_zero_std_groups": False}, "whitens over all"),
    ({"kl_in": "reward", "drop_zero_std_groups": True}, {"kl_in": "loss"}, "still differ in the KL"),
]


@pytest.mark.parametrize(("wrong", "repair", "words"), CONTRADICTIONS, ids=[f"{n}-{w}" for n, (_, _, w) in enumerate(CONTRADICTIONS)])
def test_a_contradiction_is_one_error_and_its_repair_none(wrong: dict[str, Any], repair: dict[str, Any], words: str) -> None:
    found = errors(**wrong)
    assert len(found) == 1 and words in found[0], found
    assert errors(**{**wrong, **repair}) == []


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"early_stop_kl": 0.1}, "early_stop_kl has no effect"),
        ({"rl_algorithm": "dr_grpo", "advantage_eps": 1e-4}, "advantage_eps has no effect"),
        ({"kl_coef": 0, "kl_in": "reward"}, "kl_in has no effect: kl_coef is 0"),
        ({"rl_algorithm": "nemotron_grpo", "old_logp": "rollout"}, "old_logp has no effect"),
    ],
)
def test_keys_without_effect_are_noted(given: dict[str, Any], words: str) -> None:
    assert [note for note in config(**given).notes if words in note]
    assert config(early_stop_kl=0.1, updates_per_rollout=2).notes == ()


def test_the_page_of_algorithms_has_the_table_of_presets() -> None:
    text = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text(encoding="utf-8")
    lines = [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| ")]
    head = next(line for line in lines if line[0] == "preset")
    rows = {line[0]: dict(zip(head[1:], line[1:], strict=True)) for line in lines if line[0] in PRESETS and len(line) == len(head)}
    assert list(rows) == list(PRESETS)
    for name, row in rows.items():
        keys = dict(PRESETS[name].keys)
        assert keys.pop("dynamic_sampling", False) is (name == "dapo") is (PRESETS[name].overlong_share is not None)
        for key, cell in row.items():
            value = keys.pop(key, None)
            assert (float(cell) if cell and isinstance(value, float) else cell or None) == value, f"{name}: {key}"
        assert not keys, f"{name}: {sorted(keys)} are not in the table"
        assert PRESETS[name].paper.split("arXiv ")[1].split(",")[0] in text
