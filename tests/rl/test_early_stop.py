"""Early stop: the step beyond the limit is not taken, on any rank, and nothing of the optimizer moves (known fault I5)."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlmca.algorithms import PolicyLoss, PolicyOptions
from rlmca.rl.update import update_policy
from rlmca.types import Batch
from rlmca.workers import SpmdGroup
from tests.helpers.engine import Layout, make_engine, random_batch
from tests.helpers.huggingface import make_hf_engine
from tests.helpers.models import save_model
from tests.helpers.ranks import rank_pool
from tests.rl.test_update import Recorder, config, samples

Make = Callable[[Path], Any]
MAKERS: dict[str, Make] = {
    "huggingface": lambda folder: make_hf_engine(folder, micro_batch=3),
    "megatron": lambda folder: make_engine(folder, Layout("tp1", micro_batch=3)),
}


def state(engine: Any) -> list[Tensor]:
    """Weights, moments and step counts."""
    parts = getattr(engine.optimizer, "chained_optimizers", [engine.optimizer])
    inner = [part if isinstance(part, torch.optim.Optimizer) else part.optimizer for part in parts]
    found = [p.detach() for model in getattr(engine, "models", None) or [engine.module] for p in model.parameters()]
    for optimizer in inner:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                found += [torch.as_tensor(value) for _, value in sorted(optimizer.state[parameter].items())]
            found.append(torch.tensor(float(group.get("step", 0))))
    return [tensor.clone() for tensor in found]


def policy_batch(engine: Any, gap: float | list[float]) -> Batch:
    """Rows whose log ratio is `gap` at every target (a list: one of each row)."""
    batch = random_batch(rows=4)
    logp_BT = SpmdGroup(engine, engine.parallel).log_probs(batch).logp_BT
    gap_B = torch.tensor([gap] * 4 if isinstance(gap, float) else gap)
    return batch.replace(old_logp_BT=(logp_BT - gap_B[:, None]).float(), advantage_BT=torch.ones_like(logp_BT).float())


@pytest.mark.parametrize("name", MAKERS)
def test_the_step_beyond_the_limit_is_not_taken(name: str, tmp_path: Path) -> None:
    engine = MAKERS[name](save_model("qwen3_tied", tmp_path / "model"))
    loss = PolicyLoss(PolicyOptions())
    first = engine.train_batch(policy_batch(engine, 0.1), loss, 1e-2, {"approx_kl": 0.1})
    assert first["stopped"] == first["skipped"] == 0.0 and first["approx_kl"] == pytest.approx(0.005, abs=1e-4)
    before = state(engine)
    assert any(tensor.abs().sum() > 0 for tensor in before)
    metrics = engine.train_batch(policy_batch(engine, 0.5), loss, 1e-2, {"approx_kl": 0.1})
    assert metrics["approx_kl"] == pytest.approx(0.125, abs=1e-4) and metrics["stopped"] == metrics["skipped"] == 1.0
    after = state(engine)
    assert len(before) == len(after) and all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    again = engine.train_batch(policy_batch(engine, 0.5), loss, 1e-2)
    assert "stopped" not in again and again["skipped"] == 0.0
    assert any(not torch.equal(a, b) for a, b in zip(before, state(engine), strict=True))


def test_the_rest_of_the_rollout_is_left_out(tmp_path: Path) -> None:
    policy = Recorder(make_hf_engine(save_model("qwen3_tied", tmp_path / "model"), micro_batch=3))
    cfg = config(updates_per_rollout=3, early_stop_kl=1e-3)
    metrics = update_policy(policy, None, samples(), cfg, step=1, learning_rate=3e-2)
    assert [m["stopped"] for m in policy.steps] == [0.0] * (len(policy.steps) - 1) + [1.0] and len(policy.steps) < 6
    assert policy.steps[0]["approx_kl"] < 1e-6 and policy.steps[-1]["approx_kl"] > 1e-3
    assert metrics["early_stopped"] == 1.0 and metrics["updates"] == len(policy.steps) - 1 and metrics["skipped"] == 0.0
    calm = update_policy(policy, None, samples(), config(updates_per_rollout=2, early_stop_kl=1e9), step=2, learning_rate=1e-3)
    assert calm["early_stopped"] == 0.0 and calm["updates"] == 4 and "stopped" not in calm


def both_ranks(folder: Path, engine_name: str, second: float) -> tuple[float, float, bool]:
    """This rank's share has KL .05, the other's `second`: (approximate KL, stopped, whether this rank's weights moved)."""
    rank = int(os.environ["RANK"])
    engine = make_engine(folder, Layout("dp2", dp=2)) if engine_name == "megatron" else make_hf_engine(folder, dp=2)
    batch = random_batch(rows=4)
    batch.mask_BT.zero_()
    batch.mask_BT[:, 1:3] = True  # as many targets on both ranks
    logp_BT = SpmdGroup(engine, engine.parallel).log_probs(batch).logp_BT
    gap = (2 * (0.05 if rank == 0 else second)) ** 0.5
    own = batch.replace(old_logp_BT=(logp_BT - gap).float(), advantage_BT=-torch.ones_like(logp_BT).float())  # A < 0 is not clipped
    before = [p.detach().clone() for p in (engine.module if engine_name == "huggingface" else engine.models[0]).parameters()]
    metrics = engine.train_batch(own, PolicyLoss(PolicyOptions()), 1e-2, {"approx_kl": 0.15})
    after = list((engine.module if engine_name == "huggingface" else engine.models[0]).parameters())
    return metrics["approx_kl"], metrics["stopped"], any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.serial
@pytest.mark.parametrize("engine", MAKERS)
def test_ranks_stop_together(engine: str, tmp_path: Path) -> None:
    """KL .05 on one rank and .30 on the other: both stop at .15, though one alone would not; .05 and .20: both go on."""
    folder = save_model("qwen3_tied", tmp_path / "model")
    for second, stops in ((0.30, True), (0.20, False)):
        for measured, stopped, moved in rank_pool(2).run(both_ranks, folder, engine, second):
            assert measured == pytest.approx((0.05 + second) / 2, abs=1e-3)
            assert (stopped == 1.0) is stops and moved is not stops
