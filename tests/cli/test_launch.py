"""Launching: how many processes, torchrun's arguments, exit statuses, signals, no orphans."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlmca.cli.launch import Launch, plan_launch, run_child, torchrun_arguments
from rlmca.config import ConfigError, Environment, RunConfig, make_config

ROOT = Path(__file__).parents[2]
SFT: dict[str, Any] = {"model_name_or_path": "m", "dataset": "d", "output_dir": "o"}
GRPO: dict[str, Any] = {**SFT, "stage": "grpo", "rewards": "exact"}


def cfg(values: dict[str, Any], **env: Any) -> RunConfig:
    return make_config(values, env=Environment(use_mca=True, **env))


@pytest.mark.parametrize(
    ("env", "devices", "launch"),
    [
        ({}, 0, Launch(1, (1,), False)),
        ({}, 1, Launch(1, (1,), False)),
        ({}, 8, Launch(8, (8,), True)),
        ({"force_torchrun": True}, 0, Launch(1, (1,), True)),
        ({"nproc_per_node": 2}, 8, Launch(2, (2,), True)),
        ({"nnodes": 2}, 4, Launch(4, (8,), True)),
        ({"nnodes": 2}, 0, Launch(1, (2,), True)),
        ({"min_nnodes": 1, "max_nnodes": 3, "rdzv_id": "x"}, 2, Launch(2, (2, 4, 6), True)),
        ({"rank": 3, "local_rank": 3, "world_size": 4}, 8, Launch(1, (4,), False)),
    ],
)
def test_how_many_processes(env: dict[str, Any], devices: int, launch: Launch) -> None:
    assert plan_launch(cfg(SFT, **env), devices) == launch


@pytest.mark.parametrize(
    ("changes", "env", "devices", "launch"),
    [
        ({}, {}, 0, Launch(1, (1,), False)),
        ({}, {}, 1, Launch(1, (1,), False)),
        ({}, {}, 8, Launch(8, (8,), False, ray=True)),
        ({}, {"nproc_per_node": 2}, 8, Launch(2, (2,), False, ray=True)),
        ({}, {"force_torchrun": True, "nproc_per_node": 1}, 8, Launch(1, (1,), True)),
        ({"ray_num_workers": 4}, {}, 0, Launch(4, (4,), False, ray=True)),
        ({"use_ray": True}, {}, 0, Launch(1, (1,), False, ray=True)),
        ({"ray_address": "auto"}, {}, 0, Launch(1, (1,), False, ray=True)),
        ({"use_ray": True, "ray_address": "auto", "ray_num_workers": 16}, {}, 8, Launch(16, (16,), False, ray=True)),
        ({"use_ray": False}, {"nproc_per_node": 1}, 8, Launch(1, (1,), False)),
    ],
)
def test_several_ranks_of_rl_are_ray_actors(changes: dict[str, Any], env: dict[str, Any], devices: int, launch: Launch) -> None:
    assert plan_launch(cfg({**GRPO, **changes}, **env), devices) == launch


def test_supervised_stages_take_ray_only_when_asked() -> None:
    assert plan_launch(cfg({**SFT, "use_ray": True}, nproc_per_node=2), 0) == Launch(2, (2,), False, ray=True)
    assert plan_launch(cfg({**SFT, "use_ray": False}, nproc_per_node=2), 0) == Launch(2, (2,), True)


@pytest.mark.parametrize(
    ("changes", "env", "words"),
    [
        ({"use_ray": False}, {"nproc_per_node": 2}, "use_ray: false, but stage grpo over several processes needs Ray"),
        ({}, {"rank": 0, "local_rank": 0, "world_size": 2}, "stage grpo over 2 processes of torchrun: its ranks are Ray actors"),
        ({}, {"nnodes": 2, "nproc_per_node": 4}, "on Ray start the run once and write ray_address"),
        ({}, {"max_restarts": 3, "rdzv_id": "x", "nproc_per_node": 2}, "RDZV_ID and MAX_RESTARTS: belongs to torchrun"),
        ({}, {"force_torchrun": True, "nproc_per_node": 2}, "FORCE_TORCHRUN=1 and Ray exclude each other"),
    ],
)
def test_what_ray_cannot_do_is_refused(changes: dict[str, Any], env: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        plan_launch(cfg({**GRPO, **changes}, **env), 1)


@pytest.mark.parametrize(
    ("env", "wanted"),
    [
        (Environment(), ["--standalone"]),
        (Environment(master_port=29501), ["--nnodes=1", "--node-rank=0", "--master-addr=127.0.0.1", "--master-port=29501"]),
        (
            Environment(nnodes=2, node_rank=1, master_addr="h", master_port=5),
            ["--nnodes=2", "--node-rank=1", "--master-addr=h", "--master-port=5"],
        ),
        (
            Environment(min_nnodes=1, max_nnodes=3, rdzv_id="job", master_addr="h", master_port=5, max_restarts=2),
            ["--max-restarts=2", "--nnodes=1:3", "--rdzv-id=job", "--rdzv-backend=c10d", "--rdzv-endpoint=h:5"],
        ),
    ],
)
def test_arguments_are_torchruns(env: Environment, wanted: list[str]) -> None:
    arguments = torchrun_arguments(Launch(2, (2,), True), env)
    assert arguments[0] == "--nproc-per-node=2" and arguments[2:] == wanted
    from torch.distributed.run import parse_args

    parsed = parse_args([*arguments, "-m", "rlmca.cli.worker", "x.yaml", "seed=1", "max_steps=-1"])
    assert parsed.training_script_args == ["x.yaml", "seed=1", "max_steps=-1"] and parsed.nproc_per_node == "2"


@pytest.mark.parametrize("status", [0, 1, 7])
def test_the_exit_status_is_the_childs(status: int) -> None:
    assert run_child([sys.executable, "-c", f"import sys; sys.exit({status})"]) == status


def test_a_child_that_a_signal_ended() -> None:
    assert run_child([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]) == 137


def wait_for(condition: Callable[[], bool], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


WORKER = """
import os, signal, sys, time
from pathlib import Path
from rlmca.cli.parent import end_with_parent
end_with_parent(signal.SIGKILL, os.getppid())
folder, mode = Path(sys.argv[1]), sys.argv[2]
rank = os.environ["RANK"]
def stop(number, frame):
    (folder / f"stopped-{rank}").write_text(str(number))
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
if mode == "fail":
    sys.exit(7 if rank == "1" else 0)
