"""Ray ranks give what the same ranks give under SPMD, and end with one clear error when one of them fails."""

from __future__ import annotations

import dataclasses
import math
import os
import re
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from rlmca.algorithms.losses import SftLoss
from rlmca.config import ConfigError, Environment, RunConfig, make_config
from rlmca.transfer.hf_folder import HFFolderError
from rlmca.types import Batch
from tests.helpers.engine import random_batch
from tests.helpers.models import save_model
from tests.helpers.ranks import rank_pool

pytestmark = pytest.mark.serial

LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "tp2": {"tensor_model_parallel_size": 2},
    "pp2": {"pipeline_model_parallel_size": 2},
    "dp2": {"use_distributed_optimizer": True},
    "tp2_dp2": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "huggingface_dp2": {"ddp_bucket_cap_mb": 1},
}
WORLDS = {"one": 1, "tp2": 2, "pp2": 2, "dp2": 2, "tp2_dp2": 4, "huggingface_dp2": 2}


def config(folder: Path, layout: str, **changes: Any) -> RunConfig:
    values = {"model_name_or_path": str(folder), "dataset": "d", "output_dir": "o", "per_device_train_batch_size": 2, "seed": 7}
    return make_config({**values, **LAYOUTS[layout], **changes}, env=Environment(use_mca=not layout.startswith("huggingface")))


def work(ranks: Any, folder: Path, out: Path) -> dict[str, Any]:
    """What a loop does with a role: train, log-probs, weights, save, go on, load, go on again; an export at the end."""
    from rlmca.workers import ExportOptions

    policy, reference = ranks.build("policy", folder), ranks.build("reference", folder, trainable=False)
    metrics = [policy.train_batch(random_batch(seed=s), SftLoss(), 1e-2) for s in range(4)]
    kept = {name: tensor.clone() for name, tensor in policy.hf_tensors()}
    policy.save(out / "checkpoint")
    after = [policy.train_batch(random_batch(seed=s), SftLoss(), 1e-2) for s in range(4, 6)]
    policy.load(out / "checkpoint")
    again = [policy.train_batch(random_batch(seed=s), SftLoss(), 1e-2) for s in range(4, 6)]
    outputs = [role.log_probs(random_batch(seed=9), temperature=0.7, entropy=True) for role in (policy, reference)]
    policy.export(ExportOptions(out / "hf", folder, torch.float32, 5.0), None)
    return {"metrics": metrics, "kept": kept, "after": after, "again": again, "outputs": outputs, "sizes": ranks.sizes}


def spmd_work(cfg: RunConfig, folder: Path, out: Path) -> dict[str, Any]:
    from rlmca.workers import SpmdRanks

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    cfg = dataclasses.replace(cfg, env=dataclasses.replace(cfg.env, rank=rank, local_rank=rank, world_size=world))
    return work(SpmdRanks(cfg), folder, out)


@contextmanager
def ray_ranks(cfg: RunConfig, world: int) -> Iterator[Any]:
    from rlmca.workers.ray import RayRanks

    with closing(RayRanks(cfg, world)) as ranks:
        yield ranks


@pytest.mark.cases(1)
@pytest.mark.parametrize("layout", [pytest.param(n, marks=pytest.mark.whole if n in ("one", "tp2_dp2") else []) for n in sorted(LAYOUTS)])
def test_ray_ranks_compute_what_spmd_ranks_compute(layout: str, tmp_path: Path, ray_cluster: None) -> None:
    """Bit for bit: the same code runs on the same layout. The folder that rank 0 exports is that of the live weights."""
    from safetensors.torch import load_file

    folder = save_model("qwen3_tied", tmp_path / "model")
    cfg, world = config(folder, layout), WORLDS[layout]
    (tmp_path / "spmd").mkdir()
    expected = rank_pool(world).run(spmd_work, cfg, folder, tmp_path / "spmd")[0]
    (tmp_path / "ray").mkdir()
    with ray_ranks(cfg, world) as ranks:
        found = work(ranks, folder, tmp_path / "ray")
    assert found["sizes"] == expected["sizes"] and math.prod(found["sizes"]) == world
    for key in ("metrics", "after", "again"):
        assert found[key] == expected[key], key
    assert found["after"] == found["again"]
    assert found["kept"].keys() == expected["kept"].keys()
    assert all(torch.equal(tensor, expected["kept"][name]) for name, tensor in found["kept"].items())
    for mine, theirs in zip(found["outputs"], expected["outputs"], strict=True):
        assert torch.equal(mine.logp_BT, theirs.logp_BT) and torch.equal(mine.entropy_BT, theirs.entropy_BT)
    files = [load_file(tmp_path / kind / "hf" / "model.safetensors") for kind in ("ray", "spmd")]
    assert files[0].keys() == files[1].keys() == found["kept"].keys()
    assert all(torch.equal(tensor, files[1][name]) for name, tensor in files[0].items())


