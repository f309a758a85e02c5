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


def train_on_too_few(folder: Path, layout: Layout, batch: Batch) -> str:
    from rlmca.algorithms.losses import SftLoss
    from rlmca.workers import SpmdGroup

    engine = make_engine(folder, layout)
    try:
        SpmdGroup(engine, engine.parallel).train_batch(batch, SftLoss(), 1e-3)
    except ValueError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_log_probs_come_back_whole_and_in_order(rows: int, tmp_path: Path) -> None:
    """Also with fewer rows than ranks: an evaluation's tail must count."""
    folder = save_model("llama", tmp_path / "model")
    batch = random_batch(rows=rows, seed=rows)
    alone = rank_pool(1).run(log_probs_on_rank, folder, Layout("one"), batch)[0]
    for rank in rank_pool(2).run(log_probs_on_rank, folder, Layout("dp2", dp=2), batch):
        for mine, expected in zip(rank, alone, strict=True):
            torch.testing.assert_close(mine, expected, rtol=0, atol=1e-5)


def test_training_on_fewer_rows_than_ranks_names_both(tmp_path: Path) -> None:
    folder = save_model("llama", tmp_path / "model")
    found = rank_pool(2).run(train_on_too_few, folder, Layout("dp2", dp=2), random_batch(rows=1))
    assert found == ["a batch of 1 rows cannot be shared by 2 data-parallel ranks"] * 2