(folder / f"pid-{rank}.tmp").write_text(str(os.getpid()))
os.rename(folder / f"pid-{rank}.tmp", folder / f"pid-{rank}")
while True:
    time.sleep(0.1)
"""
LAUNCHER = """
import sys
from rlmca.cli.launch import Launch, run_child, torchrun_arguments
from rlmca.config import Environment
arguments = torchrun_arguments(Launch(2, (2,), True), Environment())
sys.exit(run_child([sys.executable, "-m", "rlmca.cli.torchrun", *arguments, *sys.argv[1:]]))
"""


def launch(folder: Path, mode: str) -> subprocess.Popen[bytes]:
    (folder / "worker.py").write_text(WORKER)
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", LAUNCHER, str(folder / "worker.py"), str(folder), mode]
    return subprocess.Popen(command, env=environ, cwd=ROOT, stderr=subprocess.DEVNULL)


def started(folder: Path) -> list[int]:
    wait_for(lambda: all((folder / f"pid-{rank}").exists() for rank in (0, 1)))
    return [int((folder / f"pid-{rank}").read_text()) for rank in (0, 1)]


@pytest.mark.serial
def test_the_status_of_the_process_that_failed_comes_back(tmp_path: Path) -> None:
    assert launch(tmp_path, "fail").wait(timeout=180) == 7


@pytest.mark.serial
def test_a_signal_reaches_every_process_and_none_is_left(tmp_path: Path) -> None:
    launcher = launch(tmp_path, "wait")
    pids = started(tmp_path)
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(timeout=180) == 128 + signal.SIGTERM
    assert [(tmp_path / f"stopped-{rank}").read_text() for rank in (0, 1)] == ["15", "15"]
    assert not any(map(alive, pids))


@pytest.mark.serial
def test_no_process_outlives_a_killed_launcher(tmp_path: Path) -> None:
    launcher = launch(tmp_path, "wait")
    pids = started(tmp_path)
    launcher.kill()
    launcher.wait(timeout=60)
    wait_for(lambda: not any(map(alive, pids)))


@pytest.mark.serial
def test_no_worker_outlives_a_killed_torchrun(tmp_path: Path) -> None:
    launcher = launch(tmp_path, "wait")
    pids = started(tmp_path)
    agent = int(Path(f"/proc/{pids[0]}/stat").read_text().rsplit(")", 1)[1].split()[1])
    os.kill(agent, signal.SIGKILL)
    assert launcher.wait(timeout=60) == 137
    wait_for(lambda: not any(map(alive, pids)))
