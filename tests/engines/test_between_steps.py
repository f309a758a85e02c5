"""What is read between steps, and steps that must not be taken: every rank has the newest weights and decides alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rlmca.algorithms.losses import SftLoss
from tests.helpers.engine import Layout, make_engine, random_batch
from tests.helpers.models import save_model
from tests.helpers.ranks import rank_pool

pytestmark = pytest.mark.serial
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True, "ddp_bucket_size": 3001}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("qwen3_tied", tmp_path_factory.mktemp("model"))


def readings_on_rank(folder: Path, layout: Layout, checkpoint: Path) -> list[dict[str, torch.Tensor]]:
    """Losses, log-probs and exported weights in turns; then the same after a load over a step that was just taken."""
    from rlmca.workers import SpmdGroup

    engine = make_engine(folder, layout)
    group = SpmdGroup(engine, engine.parallel)
    found: list[dict[str, torch.Tensor]] = []

    def step(seed: int) -> None:
        metrics = group.train_batch(random_batch(rows=9, seed=seed), SftLoss(), 1e-2)
        found.append({name: torch.tensor(metrics[name]) for name in ("loss", "grad_norm")})

    def log_probs() -> None:
        found.append({"logp": group.log_probs(random_batch(rows=5, seed=50), temperature=0.7).logp_BT})

    def weights() -> None:
        found.append({name: tensor.clone() for name, tensor in group.hf_tensors()})

    step(0), log_probs(), weights()
    step(1), weights(), log_probs()
    step(2), group.save(checkpoint)
    step(3), log_probs()
    step(4), group.load(checkpoint), weights(), log_probs()
    step(3), weights()
    return found


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "layout",
    [
        Layout("dp2", dp=2, data_parallel=OVERLAP),
        Layout("pp2_dp2", pp=2, dp=2, data_parallel=OVERLAP),
        Layout("tp2_sp_dp2", tp=2, sp=True, dp=2, data_parallel=OVERLAP),
    ],
    ids=lambda layout: layout.name,
)
def test_overlapped_gathering_never_shows_old_weights(layout: Layout, folder: Path, tmp_path: Path) -> None:
    alone = rank_pool(1).run(readings_on_rank, folder, Layout("one"), tmp_path / "alone")[0]
    ours = rank_pool(layout.world).run(readings_on_rank, folder, layout, tmp_path / "ours")[0]
    for number, (mine, expected) in enumerate(zip(ours, alone, strict=True)):
        for name, value in expected.items():
            torch.testing.assert_close(mine[name], value, rtol=0, atol=5e-5, msg=lambda m, n=(number, name): f"{n}: {m}")


def poisoned_on_rank(folder: Path, layout: Layout, kind: str) -> dict[str, Any]:
    """One step, one that is not finite on the last data-parallel rank alone, one more."""
    from rlmca.workers import SpmdGroup

    engine = make_engine(folder, layout)
    group, sick = SpmdGroup(engine, engine.parallel), engine.parallel.dp_rank == engine.parallel.dp_size - 1

    class Poisoned(SftLoss):
        def terms(self, out, batch, counts):  # type: ignore[no-untyped-def]
            loss, metrics = super().terms(out, batch, counts)
            if sick and kind == "loss":
                loss = loss * float("nan")
            elif sick:  # a finite loss whose gradient is not: 0 * sqrt(0)
                loss = loss + (out.logp_BT.sum() * 0).sqrt() * 0
            return loss, metrics

    def state() -> list[torch.Tensor]:
        parts = getattr(engine.optimizer, "chained_optimizers", [engine.optimizer])
        moments = [value for part in parts for entry in part.optimizer.state.values() for value in entry.values()]
        return [tensor.clone() for tensor in (*engine.weights().params.values(), *moments)]

    group.train_batch(random_batch(rows=9, seed=1), SftLoss(), 1e-2)
    before = state()
    metrics = group.train_batch(random_batch(rows=9, seed=2), Poisoned(), 1e-2)
    same = all(torch.equal(a, b) for a, b in zip(before, state(), strict=True))
    after = group.train_batch(random_batch(rows=9, seed=2), SftLoss(), 1e-2)
    return {"skipped": metrics["skipped"], "same": same, "after": after["skipped"], "loss": after["loss"]}


@pytest.mark.parametrize("kind", ["loss", "gradient"])
@pytest.mark.parametrize(
    "layout",
    [
        Layout("dp2", dp=2),
        Layout("dp2_overlap", dp=2, data_parallel=OVERLAP),
        Layout("dp2_replicated_bf16", dp=2, data_parallel={"use_distributed_optimizer": False}, options={"dtype": torch.bfloat16}),
        Layout("pp2", pp=2),
        Layout("tp2", tp=2),
        Layout("pp2_dp2", pp=2, dp=2),
    ],
    ids=lambda layout: layout.name,
)
def test_all_ranks_skip_a_step_that_is_not_finite_on_one(layout: Layout, kind: str, folder: Path) -> None:
    ranks = rank_pool(layout.world).run(poisoned_on_rank, folder, layout, kind)
    assert all(rank["skipped"] == 1.0 and rank["same"] and rank["after"] == 0.0 for rank in ranks)
    assert len({rank["loss"] for rank in ranks}) == 1
