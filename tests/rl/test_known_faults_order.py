"""Known fault E5: rewards attached to other samples once a batch was reordered for micro-batches and ranks of equal work."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlmca.algorithms import assign_advantages
from rlmca.algorithms.moments import RunningMoments
from rlmca.config import Environment, RunConfig, make_config
from rlmca.engines.microbatch import Cutting, shares
from rlmca.rl.shaping import shape_rewards
from rlmca.rl.update import update_policy
from rlmca.run.rollouts import RolloutWriter, read_rollout
from rlmca.types import Sample, batch_of_samples
from rlmca.workers import SpmdGroup
from tests.helpers.engine import Layout, make_engine
from tests.helpers.models import save_model

LENGTHS = (9, 1, 8, 2, 7, 3, 6, 4)
OFF = Layout("off", micro_batch=8)
ON = {"tokens": Layout("tokens", max_tokens=24), "packed": Layout("packed", max_tokens=24, packing=True)}


def config() -> RunConfig:
    values = {"stage": "grpo", "model_name_or_path": "m", "dataset": "d", "output_dir": "o", "rewards": "exact", "rollout_batch_size": 2,
              "num_generations": 4, "kl_coef": 0.0, "max_new_tokens": 10, "reward_normalize": "batch", "advantage_std": "none"}  # fmt: skip
    return make_config(values, env=Environment(use_mca=True))


def samples() -> list[Sample]:
    """Reply i has LENGTHS[i] tokens and reward i, and its text names it."""
    draw = torch.Generator().manual_seed(0)
    ids = [torch.randint(0, 67, (n + 2,), generator=draw).tolist() for n in LENGTHS]
    return [
        Sample(row[:2], row[2:], [0.0] * n, [0] * n, "stop", reply=str(uid), group=uid // 4, k=uid % 4, reward=float(uid))
        for uid, (n, row) in enumerate(zip(LENGTHS, ids, strict=True))
    ]


def one_step(folder: Path, layout: Layout, output: Path) -> dict[str, Any]:
    """Log-probs, an update and a dump of the eight samples on a new engine."""
    engine = make_engine(folder, layout)
    policy, drawn = SpmdGroup(engine, engine.parallel), samples()
    logp_BT = policy.log_probs(batch_of_samples(drawn)).logp_BT
    shape_rewards(drawn, config(), RunningMoments())
    assign_advantages(drawn, std="none")
    metrics = update_policy(policy, None, drawn, config(), step=1, learning_rate=1e-2)
    with RolloutWriter(output) as writer:
        writer.write(1, drawn)
    return {"logp_BT": logp_BT, "samples": drawn, "metrics": metrics}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = save_model("qwen3_tied", tmp_path_factory.mktemp("e5") / "model")
    return folder, one_step(folder, OFF, folder.parent)


@pytest.mark.parametrize("kind", ON)
def test_a_reward_stays_with_its_sample(kind: str, plain: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder, expected = plain
    found = one_step(folder, ON[kind], tmp_path)
    assert [(s.raw_reward, s.reply) for s in found["samples"]] == [(float(uid), str(uid)) for uid in range(8)]
    assert [s.advantage for s in found["samples"]] == [s.advantage for s in expected["samples"]]
    assert (found["logp_BT"] - expected["logp_BT"]).abs().max() < 1e-6
    for row in read_rollout(tmp_path / "rollouts" / "step-1.jsonl.zst"):
        assert row["raw_reward"] == json.loads(row["reply"]) and len(row["reply_ids"]) == LENGTHS[int(row["reply"])]
    for name in ("loss", "grad_norm", "entropy"):
        assert found["metrics"][name] == pytest.approx(expected["metrics"][name], rel=1e-6, abs=1e-6)


def test_shares_of_two_ranks_put_together_are_the_batch() -> None:
    drawn = samples()
    assign_advantages(drawn, std="none")
    batch = batch_of_samples(drawn)
    for cutting in (Cutting(1), Cutting(1, max_tokens=24)):
        whole = torch.zeros_like(batch.advantage_BT)
        for own in shares(batch, cutting, SimpleNamespace(dp_size=2)):  # type: ignore[arg-type]
            whole[own] = batch.rows(own).advantage_BT
        assert torch.equal(whole, batch.advantage_BT) and whole[7, 2] == drawn[7].advantage == 1.5
