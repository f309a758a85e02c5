"""The Hugging Face engine over data-parallel ranks, and its checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rlmca.algorithms.losses import SftLoss
from rlmca.transfer.hf_folder import HFFolderError
from rlmca.types import Batch, batch_of_examples
from tests.helpers.engine import Layout, hf_reference, make_engine, random_batch
from tests.helpers.huggingface import hf_gradients_on_rank, make_hf_engine
from tests.helpers.models import make_model, save_model
from tests.helpers.ranks import rank_pool
from tests.helpers.training import batches, learning_rate, train_plainly

pytestmark = pytest.mark.serial


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("qwen3_tied", tmp_path_factory.mktemp("model"))


def one_rank_has_targets() -> Batch:
    """Rows of which only those of rank 1 of 2 hold targets, and only in its last micro-batch."""
    draw = torch.Generator().manual_seed(0)
    ids = [torch.randint(0, 67, (n,), generator=draw).tolist() for n in (5, 7, 3, 4, 6, 2, 9, 8)]
    return batch_of_examples(ids, [[row == 7] * len(row_ids) for row, row_ids in enumerate(ids)])


@pytest.mark.parametrize(
    ("settings", "batch"),
    [
        ({"dp": 2, "micro_batch": 1}, random_batch(rows=7)),
        ({"dp": 2, "micro_batch": 3}, random_batch(rows=7)),
        ({"dp": 2, "micro_batch": 50}, one_rank_has_targets()),
        ({"dp": 2, "micro_batch": 2, "gradient_checkpointing": True, "use_reentrant": True}, one_rank_has_targets()),
        ({"dp": 2, "micro_batch": 2, "gradient_checkpointing": True}, random_batch(rows=7)),
        ({"dp": 3, "micro_batch": 1}, random_batch(rows=7)),
        ({"dp": 3, "micro_batch": 2, "find_unused_parameters": True, "bucket_cap_mb": 1}, random_batch(rows=8)),
        ({"dp": 2, "packing": True, "max_tokens_per_microbatch": 20}, random_batch(rows=7)),
        ({"dp": 3, "max_tokens_per_microbatch": 26}, random_batch(rows=7)),
    ],
    ids=["dp2", "dp2_uneven", "dp2_empty_share", "dp2_reentrant", "dp2_checkpointing", "dp3", "dp3_options", "dp2_packed", "dp3_tokens"],
)
def test_gradients_are_those_of_the_whole_batch(settings: dict[str, Any], batch: Batch, folder: Path) -> None:
    ranks = rank_pool(settings["dp"]).run(hf_gradients_on_rank, folder, settings, batch)
    theirs = hf_reference(make_model("qwen3_tied"), batch)
    for rank in ranks:
        assert abs(rank["loss"] - theirs["loss"]) < 1e-5
        torch.testing.assert_close(rank["logp_BT"], theirs["logp_BT"], rtol=0, atol=1e-5)
        for name, expected in theirs["gradients"].items():
            torch.testing.assert_close(rank["gradients"][name], expected, rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
            assert torch.equal(rank["gradients"][name], ranks[0]["gradients"][name]), "ranks must step alike"


def steps_on_rank(folder: Path, settings: dict[str, Any], rows: int) -> Any:
    """Metrics of twenty steps, the last weights, and the weights that `weights()` gives here."""
    from rlmca.workers import SpmdGroup

    engine = make_hf_engine(folder, **settings)
    group = SpmdGroup(engine, engine.parallel)
    metrics = [group.train_batch(batch, SftLoss(), learning_rate(step)) for step, batch in enumerate(batches(rows))]
    streamed = {name: tensor.clone() for name, tensor in group.hf_tensors()}
    return metrics, {name: p.detach().clone() for name, p in engine.module.named_parameters()}, streamed


def test_twenty_steps_on_two_ranks_equal_a_plain_loop(folder: Path) -> None:
    (metrics, weights, streamed), (others, same, nothing) = rank_pool(2).run(steps_on_rank, folder, {"dp": 2}, 7)
    for step, (mine, expected) in enumerate(zip(metrics, train_plainly(make_model("qwen3_tied").train(), 7), strict=True)):
        assert abs(mine["loss"] - expected["loss"]) < 1e-5, f"step {step}"
        assert abs(mine["grad_norm"] - expected["grad_norm"]) < 1e-4 * max(1.0, expected["grad_norm"]), f"step {step}"
    assert metrics == others and all(torch.equal(value, same[name]) for name, value in weights.items())
    assert nothing == {} and all(torch.equal(value, streamed[name]) for name, value in weights.items())


def fresh_on_rank(folder: Path, dp: int) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in make_hf_engine(folder, dp=dp, fresh=True).module.named_parameters()}


def test_fresh_weights_have_the_configs_spread_and_are_the_same_on_all_ranks(tmp_path: Path) -> None:
    folder = save_model("qwen3_tied", tmp_path / "model", hidden_size=64, initializer_range=0.05)
    (folder / "model.safetensors").unlink()
    one, two = rank_pool(2).run(fresh_on_rank, folder, 2)
    assert all(torch.equal(value, two[name]) for name, value in one.items())
    assert all(torch.equal(value, other) for value, other in zip(one.values(), fresh_on_rank(folder, 1).values(), strict=True))
    for name, value in one.items():
        if "norm" not in name:
            assert value.std().item() == pytest.approx(0.05, rel=0.15), name


# ---- checkpoints


def resume_on_rank(folder: Path, settings: dict[str, Any], checkpoint: Path) -> dict[str, Any]:
    """Six steps in one go, and three, a save, a load into a new engine, and three more."""
    from rlmca.workers import SpmdGroup

    def steps(group: Any, numbers: range) -> list[dict[str, float]]:
        return [group.train_batch(random_batch(rows=9, seed=s), SftLoss(), 1e-2) for s in numbers]

    engine = make_hf_engine(folder, **settings)
    group = SpmdGroup(engine, engine.parallel)
    steps(group, range(3))
    engine.save(checkpoint)
    whole = steps(group, range(3, 6))
    again = make_hf_engine(folder, **settings)
    steps(SpmdGroup(again, again.parallel), range(7, 9))  # other weights and moments, to be forgotten
    again.load(checkpoint)
    resumed = steps(SpmdGroup(again, again.parallel), range(3, 6))
    same = all(torch.equal(p, q) for p, q in zip(engine.module.parameters(), again.module.parameters(), strict=True))
    return {"whole": whole, "resumed": resumed, "same_weights": same}


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("settings", [{}, {"dp": 2}, {"dp": 3, "bf16": True}], ids=["one", "dp2", "dp3_bf16"])
def test_resume_continues_bit_by_bit(settings: dict[str, Any], dropout: float, tmp_path: Path) -> None:
    """Also the rounding of sums over three ranks, which depends on where a gradient lies in its bucket."""
    folder = save_model("qwen3_tied", tmp_path / "model", attention_dropout=dropout)
    ranks = rank_pool(settings.get("dp", 1)).run(resume_on_rank, folder, settings, tmp_path / "checkpoint")
    for rank in ranks:
        assert rank["resumed"] == rank["whole"] and rank["same_weights"]
        assert rank["whole"] == ranks[0]["whole"]
    wet = make_hf_engine(folder)
    twice = [wet.train_batch(random_batch(seed=1), SftLoss(), 0.0)["loss"] for _ in range(2)]
    assert (twice[0] != twice[1]) == (dropout > 0)


def test_a_checkpoint_is_a_folder_of_transformers(folder: Path, tmp_path: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": 2}')
    engine, path = make_hf_engine(folder), tmp_path / "checkpoint"
    engine.train_batch(random_batch(seed=1), SftLoss(), 1e-2)
    engine.save(path)
    model, report = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not any(report.values())
    mine = dict(engine.module.named_parameters())
    for name, value in model.named_parameters():
        assert value.dtype == torch.float32 and torch.equal(value, mine[name]), name
    assert {p.name for p in path.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "optimizer.pt",
        "rng-0.pt",
    }
    assert json.loads((path / "config.json").read_text())["dtype"] == "float32"
    state = torch.load(path / "optimizer.pt", weights_only=True)
    assert set(state) == set(mine) and set(state["model.norm.weight"]) == {"step", "exp_avg", "exp_avg_sq"}


def test_weights_alone_make_the_optimizer_begin_anew(folder: Path, tmp_path: Path) -> None:
    """Known fault H3: a step at learning rate 0 keeps the loaded weights; moments of other weights are gone."""
    engine, path = make_hf_engine(folder, save_optimizer=False), tmp_path / "checkpoint"
    engine.train_batch(random_batch(seed=1), SftLoss(), 1e-2)
    engine.save(path)
    assert not (path / "optimizer.pt").exists()
    other, first = make_hf_engine(folder), make_hf_engine(path)
    for seed in (2, 3):
        other.train_batch(random_batch(seed=seed), SftLoss(), 1e-2)
    other.load(path)
    assert not other.optimizer.state
    other.train_batch(random_batch(seed=4), SftLoss(), 0.0)
    saved = load_file(path / "model.safetensors")
    assert all(torch.equal(saved[name], p) for name, p in other.module.named_parameters())
    first.train_batch(random_batch(seed=4), SftLoss(), 0.0)
    mine, theirs = ([value for state in e.optimizer.state.values() for value in state.values()] for e in (other, first))
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_every_option_of_the_optimizer_is_the_runs_not_the_checkpoints(folder: Path, tmp_path: Path) -> None:
    from rlmca.engines.options import OptimizerOptions

    engine = make_hf_engine(folder)
    engine.train_batch(random_batch(seed=1), SftLoss(), 1e-2)
    engine.save(tmp_path / "checkpoint")
    other = make_hf_engine(folder, optimizer=OptimizerOptions(weight_decay=0.3, adam_beta1=0.5, adam_beta2=0.6, adam_epsilon=1e-3))
    other.load(tmp_path / "checkpoint")
    other.train_batch(random_batch(seed=2), SftLoss(), 1e-3)
    for group in other.optimizer.param_groups:
        assert (group["lr"], group["betas"], group["eps"]) == (1e-3, (0.5, 0.6), 1e-3)
    assert [group["weight_decay"] for group in other.optimizer.param_groups] == [0.3, 0.0]


def test_a_checkpoint_of_the_other_engine_is_named(folder: Path, tmp_path: Path) -> None:
    megatron, ours = make_engine(folder, Layout("tp1")), make_hf_engine(folder)
    megatron.save(tmp_path / "megatron")
    ours.save(tmp_path / "ours")
    with pytest.raises(HFFolderError, match="the Megatron engine wrote it, set USE_MCA=1"):
        ours.load(tmp_path / "megatron")
    with pytest.raises(HFFolderError, match="the Hugging Face engine wrote it, unset USE_MCA"):
        megatron.load(tmp_path / "ours")


def save_unwritable(folder: Path, path: Path) -> str:
    engine = make_hf_engine(folder, dp=2)
    try:
        engine.save(path)
    except Exception as error:
        return str(error)
    return "no error"


def test_a_save_that_fails_on_one_rank_fails_on_all(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    one, two = rank_pool(2).run(save_unwritable, folder, tmp_path / "file")
    assert "exists" in one.lower() and two.startswith("another rank failed")
