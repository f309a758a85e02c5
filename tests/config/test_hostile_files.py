"""Files that are odd on purpose: control characters, anchors, secrets in the wrong place, YAML of LLaMA-Factory as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlmca.config import ConfigError, Environment, load_config, make_config

MCA = Environment(use_mca=True)
GOOD = "model_name_or_path: m\ndataset: d\noutput_dir: o\n"


def errors(folder: Path, text: str, *overrides: str) -> list[str]:
    (folder / "x.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_config(folder / "x.yaml", overrides, env=MCA)
    return caught.value.errors


@pytest.mark.parametrize(("character", "name"), [("\x07", "U+0007"), ("\x00", "U+0000"), ("\x1b", "U+001B"), ("\ufffe", "U+FFFE")])
def test_a_character_that_yaml_forbids_is_an_error_with_its_place(tmp_path: Path, character: str, name: str) -> None:
    (error,) = errors(tmp_path, GOOD + f"run_name: a{character}b\n")
    assert "line 4" in error and name in error
    found = errors(tmp_path, GOOD, f"run_name=a{character}b", "learning_rte=1")
    assert len(found) == 2 and name in found[0] and "learning_rte" in found[1]


def test_an_override_reaches_one_of_two_keys_that_share_an_anchor(tmp_path: Path) -> None:
    text = "model_name_or_path: m\ndataset: &d [a]\neval_dataset: *d\noutput_dir: o\neval_strategy: steps\n"
    (tmp_path / "x.yaml").write_text(text)
    cfg = load_config(tmp_path / "x.yaml", ["dataset.0=b"], env=MCA)
    assert (cfg.data.dataset, cfg.data.eval_dataset) == (["b"], ["a"])
    text = GOOD + "stage: grpo\nrewards:\n- &r {name: exact, options: {}}\n- *r\n"
    (tmp_path / "x.yaml").write_text(text)
    cfg = load_config(tmp_path / "x.yaml", ["rewards.1.name=format", "rewards.1.weight=2"], env=MCA)
    assert [(spec.name, spec.weight) for spec in cfg.rewards.rewards] == [("exact", 1.0), ("format", 2.0)]


@pytest.mark.parametrize("value", ["&a {x: *a}", "&a [1, [*a]]"])
def test_an_anchor_that_contains_itself_is_an_error(tmp_path: Path, value: str) -> None:
    (error,) = errors(tmp_path, GOOD + f"lr_scheduler_kwargs: {value}\n")
    assert "contains itself" in error


def test_merged_mappings_are_not_taken_for_keys_written_twice(tmp_path: Path) -> None:
    text = GOOD + "lr_scheduler_kwargs:\n  a: {b: &b {<<: &z {power: 1}, power: 2}}\n  c: {<<: *b}\n"
    (tmp_path / "x.yaml").write_text(text)
    cfg = load_config(tmp_path / "x.yaml", env=MCA)
    assert cfg.train.lr_scheduler_kwargs == {"a": {"b": {"power": 2}}, "c": {"power": 2}}
    (error,) = errors(tmp_path, GOOD + "lr_scheduler_kwargs: {a: 1, a: 2}\n")
    assert "a is written twice" in error


def test_a_secret_is_not_repeated_in_an_error() -> None:
    for value in (["hf_abc"], {"a": "hf_abc"}):
        with pytest.raises(ConfigError) as caught:
            make_config({"model_name_or_path": "m", "dataset": "d", "output_dir": "o", "hf_hub_token": value}, env=MCA)
        assert "hf_hub_token" in str(caught.value) and "hf_abc" not in str(caught.value)


def test_half_a_surrogate_pair_and_a_seed_that_no_generator_takes_are_errors() -> None:
    with pytest.raises(ConfigError) as caught:
        make_config({"model_name_or_path": "m", "dataset": "d", "output_dir": "o\ud800", "seed": 2**32, "data_seed": 10**30}, env=MCA)
    assert [error.split(":")[0] for error in caught.value.errors][:3] == ["output_dir", "seed", "data_seed"]
    str(caught.value).encode()


QWEN3_MOE = """
model_name_or_path: Qwen/Qwen3-30B-A3B-Instruct-2507
do_train: true
stage: sft
finetuning_type: full # only support full for now
dataset: alpaca_en_demo
preprocessing_num_workers: 8
cutoff_len: 4096
template: qwen3_nothink
output_dir: saves/mca/qwen3_moe_full
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
num_train_epochs: 2
learning_rate: 3e-6
logging_steps: 1
save_steps: 100
lr_scheduler_type: constant
bf16: true
tensor_model_parallel_size: 1
sequence_parallel: false
pipeline_model_parallel_size: 4
bias_activation_fusion: true
apply_rope_fusion: true
use_distributed_optimizer: true
overlap_param_gather: true
overlap_grad_reduce: true
moe_grouped_gemm: true
moe_token_dispatcher_type: alltoall
expert_model_parallel_size: 2
recompute_granularity: full
"""
LLAMA3_FULL = """
model_name_or_path: meta-llama/Meta-Llama-3-8B-Instruct
trust_remote_code: true
stage: sft
do_train: true
finetuning_type: full
deepspeed: examples/deepspeed/ds_z3_config.json
dataset: identity,alpaca_en_demo
template: llama3
cutoff_len: 2048
max_samples: 1000
preprocessing_num_workers: 16
dataloader_num_workers: 4
output_dir: saves/llama3-8b/full/sft
logging_steps: 10
save_steps: 500
plot_loss: true
overwrite_output_dir: true
save_only_model: false
report_to: none
per_device_train_batch_size: 1
gradient_accumulation_steps: 2
learning_rate: 1.0e-5
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
ddp_timeout: 180000000
resume_from_checkpoint: null
"""
LLAMA3_PT = (
    LLAMA3_FULL.replace("stage: sft", "stage: pt")
    .replace("finetuning_type: full", "finetuning_type: lora\nlora_rank: 8\nlora_target: all")
    .replace("dataset: identity,alpaca_en_demo\ntemplate: llama3", "dataset: c4_demo\nstreaming: false")
    .replace("deepspeed: examples/deepspeed/ds_z3_config.json\n", "")
)


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        (QWEN3_MOE, []),
        (LLAMA3_FULL, ["deepspeed"]),
        (LLAMA3_PT, []),
    ],
)
def test_llama_factorys_examples_are_taken_but_for_what_is_refused_by_name(tmp_path: Path, text: str, refused: list[str]) -> None:
    assert sorted(error.split(":")[0] for error in (errors(tmp_path, text) if refused else [])) == refused
    kept = "\n".join(line for line in text.splitlines() if line.split(":")[0] not in refused)
    (tmp_path / "x.yaml").write_text(kept)
    cfg = load_config(tmp_path / "x.yaml", env=MCA)
    if text == QWEN3_MOE:
        # mcore_adapter recomputes every layer when only the granularity is set
        assert (cfg.megatron.recompute_method, cfg.megatron.recompute_num_layers) == ("uniform", 1)


ALWAYS_ON = [
    "use_fast_tokenizer",
    "use_kv_cache",
    "ignore_pad_token_for_loss",
    "skip_special_tokens",
    "average_tokens_across_devices",
    "colocate",
]


@pytest.mark.parametrize("key", ALWAYS_ON)
def test_a_switch_that_is_always_on_is_not_taken_as_off(key: str) -> None:
    values = {"model_name_or_path": "m", "dataset": "d", "output_dir": "o"}
    make_config({**values, key: True}, env=MCA)
    for off in (False, "false"):
        with pytest.raises(ConfigError) as caught:
            make_config({**values, key: off}, env=MCA)
        assert [error.split(":")[0] for error in caught.value.errors] == [key]
