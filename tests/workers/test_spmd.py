"""Whole batches in, whole results out, over data-parallel ranks."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from rlmca.types import Batch
from tests.helpers.engine import Layout, make_engine, random_batch
from tests.helpers.models import save_model
from tests.helpers.ranks import rank_pool

pytestmark = pytest.mark.serial


def log_probs_on_rank(folder: Path, layout: Layout, batch: Batch) -> Any:
    from rlmca.workers import SpmdGroup

    engine = make_engine(folder, layout, trainable=False)
    out = SpmdGroup(engine, engine.parallel).log_probs(batch, entropy=True)
    return out.logp_BT, out.entropy_BT


def train_on_few(folder: Path, layout: Layout, batches: list[Batch]) -> list[dict[str, float]]:
    from rlmca.algorithms.losses import PolicyLoss, PolicyOptions
    from rlmca.workers import SpmdGroup

    engine = make_engine(folder, layout)
    loss = PolicyLoss(PolicyOptions(loss_agg="seq_mean_token_mean", old_logp="trainer"))
    return [SpmdGroup(engine, engine.parallel).train_batch(batch, loss, 1e-2) for batch in batches]


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_log_probs_come_back_whole_and_in_order(rows: int, tmp_path: Path) -> None:
    """Also with fewer rows than ranks: an evaluation's tail must count."""
    folder = save_model("llama", tmp_path / "model")
    batch = random_batch(rows=rows, seed=rows)
    alone = rank_pool(1).run(log_probs_on_rank, folder, Layout("one"), batch)[0]
    for rank in rank_pool(2).run(log_probs_on_rank, folder, Layout("dp2", dp=2), batch):
        for mine, expected in zip(rank, alone, strict=True):
            torch.testing.assert_close(mine, expected, rtol=0, atol=1e-5)


def test_training_on_fewer_rows_than_ranks_is_training_on_one(tmp_path: Path) -> None:
    """Filters of RL may leave one sample: no layout may end the run for it, nor compute something else."""
    folder = save_model("llama", tmp_path / "model")
    batches = [batch.replace(advantage_BT=torch.ones(batch.ids_BT.shape)) for batch in (random_batch(rows=1, seed=s) for s in range(3))]
    alone = rank_pool(1).run(train_on_few, folder, Layout("one"), batches)[0]
    for rank in rank_pool(2).run(train_on_few, folder, Layout("dp2", dp=2), batches):
        for mine, expected in zip(rank, alone, strict=True):
            assert mine.keys() == expected.keys()
            assert all(abs(mine[name] - expected[name]) < 1e-5 for name in mine), (mine, expected)


BALANCED: dict[str, Any] = {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.5, "moe_z_loss_coeff": 0.1}


def train_experts_on_few(folder: Path, layout: Layout, batch: Batch) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Metrics of a step, and the weights after it."""
    from rlmca.algorithms.losses import SftLoss
    from rlmca.workers import SpmdGroup

    engine = make_engine(folder, layout)
    group = SpmdGroup(engine, engine.parallel)
    metrics = group.train_batch(batch, SftLoss(), 1e-2)
    return metrics, {name: tensor.clone() for name, tensor in group.hf_tensors()} if engine.parallel.rank == 0 else {}


FEW = [
    (1, Layout("dp2", dp=2)),
    (2, Layout("dp4_packed", dp=4, packing=True, max_tokens=20)),
    (1, Layout("dp4_ep4", dp=4, ep=4, options={"moe_token_dispatcher_type": "alltoall"})),
    (1, Layout("dp2_cp2_packed", dp=2, cp=2, packing=True, max_tokens=20)),
    (1, Layout("dp2_pp2", dp=2, pp=2)),
    (1, Layout("dp2_tp2", dp=2, tp=2, sp=True, ep=2, etp=1)),
]


@pytest.mark.parametrize(
    ("rows", "layout"),
    [pytest.param(*case, id=case[1].name, marks=[] if number < 2 else pytest.mark.whole) for number, case in enumerate(FEW)],
)
@pytest.mark.parametrize("kind", ["seq_aux_loss", pytest.param("aux_loss", marks=pytest.mark.whole)])
def test_rows_that_fill_up_ranks_balance_no_expert(kind: str, rows: int, layout: Layout, tmp_path: Path) -> None:
    """Routers see the rows of the batch alone: losses, norm and weights are those of one process."""
    folder, batch = save_model("qwen3_moe", tmp_path / "model"), random_batch(rows=rows)
    options = BALANCED | {"moe_router_load_balancing_type": kind}
    one, many = (dataclasses.replace(one, options={**one.options, **options}) for one in (Layout("one", micro_batch=1), layout))
    expected, weights = rank_pool(1).run(train_experts_on_few, folder, one, batch)[0]
    found = rank_pool(layout.world).run(train_experts_on_few, folder, many, batch)
    assert all(metrics == pytest.approx(expected, rel=1e-4) for metrics, _ in found), (found[0][0], expected)
    for name, tensor in found[0][1].items():
        torch.testing.assert_close(tensor, weights[name], rtol=0, atol=1e-3, msg=lambda m, n=name: f"{n}: {m}")
