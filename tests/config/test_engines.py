"""One file, two engines: which keys each takes, what it says about the others, and files that load back."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlmca.config import FOREIGN, ConfigError, Environment, load_config, make_config, to_yaml
from rlmca.config.engine_checks import HUGGINGFACE_ONLY, MEGATRON_ONLY, ON_MEGATRON

MCA, PLAIN = Environment(use_mca=True), Environment()
SFT: dict[str, Any] = {"model_name_or_path": "m", "dataset": "d", "output_dir": "o"}
GRPO: dict[str, Any] = {**SFT, "stage": "grpo", "rewards": "exact"}
OWN: dict[str, Any] = {
    "gradient_checkpointing": True,
    "gradient_checkpointing_kwargs": {"use_reentrant": False},
    "ddp_find_unused_parameters": True,
    "ddp_bucket_cap_mb": 50,
}


def errors(values: dict[str, Any], env: Environment, command: str = "train") -> list[str]:
    try:
        make_config(values, env=env, command=command)
    except ConfigError as error:
        return error.errors
    return []


@pytest.mark.parametrize("base", [SFT, GRPO], ids=["sft", "grpo"])
def test_the_environment_chooses_the_engine(base: dict[str, Any]) -> None:
    assert make_config(base, env=MCA).engine == "megatron"
    assert make_config(base, env=PLAIN).engine == "huggingface"
    assert make_config(base, env=PLAIN).notes == make_config(base, env=MCA).notes == ()
    assert errors({**base, "use_mca": True}, PLAIN) == ["use_mca: true and the environment disagree: set USE_MCA=1"]
    assert make_config({"model_name_or_path": "m", "export_dir": "x"}, env=PLAIN, command="export").engine == "none"


def test_megatron_keys_come_together_with_the_hint() -> None:
    values = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "overlap_param_gather": True, "additional_configs": {"x": 1}}
    assert errors({**SFT, **values, "learning_rate": "abc"}, PLAIN) == [
        "learning_rate: 'abc' is not a number",
        "tensor_model_parallel_size, sequence_parallel, overlap_param_gather, additional_configs: "
        "only the Megatron engine has these keys: set USE_MCA=1",
    ]


def test_keys_of_the_hugging_face_engine_say_what_megatron_has_instead() -> None:
    found = errors({**SFT, **OWN, "flash_attn": "sdpa"}, MCA)
    assert len(found) == len(OWN) + 1 and set(ON_MEGATRON) == set(HUGGINGFACE_ONLY) == set(OWN)
    for name, text in zip(OWN, found, strict=False):
        assert text.startswith(f"{name}: only the Hugging Face engine has this key, and USE_MCA=1 chooses Megatron; ")
    assert "write recompute_granularity: full" in found[0]
    assert found[-1].startswith("flash_attn: sdpa chooses a kernel of the Hugging Face engine") and found[-1].endswith("write auto")
    assert errors({**SFT, "recompute_granularity": "full"}, MCA) == [], "what the hint says is accepted as it stands"
    off = {"gradient_checkpointing": False, "gradient_checkpointing_kwargs": {}, "ddp_find_unused_parameters": False, "flash_attn": "auto"}
    assert errors({**SFT, **off}, MCA) == errors({**SFT, **off}, PLAIN) == errors({**SFT, **OWN}, PLAIN) == []


@pytest.mark.parametrize("command", ["eval", "export"])
def test_commands_without_training_take_the_files_of_both_engines(command: str) -> None:
    values = {**GRPO, "export_dir": "x", **OWN, "tensor_model_parallel_size": 2, "flash_attn": "sdpa"}
    assert errors(values, PLAIN, command) == errors(values, MCA, command) == []


@pytest.mark.parametrize(
    ("wrong", "repair", "words"),
    [
        (
            {"gradient_checkpointing_kwargs": {"use_reentrant": True}},
            {"gradient_checkpointing": True},
            "needs gradient_checkpointing: true",
        ),
        ({**OWN, "gradient_checkpointing_kwargs": {"preserve_rng_state": False}}, OWN, "kwargs.preserve_rng_state: not in this version"),
        ({**OWN, "gradient_checkpointing_kwargs": {"use_reentrant": "no"}}, OWN, "'no' is neither true nor false"),
        ({"flash_attn": "fa2"}, {"bf16": True}, "write bf16: true"),
        ({"flash_attn": "fa3"}, {"fp16": True}, "flash_attn: fa3 computes in 16 bits alone"),
        ({"flash_attn": "fa1"}, {"flash_attn": "disabled"}, "'fa1' is not one of auto, sdpa, disabled, fa2, fa3"),
        ({"ddp_bucket_cap_mb": 0}, {"ddp_bucket_cap_mb": 1}, "at least 1"),
        ({"deepspeed": "ds.json"}, {"deepspeed": None}, "DeepSpeed is not in this version"),
        ({"fp16": True, "bf16": True}, {"bf16": False}, "fp16 and bf16 exclude each other"),
        ({"attention_dropout": 0.1}, {"attention_dropout": None}, "takes dropout from the model's config.json"),
        ({"enable_liger_kernel": True}, {"enable_liger_kernel": False}, "Liger's kernels are not in this version"),
    ],
)
def test_a_contradiction_is_one_error_and_its_repair_none(wrong: dict[str, Any], repair: dict[str, Any], words: str) -> None:
    found = errors({**SFT, **wrong}, PLAIN)
    assert len(found) == 1 and words in found[0], found
    assert errors({**SFT, **wrong, **repair}, PLAIN) == []


@pytest.mark.parametrize("name", ["use_reentrant_gc", "disable_gradient_checkpointing", "ddp_broadcast_buffers"])
def test_what_has_no_effect_is_noted_on_both(name: str) -> None:
    for env in (PLAIN, MCA):
        assert [note.split()[0] for note in make_config({**SFT, name: True}, env=env).notes] == [name]


def test_no_sentence_speaks_as_if_there_were_one_engine() -> None:
    for foreign in FOREIGN.values():
        text = foreign.sentence(None)
        assert "kernels of the Hugging Face backend" not in text and "has another name on Megatron" not in text
        assert "Megatron ranks place" not in text and "the engine has Megatron's" not in text


@pytest.mark.parametrize("env", [PLAIN, MCA], ids=["huggingface", "megatron"])
@pytest.mark.parametrize("base", [SFT, GRPO], ids=["sft", "grpo"])
def test_the_resolved_file_loads_back_on_its_engine(env: Environment, base: dict[str, Any], tmp_path: Path) -> None:
    own = {"tensor_model_parallel_size": 2} if env.use_mca else {**OWN, "flash_attn": "fa2", "bf16": True}
    cfg = make_config({**base, **own}, env=env)
    (tmp_path / "config.yaml").write_text(to_yaml(cfg), encoding="utf-8")
    again = load_config(tmp_path / "config.yaml", env=env)
    assert again == cfg and to_yaml(again) == to_yaml(cfg)
    foreign = set(HUGGINGFACE_ONLY if env.use_mca else MEGATRON_ONLY)
    assert not [line for line in to_yaml(cfg).splitlines() if line.split(":")[0] in foreign]


def test_the_command_line_says_how_to_choose_megatron(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("model_name_or_path: m\ndataset: d\noutput_dir: o\ntensor_model_parallel_size: 2\n")
    command = [sys.executable, "-m", "rlmca.cli.main", "train", str(tmp_path / "x.yaml")]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=Path(__file__).parents[2], env={"PATH": "/usr/bin:/bin"}, timeout=300
    )
    assert done.returncode == 2 and "only the Megatron engine has this key: set USE_MCA=1" in done.stderr


@pytest.mark.parametrize("env", [PLAIN, MCA], ids=["huggingface", "megatron"])
@pytest.mark.parametrize(
    ("wrong", "repair", "words"),
    [
        ({"fp16": True, "bf16": True}, {"bf16": False}, "fp16 and bf16 exclude each other: leave one out"),
        ({"loss_scale_window": 7, "hysteresis": 1}, {"fp16": True}, "loss_scale_window, hysteresis: only float16 needs its loss scaled"),
        ({"loss_scale": 128, "bf16": True}, {"loss_scale": 0}, "loss_scale: only float16 needs its loss scaled: write fp16: true"),
        (
            {"fp16": True, "loss_scale": 128, "initial_loss_scale": 4},
            {"loss_scale": 0},
            "loss_scale: 128 is constant, and initial_loss_scale is for one that is found by itself",
        ),
        (
            {"fp16": True, "initial_loss_scale": 4, "min_loss_scale": 8},
            {"min_loss_scale": 2},
            "min_loss_scale: 8 is above initial_loss_scale 4",
        ),
        ({"fp16": True, "hysteresis": 0}, {"hysteresis": 1}, "at least 1"),
    ],
)
def test_float16_and_its_loss_scale(env: Environment, wrong: dict[str, Any], repair: dict[str, Any], words: str) -> None:
    found = errors({**SFT, **wrong}, env)
    assert len(found) == 1 and words in found[0], found
    assert errors({**SFT, **wrong, **repair}, env) == []


def test_a_resolved_file_in_float16_loads_back(tmp_path: Path) -> None:
    for own in ({"fp16": True, "loss_scale_window": 7}, {"fp16": True, "loss_scale": 128.0}, {}):
        cfg = make_config({**SFT, **own}, env=MCA)
        (tmp_path / "config.yaml").write_text(to_yaml(cfg), encoding="utf-8")
        assert load_config(tmp_path / "config.yaml", env=MCA) == cfg


@pytest.mark.parametrize("name", ["bias_dropout_fusion", "masked_softmax_fusion", "apply_rope_fusion", "cross_entropy_loss_fusion"])
def test_fusions_are_keys_of_megatron_at_the_top_level(name: str) -> None:
    assert errors({**SFT, name: True}, MCA) == []
    assert errors({**SFT, name: True}, PLAIN) == [f"{name}: only the Megatron engine has this key: set USE_MCA=1"]
    (error,) = errors({**SFT, "additional_configs": {name: True}}, MCA)
    assert error == f"additional_configs.{name} is a key of its own: write {name} at the top level"


def test_fused_attention_is_all_that_transformer_engine_has() -> None:
    wrong = {"masked_softmax_fusion": False, "transformer_impl": "transformer_engine"}
    (error,) = errors({**SFT, **wrong}, MCA)
    assert error.startswith("masked_softmax_fusion: false is for torch's attention") and "write transformer_impl: local" in error
    assert errors({**SFT, **wrong, "transformer_impl": "local"}, MCA) == errors({**SFT, "masked_softmax_fusion": False}, MCA) == []
    (error,) = errors({**SFT, "recompute_granularity": "selective", "recompute_modules": []}, MCA)
    assert error.startswith("recompute_modules is empty")