class FailsOnRank(SftLoss):
    """Raises on one rank alone; the others are then in a collective that never ends."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def counts(self, batch: Batch) -> dict[str, torch.Tensor]:
        if torch.distributed.get_rank() == self.rank:
            raise RuntimeError("this rank is out of luck")
        return super().counts(batch)


class DiesOnRank(FailsOnRank):
    """The process of one rank is killed."""

    def counts(self, batch: Batch) -> dict[str, torch.Tensor]:
        if torch.distributed.get_rank() == self.rank:
            os.kill(os.getpid(), signal.SIGKILL)
        return SftLoss.counts(self, batch)


class Speaks(SftLoss):
    """Prints where it runs."""

    def counts(self, batch: Batch) -> dict[str, torch.Tensor]:
        print(f"here is number {torch.distributed.get_rank()}", flush=True)
        return super().counts(batch)


def test_what_a_rank_prints_is_seen_with_its_number(tmp_path: Path, ray_cluster: None, capfd: pytest.CaptureFixture[str]) -> None:
    folder = save_model("llama", tmp_path / "model")
    with ray_ranks(config(folder, "dp2"), 2) as ranks:
        ranks.build("policy", folder).train_batch(random_batch(), Speaks(), 1e-3)
        seen, end = "", time.monotonic() + 30
        while time.monotonic() < end and not all(f"here is number {n}" in seen for n in (0, 1)):
            out, err = capfd.readouterr()
            seen += out + err
            time.sleep(0.1)
    lines = re.sub(r"\x1b\[[0-9]*m", "", seen).splitlines()
    for number in (0, 1):
        assert any(line.startswith(f"(rank {number} pid=") and line.endswith(f"here is number {number}") for line in lines), seen


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.whole), 1])
def test_the_error_of_one_rank_is_the_error_of_the_call(rank: int, tmp_path: Path, ray_cluster: None) -> None:
    folder = save_model("llama", tmp_path / "model")
    with ray_ranks(config(folder, "dp2"), 2) as ranks:
        policy = ranks.build("policy", folder)
        with pytest.raises(RuntimeError) as caught:
            policy.train_batch(random_batch(), FailsOnRank(rank), 1e-3)
    assert str(caught.value) == "this rank is out of luck"
    assert f"on rank {rank}" in "".join(caught.value.__notes__)


def test_a_rank_that_dies_ends_the_call_and_the_others(tmp_path: Path, ray_cluster: None) -> None:
    from rlmca.workers import WorkerError

    folder = save_model("llama", tmp_path / "model")
    with ray_ranks(config(folder, "dp2"), 2) as ranks:
        pids = ranks.everywhere("pid")
        policy = ranks.build("policy", folder)
        with pytest.raises(WorkerError, match="rank 1 ended"):
            policy.train_batch(random_batch(), DiesOnRank(1), 1e-3)
    wait_until_gone(pids)


def test_a_rank_that_died_between_calls_is_named_when_weights_are_asked_for(tmp_path: Path, ray_cluster: None) -> None:
    from rlmca.workers import WorkerError

    folder = save_model("llama", tmp_path / "model")
    with ray_ranks(config(folder, "tp2"), 2) as ranks:
        policy = ranks.build("policy", folder)
        os.kill(ranks.everywhere("pid")[1], signal.SIGKILL)
        with pytest.raises(WorkerError, match="rank 1 ended"):
            list(policy.hf_tensors())


def test_mistakes_come_back_as_themselves(tmp_path: Path, ray_cluster: None) -> None:
    """A user's mistake that only a rank can see is the same exception as in one process, not a traceback of actors."""
    folder = save_model("llama", tmp_path / "model")
    with ray_ranks(config(folder, "pp2"), 2) as ranks:
        (empty := tmp_path / "empty").mkdir()
        shutil.copy(folder / "config.json", empty)
        with pytest.raises(HFFolderError, match="empty"):
            ranks.build("policy", empty)


def test_more_ranks_than_the_cluster_has_room_for(tmp_path: Path, ray_cluster: None) -> None:
    from rlmca.workers import WorkerError

    with pytest.raises(WorkerError, match="64 ranks take 64 CPUs and the Ray cluster has"), ray_ranks(config(tmp_path, "dp2"), 64):
        pass


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"use_ray": False, "ray_num_workers": 2}, "ray_num_workers: belongs to Ray, and use_ray is false"),
        ({"ray_address": "auto"}, "ray_address: stage sft takes Ray only with use_ray: true"),
        ({"use_ray": True, "ray_init_kwargs": {"address": "auto"}}, "ray_init_kwargs.address: write ray_address"),
    ],
)
def test_contradictions_of_keys(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        config(tmp_path, "one", **changes)


def wait_until_gone(pids: list[int], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < end, f"still there: {[pid for pid in pids if Path(f'/proc/{pid}').exists()]}"
        time.sleep(0.05)
