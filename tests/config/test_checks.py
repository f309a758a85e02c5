"""What must hold between keys: each contradiction gives one error, and the repaired file none."""

from __future__ import annotations

from typing import Any

import pytest

from rlmca.config import ConfigError, Environment, make_config

MCA = Environment(use_mca=True)
SFT: dict[str, Any] = {"model_name_or_path": "m", "dataset": "d", "output_dir": "o"}
GRPO: dict[str, Any] = {**SFT, "stage": "grpo", "rewards": "exact"}
DPO: dict[str, Any] = {**SFT, "stage": "dpo"}


def errors(values: dict[str, Any], env: Environment = MCA, command: str = "train") -> list[str]:
    try:
        make_config(values, env=env, command=command)
    except ConfigError as error:
        return error.errors
    return []


CONTRADICTIONS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({**SFT, "sequence_parallel": True}, {"tensor_model_parallel_size": 2}, "needs tensor_model_parallel_size above 1"),
    ({**SFT, "overlap_param_gather": True}, {"overlap_grad_reduce": True}, "needs use_distributed_optimizer"),
    ({**SFT, "recompute_granularity": "full", "recompute_num_layers": 2}, {"recompute_method": "uniform"}, "needs recompute_method"),
    ({**SFT, "recompute_modules": "mlp"}, {"recompute_granularity": "selective"}, "recompute_modules needs recompute_granularity"),
    ({**SFT, "recompute_granularity": "selective", "recompute_num_layers": 1}, {"recompute_num_layers": None}, "takes recompute_modules"),
    ({**SFT, "recompute_method": "block"}, {"recompute_method": None}, "recompute_method needs recompute_granularity"),
    ({**SFT, "eval_strategy": "steps"}, {"val_size": 0.1}, "no eval_dataset and no val_size"),
    ({**SFT, "do_eval": True}, {"eval_dataset": "e"}, "do_eval asks for evaluation"),
    ({**SFT, "eval_steps": 5, "val_size": 1}, {"eval_strategy": "steps"}, "eval_strategy is no by default"),
    ({**SFT, "val_size": 0.1, "eval_dataset": "e"}, {"val_size": 0}, "evaluation has one source"),
    ({**SFT, "val_size": 1.5}, {"val_size": 2}, "neither a share below 1 nor a whole number"),
    ({**SFT, "mask_history": True, "train_on_prompt": True}, {"mask_history": False}, "contradict each other"),
    ({**SFT, "eval_on_each_dataset": True}, {"eval_dataset": "e"}, "needs eval_dataset"),
    ({**SFT, "dataset": "a,b,a"}, {"dataset": "a,b"}, "a is named 2 times"),
    ({**SFT, "min_lr": 1e-3, "lr_scheduler_type": "cosine"}, {"min_lr": 1e-6}, "not below learning_rate"),
    (
        {**SFT, "min_lr": 1e-6, "lr_scheduler_type": "constant"},
        {"lr_scheduler_type": "cosine"},
        "has no meaning with lr_scheduler_type constant",
    ),
    ({**SFT, "lr_scheduler_type": "cosine_with_min_lr"}, {"min_lr": 1e-6}, "needs min_lr"),
    ({**SFT, "lr_scheduler_type": "warmup_stable_decay"}, {"lr_scheduler_kwargs": {"num_decay_steps": 3}}, "num_decay_steps"),
    ({**SFT, "max_steps": 0}, {"max_steps": 1}, "makes no optimiser step"),
    ({**SFT, "do_train": False}, {"do_train": True}, "rlmca-cli eval"),
    ({**SFT, "use_mca": False}, {"use_mca": True}, "USE_MCA=0"),
    ({**SFT, "resume_from_checkpoint": True, "overwrite_output_dir": True}, {"overwrite_output_dir": False}, "contradict each other"),
    (
        {**SFT, "load_best_model_at_end": True},
        {"eval_strategy": "epoch", "save_strategy": "epoch", "val_size": 1},
        "write the same for both",
    ),
    (
        {**SFT, "load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 20, "save_steps": 50, "val_size": 1},
        {"save_steps": 40},
        "not a multiple of eval_steps 20",
    ),
    ({**SFT, "metric_for_best_model": "accuracy"}, {"metric_for_best_model": "eval_loss"}, "write loss"),
    ({**SFT, "greater_is_better": True}, {"greater_is_better": False}, "the best loss is the lowest"),
    ({**SFT, "stop_value": 0.1}, {"eval_strategy": "epoch", "val_size": 1}, "stop_value needs evaluations"),
    ({**SFT, "stop_metric": "eval_loss"}, {"stop_value": 1, "eval_strategy": "epoch", "val_size": 1}, "needs stop_value"),
    ({**SFT, "kl_coef": 0.1}, {"kl_coef": None}, "kl_coef belongs to stage grpo"),
    ({**SFT, "pref_beta": 0.1}, {"stage": "dpo"}, "pref_beta belongs to stage dpo, and stage is sft"),
    ({**GRPO, "pref_loss": "ipo"}, {"pref_loss": None}, "pref_loss belongs to stage dpo, and stage is grpo"),
    ({**DPO, "pref_loss": "hinge", "dpo_label_smoothing": 0.1}, {"pref_loss": "sigmoid"}, "belongs to pref_loss sigmoid"),
    ({**DPO, "train_from_scratch": True}, {"ref_model": "r"}, "fresh random weights for its reference"),
    ({**DPO, "kl_coef": 0.1}, {"kl_coef": None}, "kl_coef belongs to stage grpo, and stage is dpo"),
    ({**DPO, "max_tokens_per_microbatch": 100, "cutoff_len": 64}, {"cutoff_len": 50}, "a pair of 2 x cutoff_len 64 = 128 tokens"),
    (
        {**DPO, "stop_value": 1, "stop_metric": "eval_accuracy", "eval_strategy": "epoch", "val_size": 1},
        {"stop_metric": "eval_rewards/accuracies"},
        "stage dpo has eval_rewards/accuracies",
    ),
    ({**GRPO, "num_generations": 1}, {"num_generations": 2}, "at least 2"),
    ({**GRPO, "rollout_batch_size": 10, "mini_batch_size": 4}, {"mini_batch_size": 5}, "10 is not a multiple of mini_batch_size 4"),
    ({**GRPO, "loss_agg_constant": 5}, {"loss_agg": "seq_mean_token_sum_norm"}, "belongs to loss_agg seq_mean_token_sum_norm"),
    ({**GRPO, "dual_clip": 1.1}, {"dual_clip": 3}, "inside the clip range"),
    ({**GRPO, "do_sample": False}, {"do_sample": True}, "stage grpo samples"),
    ({**GRPO, "val_size": 0.1}, {"val_size": None}, "val_size: stage grpo"),
    ({**GRPO, "rewards": []}, {"rewards": "math"}, "rewards is missing"),
    ({**GRPO, "temperature": 0}, {"temperature": 0.8}, "must be above 0"),
    ({**SFT, "additional_configs": {"tensor_model_parallel_size": 2}}, {"additional_configs": {}}, "at the top level"),
    ({**SFT, "additional_configs": {"calculate_per_token_loss": True}}, {"additional_configs": {"attention_dropout": 0.1}}, "inflates"),
    ({**SFT, "attention_dropout": 0.1}, {"attention_dropout": None}, "write it under additional_configs"),
    ({**SFT, "dataset": ""}, {"dataset": "d"}, "dataset is missing"),
]


