"""Adapters of the Hugging Face engine over data-parallel ranks, and their checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlmca.algorithms.losses import SftLoss
from rlmca.transfer.hf_folder import HFFolderError
from tests.helpers.engine import Layout, assert_same_numbers, make_engine, random_batch
from tests.helpers.huggingface import make_hf_engine
from tests.helpers.huggingface_lora import (
    adapter_gradients_on_rank,
    adapter_steps_on_rank,
    copies,
    lora_options,
    peft_reference,
    plain_peft,
    same_bits,
    start_folder,
)
from tests.helpers.models import save_model
from tests.helpers.ranks import rank_pool

pytestmark = pytest.mark.serial


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("qwen3_tied", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return start_folder(tmp_path_factory.mktemp("adapter") / "a", "qwen3_tied")


@pytest.mark.parametrize(
    "settings",
    [
        {"micro_batch": 3},
        {"gradient_checkpointing": True},
        {"gradient_checkpointing": True, "use_reentrant": True},
        {"packing": True, "max_tokens_per_microbatch": 20, "find_unused_parameters": True},
        {"micro_batch": 50},
    ],
    ids=["plain", "checkpointing", "reentrant", "packed_unused", "one_micro_batch"],
)
def test_gradients_on_two_ranks_are_those_of_one(settings: dict[str, Any], folder: Path, adapter: Path) -> None:
    ranks = rank_pool(2).run(
        adapter_gradients_on_rank, folder, {"dp": 2, **settings, "lora": lora_options(start=adapter)}, random_batch(rows=7)
    )
    theirs = peft_reference(plain_peft("qwen3_tied", adapter), random_batch(rows=7))
    for rank in ranks:
        assert_same_numbers(rank, theirs)
        assert same_bits(rank["gradients"], ranks[0]["gradients"]), "ranks must step alike"


def test_steps_on_two_ranks_equal_those_on_one(folder: Path) -> None:
    """Also with log-probs of the base between steps, see the helper; the base stays where it was on both."""
    batches, rates = [random_batch(rows=7, seed=step) for step in range(5)], [1e-2] * 5
    settings = {"lora": lora_options(seed=3)}
    one = adapter_steps_on_rank(folder, settings, batches, rates)
    two = rank_pool(2).run(adapter_steps_on_rank, folder, {"dp": 2, **settings}, batches, rates)
    assert two[0]["metrics"] == two[1]["metrics"] and same_bits(two[0]["adapters"], two[1]["adapters"])
    assert not two[1]["merged"] and two[0]["merged"].keys() == one["merged"].keys()
    for mine, expected in zip(two[0]["metrics"], one["metrics"], strict=True):
        assert abs(mine["loss"] - expected["loss"]) < 1e-5
    for name, value in one["adapters"].items():
        torch.testing.assert_close(two[0]["adapters"][name], value, rtol=0, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
    assert all(same_bits(rank["base"], load_file(folder / "model.safetensors")) for rank in two)


# ---- checkpoints


def resume_on_rank(folder: Path, settings: dict[str, Any], checkpoint: Path) -> dict[str, Any]:
    """Six steps in one go, and three, a save, a load into a new engine, and three more."""
    from rlmca.workers import SpmdGroup

    def steps(engine: Any, numbers: range) -> list[dict[str, float]]:
        group = SpmdGroup(engine, engine.parallel)
        return [group.train_batch(random_batch(rows=9, seed=s), SftLoss(), 1e-2) for s in numbers]

    engine = make_hf_engine(folder, **settings)
    steps(engine, range(3))
    engine.save(checkpoint)
    whole = steps(engine, range(3, 6))
    again = make_hf_engine(folder, **settings)
    steps(again, range(7, 9))  # other adapters and moments, to be forgotten
    again.load(checkpoint)
    resumed = steps(again, range(3, 6))
    return {"whole": whole, "resumed": resumed, "same": same_bits(copies(engine.adapters.parameters), copies(again.adapters.parameters))}


@pytest.mark.parametrize(
    "settings",
    [{}, {"dp": 2}, {"dp": 2, "bf16": True, "gradient_checkpointing": True, "use_reentrant": True}],
    ids=["one", "dp2", "dp2_bf16_reentrant"],
)
def test_resume_continues_bit_by_bit(settings: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    """The dropout of the adapters goes on where it was."""
    own = {**settings, "lora": lora_options(dropout=0.3)}
    ranks = rank_pool(settings.get("dp", 1)).run(resume_on_rank, folder, own, tmp_path / "checkpoint")
    for rank in ranks:
        assert rank["resumed"] == rank["whole"] and rank["same"]
        assert rank["whole"] == ranks[0]["whole"]


def test_a_checkpoint_is_an_adapter_of_peft_without_the_base(folder: Path, tmp_path: Path) -> None:
    from rlmca.engines.options import LossScaleOptions

    engine, path = make_hf_engine(folder, lora=lora_options(), loss_scale=LossScaleOptions(initial=64.0)), tmp_path / "checkpoint"
    engine.train_batch(random_batch(seed=1), SftLoss(), 1e-2)
    engine.save(path)
    assert {p.name for p in path.iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
        "optimizer.pt",
        "rng-0.pt",
        "scaler.pt",
    }
    mine = copies(engine.adapters.parameters)
    assert same_bits(load_file(path / "adapter_model.safetensors"), mine)
    assert plain_peft("qwen3_tied", path).peft_config["default"].base_model_name_or_path == str(folder)
    assert torch.load(path / "optimizer.pt", weights_only=True).keys() == mine.keys()
    engine.save(path)  # over an older one
    other = make_hf_engine(folder, lora=lora_options(start=path))
    assert same_bits(copies(other.adapters.parameters), mine), "a new run can start from it"


def test_an_adapter_alone_makes_the_optimizer_begin_anew(folder: Path, tmp_path: Path) -> None:
    engine, path = make_hf_engine(folder, lora=lora_options(), save_optimizer=False), tmp_path / "checkpoint"
    engine.train_batch(random_batch(seed=1), SftLoss(), 1e-2)
    engine.save(path)
    assert not (path / "optimizer.pt").exists()
    other = make_hf_engine(folder, lora=lora_options(seed=9))
    other.train_batch(random_batch(seed=2), SftLoss(), 1e-2)
    other.load(path)
    assert not other.optimizer.state and same_bits(copies(other.adapters.parameters), copies(engine.adapters.parameters))


def test_checkpoints_of_another_kind_are_named(folder: Path, tmp_path: Path) -> None:
    lora, full = make_hf_engine(folder, lora=lora_options()), make_hf_engine(folder)
    megatron = make_engine(folder, Layout("one"))
    for name, engine in {"lora": lora, "full": full, "megatron": megatron}.items():
        engine.save(tmp_path / name)
    with pytest.raises(HFFolderError, match="full holds a whole model, .* and this one trains an adapter"):
        lora.load(tmp_path / "full")
    with pytest.raises(HFFolderError, match="lora holds an adapter, .* and this one trains the model's own weights"):
        full.load(tmp_path / "lora")
    for engine in (lora, full):
        with pytest.raises(HFFolderError, match="the Megatron engine wrote it, set USE_MCA=1"):
            engine.load(tmp_path / "megatron")
        with pytest.raises(HFFolderError, match="nowhere is no checkpoint of the Hugging Face engine"):
            engine.load(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": 2}, "has shape"),
        ({"alpha": 9}, "counts 2.33333 times, and lora_alpha, lora_rank and use_rslora of this run say 3"),
        ({"rslora": True}, "counts 2.33333 times"),
        ({"targets": ("q_proj",)}, "unexpected: "),
    ],
)
def test_a_checkpoint_of_another_adapter_is_refused(changes: dict[str, Any], message: str, folder: Path, tmp_path: Path) -> None:
    make_hf_engine(folder, lora=lora_options()).save(tmp_path / "checkpoint")
    engine = make_hf_engine(folder, lora=lora_options(**changes))
    before = copies(engine.adapters.parameters)
    with pytest.raises(HFFolderError, match=message):
        engine.load(tmp_path / "checkpoint")
    assert same_bits(copies(engine.adapters.parameters), before)


def save_unwritable(folder: Path, path: Path) -> str:
    engine = make_hf_engine(folder, dp=2, lora=lora_options())
    try:
        engine.save(path)
    except Exception as error:
        return str(error)
    return "no error"


def test_a_save_that_fails_on_one_rank_fails_on_all(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    one, two = rank_pool(2).run(save_unwritable, folder, tmp_path / "file")
    assert "exists" in one.lower() and two.startswith("another rank failed")
