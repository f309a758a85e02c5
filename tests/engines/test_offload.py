"""Offload and onload: the same bits as if nothing had happened, on both engines, and no use in between."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from rlmca.algorithms.losses import SftLoss
from rlmca.workers import SpmdGroup
from tests.helpers.engine import Layout, make_engine, random_batch
from tests.helpers.huggingface import make_hf_engine
from tests.helpers.models import save_model
from tests.helpers.ranks import rank_pool
from tests.helpers.training import batches, learning_rate

BF16 = {"dtype": torch.bfloat16}
LAYOUTS = [
    Layout("one"),
    Layout("bf16", options=BF16),
    Layout("dp2_overlap", dp=2, data_parallel={"overlap_grad_reduce": True, "overlap_param_gather": True}, options=BF16),
    Layout("tp2_replicated", tp=2, data_parallel={"use_distributed_optimizer": False}, options=BF16),
    Layout("pp2", pp=2),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("qwen3_tied", tmp_path_factory.mktemp("model"))


def steps(folder: Path, layout: Layout | None, between: bool) -> Any:
    """Six steps, log-probs after them, and what is held while everything is put aside; layout None: the Hugging Face engine."""
    engine = make_hf_engine(folder) if layout is None else make_engine(folder, layout)
    group = SpmdGroup(engine, engine.parallel)
    metrics, freed = [], []
    for step, batch in enumerate(batches(8)[:6]):
        metrics.append(group.train_batch(batch, SftLoss(), learning_rate(step)))
        if between:
            weights = sum(p.numel() * p.element_size() for p in (engine.module if layout is None else engine.chunks[0]).parameters())
            before = engine.weights()
            freed.append((engine.offload(), weights))
            assert engine.offload() == 0, "twice is once"
            with pytest.raises(RuntimeError, match="call onload"):
                group.log_probs(batch)
            with pytest.raises(RuntimeError, match="call onload"):
                group.train_batch(batch, SftLoss(), 0.0)
            with pytest.raises(RuntimeError, match="call onload"):
                engine.weights()
            with pytest.raises(RuntimeError, match="call onload"):
                list(before.tensors())  # on the ranks that would send as on the one that would receive
            engine.onload()
            engine.onload()
    return metrics, group.log_probs(random_batch()).logp_BT, freed


def check(ours: Any, expected: Any) -> None:
    assert ours[0] == expected[0] and torch.equal(ours[1], expected[1])
    for freed, weights in ours[2]:
        assert freed > 2 * weights, "moments and gradients too, not the weights alone"


def test_the_hugging_face_engine(folder: Path) -> None:
    check(steps(folder, None, True), steps(folder, None, False))


@pytest.mark.serial
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_megatron_in_every_kind_of_layout(layout: Layout, folder: Path) -> None:
    pool = rank_pool(layout.world)
    expected = pool.run(steps, folder, layout, False)
    for rank, ours in enumerate(pool.run(steps, folder, layout, True)):
        check(ours, expected[rank])


def test_a_frozen_engine(folder: Path) -> None:
    engine = make_engine(folder, Layout("one"), trainable=False)
    before = engine.log_probs(random_batch()).logp_BT
    assert engine.offload() >= sum(p.numel() * p.element_size() for p in engine.chunks[0].parameters())
    engine.onload()
    assert torch.equal(engine.log_probs(random_batch()).logp_BT, before)


def test_memory_is_given_back_in_between(folder: Path) -> None:
    """Seen from outside: the process's resident memory falls by about what was freed."""
    import psutil

    from rlmca.engines.offload import Offload

    tensor, shelf = torch.randn(64, 2**20), Offload()
    expected, process = tensor.sum(), psutil.Process(os.getpid())
    full = process.memory_info().rss
    assert shelf.out([], [tensor]) == 2**28
    assert full - process.memory_info().rss > 2**27
    shelf.back()
    assert not tensor.any() and expected != 0