@pytest.mark.parametrize(("wrong", "repair", "words"), CONTRADICTIONS, ids=[words for _, _, words in CONTRADICTIONS])
def test_a_contradiction_is_one_error_and_its_repair_none(wrong: dict[str, Any], repair: dict[str, Any], words: str) -> None:
    found = errors(wrong)
    assert len(found) == 1 and words in found[0], found
    repaired = {key: value for key, value in {**wrong, **repair}.items() if value is not None}
    assert errors(repaired) == []


def test_one_mistake_gives_one_error() -> None:
    """A check that reads a key which is already in error stays silent."""
    assert errors({**SFT, "sequence_parallel": True, "tensor_model_parallel_size": "two"}) == [
        "tensor_model_parallel_size: 'two' is not a number"
    ]
    assert errors({**SFT, "stage": "rm", "rollout_batch_size": 3}) == ["stage rm: not in this version; write pt, sft, dpo or grpo"]


@pytest.mark.parametrize(
    ("command", "values", "missing"),
    [
        ("train", {}, ["model_name_or_path", "dataset", "output_dir"]),
        ("train", {"stage": "grpo"}, ["model_name_or_path", "dataset", "output_dir", "rewards"]),
        ("eval", {}, ["model_name_or_path", "eval_dataset", "rewards"]),
        ("generate", {}, ["model_name_or_path", "output_dir", "eval_dataset"]),
        ("export", {}, ["model_name_or_path", "export_dir"]),
    ],
)
def test_each_command_asks_for_its_own_keys(command: str, values: dict[str, Any], missing: list[str]) -> None:
    assert [text.split(" is missing")[0] for text in errors(values, command=command)] == missing


