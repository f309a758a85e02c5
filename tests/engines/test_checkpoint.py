"""Checkpoints: weights alone, other layouts' random states, and options that belong to the run."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from rlmca.algorithms.losses import SftLoss
from tests.helpers.engine import Layout, make_engine, random_batch
from tests.helpers.models import save_model
from tests.helpers.ranks import rank_pool

pytestmark = pytest.mark.serial


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("qwen3_tied", tmp_path_factory.mktemp("model"))


def weights_alone_on_rank(folder: Path, layout: Layout, checkpoint: Path) -> dict[str, Any]:
    """Train, save the weights alone, load them into an engine that trained on something else, and go on."""
    from megatron.core import dist_checkpointing

    from rlmca.workers import SpmdGroup

    engine = make_engine(folder, layout)
    engine.options = dataclasses.replace(engine.options, save_optimizer=False)
    SpmdGroup(engine, engine.parallel).train_batch(random_batch(seed=1), SftLoss(), 1e-2)
    engine.save(checkpoint)
    saved = {name: p.clone() for name, p in engine.weights().params.items()}
    stored = sorted(dist_checkpointing.load_tensors_metadata(str(checkpoint / "weights")))

    other = make_engine(folder, layout)
    group = SpmdGroup(other, other.parallel)
    for seed in (2, 3):
        group.train_batch(random_batch(seed=seed), SftLoss(), 1e-2)
    other.load(checkpoint)
    group.train_batch(random_batch(seed=4), SftLoss(), 0.0)
    still = {name: p.clone() for name, p in other.weights().params.items()}
    return {
        "stored": stored,
        "kept": all(torch.equal(saved[name], still[name]) for name in saved),
        "steps": [group["step"] for group in other.optimizer.param_groups],
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "data_parallel",
    [{}, {"use_distributed_optimizer": False}, {"overlap_grad_reduce": True, "overlap_param_gather": True}],
    ids=["sharded", "replicated", "overlap"],
)
def test_weights_alone_replace_the_masters_and_forget_the_moments(
    dtype: torch.dtype, data_parallel: dict[str, bool], folder: Path, tmp_path: Path
) -> None:
    """A step at learning rate 0 shows what the masters hold; moments of other weights would count as steps."""
    layout = Layout("dp2", dp=2, options={"dtype": dtype}, data_parallel=data_parallel)
    for rank in rank_pool(2).run(weights_alone_on_rank, folder, layout, tmp_path / "checkpoint"):
        assert not [name for name in rank["stored"] if name.startswith("optimizer")]
        assert rank["kept"]
        assert set(rank["steps"]) == {1}


def first_step_on_rank(folder: Path, layout: Layout, checkpoint: Path) -> tuple[list[float], list[float]]:
    """Losses of two steps, without a checkpoint and after one that was written before any step."""
    from rlmca.workers import SpmdGroup

    losses = []
    for saved in (False, True):
        engine = make_engine(folder, layout)
        if saved:
            engine.save(checkpoint)
            engine = make_engine(folder, layout)
            engine.load(checkpoint)
        group = SpmdGroup(engine, engine.parallel)
        losses.append([group.train_batch(random_batch(seed=seed), SftLoss(), 1e-2)["loss"] for seed in (1, 2)])
    return losses[0], losses[1]


@pytest.mark.parametrize(
    "layout",
    [Layout("tp1"), Layout("dp2", dp=2), Layout("dp2_replicated", dp=2, data_parallel={"use_distributed_optimizer": False})],
    ids=lambda layout: layout.name,
)
def test_a_run_whose_first_steps_were_all_skipped_can_be_saved(layout: Layout, folder: Path, tmp_path: Path) -> None:
    for fresh, resumed in rank_pool(layout.world).run(first_step_on_rank, folder, layout, tmp_path / "checkpoint"):
        assert fresh == resumed


def save_on_rank(folder: Path, layout: Layout, checkpoint: Path) -> None:
    make_engine(folder, layout).save(checkpoint)


def random_state_after_load(folder: Path, layout: Layout, checkpoint: Path) -> torch.Tensor:
    make_engine(folder, layout).load(checkpoint)
    return torch.get_rng_state()


def test_random_states_of_another_layout_are_not_taken_over(folder: Path, tmp_path: Path) -> None:
    """Tensor ranks share the default generator's state; as data-parallel ranks they would then drop alike."""
    tensor, data = Layout("tp2", tp=2), Layout("dp2", dp=2)
    rank_pool(2).run(save_on_rank, folder, tensor, tmp_path / "checkpoint")
    same = rank_pool(2).run(random_state_after_load, folder, tensor, tmp_path / "checkpoint")
    assert torch.equal(*same)
    other = rank_pool(2).run(random_state_after_load, folder, data, tmp_path / "checkpoint")
    assert not torch.equal(*other)


def test_every_option_of_the_optimizer_is_the_runs_not_the_checkpoints(folder: Path, tmp_path: Path) -> None:
    """Also in the first step after a resume: the learning rate, the decay, the decay rates of the moments and epsilon."""
    engine = make_engine(folder, Layout("tp1"))
    engine.train_batch(random_batch(seed=1), SftLoss(), 1e-2)
    engine.save(tmp_path / "checkpoint")
    other = make_engine(folder, Layout("tp1"))
    wanted = {"weight_decay": 0.3, "adam_beta1": 0.5, "adam_beta2": 0.6, "adam_epsilon": 1e-3}
    other.options = dataclasses.replace(other.options, optimizer=dataclasses.replace(other.options.optimizer, **wanted))
    other.load(tmp_path / "checkpoint")
    other.train_batch(random_batch(seed=2), SftLoss(), 1e-3)
    for group in other.optimizer.param_groups:
        assert (group["lr"], group["betas"], group["eps"]) == (1e-3, (0.5, 0.6), 1e-3)
        assert group["weight_decay"] == 0.3 * group["wd_mult"]
