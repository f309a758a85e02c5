"""Whole batches in, whole results out, over data-parallel ranks."""

from __future__ import annotations

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