def test_commands_without_training_need_no_engine_but_check_every_key() -> None:
    values = {"model_name_or_path": "m", "export_dir": "x", "tensor_model_parallel_size": 2}
    cfg = make_config(values, env=Environment(), command="export")
    assert cfg.engine == "none"
    assert errors({**values, "learning_rate": "abc", "lerning_rate": 1}, Environment(), "export") == [
        "learning_rate: 'abc' is not a number",
        "lerning_rate: unknown key, did you mean learning_rate?",
    ]


def test_supervised_evaluation_may_score_replies() -> None:
    scored = {**SFT, "rewards": "exact", "eval_dataset": "e", "eval_strategy": "steps", "max_new_tokens": 6, "temperature": 0.5}
    assert [note.split()[0] for note in make_config(scored, env=MCA).notes] == ["temperature"]
    train = make_config({**scored, "stop_value": 0.4, "stop_metric": "eval_accuracy"}, env=MCA).train
    assert (train.stop_metric, train.stop_value) == ("eval_accuracy", 0.4)
    assert make_config({**SFT, "stop_value": 1.5, "eval_strategy": "epoch", "val_size": 1}, env=MCA).train.stop_metric == "eval_loss"


def test_keys_without_effect_are_noted() -> None:
    cfg = make_config(
        {**SFT, "temperature": 0.5, "max_steps": 3, "num_train_epochs": 2, "overwrite_cache": True, "save_strategy": "no"}, env=MCA
    )
    assert [note.split()[0] for note in cfg.notes] == ["overwrite_cache", "temperature", "num_train_epochs"]
    cfg = make_config({**GRPO, "cutoff_len": 64, "ref_model": "r", "kl_coef": 0, "top_p": 0.9}, env=MCA)
    assert [note.split()[0] for note in cfg.notes] == ["cutoff_len", "ref_model", "top_p"]
    assert make_config(GRPO, env=MCA).notes == ()


def test_stage_dpo_says_which_keys_it_does_not_use() -> None:
    values = {**DPO, "pref_loss": "orpo", "ref_model": "r", "simpo_gamma": 1.0, "mask_history": True, "temperature": 0.5}
    notes = make_config(values, env=MCA).notes
    for name in ("ref_model", "simpo_gamma", "mask_history", "temperature"):
        assert [note for note in notes if note.startswith(f"{name} has no effect: ")], name
    assert make_config({**DPO, "ref_model": "r", "val_size": 0.1, "eval_strategy": "epoch"}, env=MCA).notes == ()


def test_a_resolved_file_of_stage_dpo_loads_to_itself() -> None:
    import yaml

    from rlmca.config import to_yaml

    cfg = make_config({**DPO, "ref_model": "r", "pref_loss": "simpo", "pref_beta": 2.0}, env=MCA)
    values = yaml.safe_load(to_yaml(cfg))
    assert (values["ref_model"], values["pref_beta"]) == ("r", 2.0) and make_config(values, env=MCA) == cfg
