"""How many processes a run has, and starting them: torchrun as a child in its own process group.

Invariants: nothing is started before the configuration is checked; signals reach the child; when this process or
torchrun ends, however it ends, so do the processes below it; the exit status is that of the first process that failed.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType

from rlmca.config import ConfigError, Environment, RunConfig

SHUTDOWN_SECONDS = 300
"""A stopped run finishes its step and writes a checkpoint; torchrun waits this long before it kills."""


@dataclass(frozen=True)
class Launch:
    """`nproc` processes on this machine, every possible world size (several in an elastic run), and who starts them.

    With neither torchrun nor Ray the run is this process. With `ray` this process executes the loop and Ray starts the ranks.
    """

    nproc: int
    world_sizes: tuple[int, ...]
    torchrun: bool
    ray: bool = False


def local_devices(cfg: RunConfig) -> int:
    """CUDA devices of this machine that the run may use; 0 with use_cpu. Asked of torch, which is needed from here on."""
    if cfg.train.use_cpu or cfg.env.under_torchrun or cfg.env.nproc_per_node is not None:
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def plan_launch(cfg: RunConfig, devices: int) -> Launch:
    """Processes of a run: ray_num_workers or NPROC_PER_NODE, else one a device, else one.

    Several ranks are Ray actors in stage grpo, whose loop is one process, and torchrun's processes in the other stages, unless
    `use_ray` says otherwise. ConfigError when the environment asks for what the launcher cannot do.
    """
    env, processes = cfg.env, cfg.processes
    if env.under_torchrun:
        launch = Launch(nproc=1, world_sizes=(env.world_size or 1,), torchrun=False)
    else:
        nproc = env.nproc_per_node or max(1, devices)
        if env.min_nnodes is not None and env.max_nnodes is not None:
            nodes = range(env.min_nnodes, env.max_nnodes + 1)
        else:
            nodes = range(env.nnodes or 1, (env.nnodes or 1) + 1)
        worlds = tuple(n * nproc for n in nodes)
        launch = Launch(nproc=nproc, world_sizes=worlds, torchrun=env.force_torchrun or max(worlds) > 1)
    asked = bool(processes.ray_num_workers or processes.ray_address or processes.ray_init_kwargs)
    several = cfg.stage == "grpo" and (max(launch.world_sizes) > 1 or asked)
    if not (processes.use_ray or several):
        return launch
    errors = _ray_errors(cfg)
    if errors:
        raise ConfigError(errors)
    ranks = processes.ray_num_workers or launch.nproc
    return Launch(nproc=ranks, world_sizes=(ranks,), torchrun=False, ray=True)


def _ray_errors(cfg: RunConfig) -> list[str]:
    env, processes = cfg.env, cfg.processes
    if env.under_torchrun:
        return [f"stage {cfg.stage} over {env.world_size} processes of torchrun: its ranks are Ray actors; start it once, without torchrun"]
    if processes.use_ray is False:
        return [f"use_ray: false, but stage {cfg.stage} over several processes needs Ray: leave it out, or set NPROC_PER_NODE=1"]
    errors = []
    if (env.nnodes or 1) > 1 or env.max_nnodes is not None or env.node_rank:
        errors.append(
            "NNODES, NODE_RANK, MIN_NNODES, MAX_NNODES belong to torchrun; on Ray start the run once and write ray_address "
            "(of a cluster made with `ray start`) and ray_num_workers"
        )
    of_torchrun = [name for name, value in (("RDZV_ID", env.rdzv_id), ("MAX_RESTARTS", env.max_restarts)) if value is not None]
    if of_torchrun:
        errors.append(f"{' and '.join(of_torchrun)}: belongs to torchrun, and ranks of this run are Ray actors: unset it")
    if env.force_torchrun:
        errors.append("FORCE_TORCHRUN=1 and Ray exclude each other: unset it, or set NPROC_PER_NODE=1 and leave use_ray out")
    if importlib.util.find_spec("ray") is None:
        errors.append("Ray is not installed, and ranks of this run are Ray actors: pip install 'ray>=2.49'")
    return errors


def torchrun_arguments(launch: Launch, env: Environment) -> list[str]:
    """torchrun's own arguments. Without MASTER_PORT one machine binds a free port by itself."""
    arguments = [f"--nproc-per-node={launch.nproc}", f"--shutdown-timeout={SHUTDOWN_SECONDS}"]
    if env.max_restarts is not None:
        arguments.append(f"--max-restarts={env.max_restarts}")
    address = env.master_addr or "127.0.0.1"
    if env.rdzv_id is not None:
        nodes = f"{env.min_nnodes}:{env.max_nnodes}" if env.min_nnodes is not None else str(env.nnodes or 1)
        endpoint = f"{address}:{env.master_port or 0}"
        return [*arguments, f"--nnodes={nodes}", f"--rdzv-id={env.rdzv_id}", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}"]
    if (env.nnodes or 1) == 1 and env.master_port is None:
        return [*arguments, "--standalone"]
    return [
        *arguments,
        f"--nnodes={env.nnodes or 1}",
        f"--node-rank={env.node_rank or 0}",
        f"--master-addr={address}",
        f"--master-port={env.master_port}",
    ]


def start(launch: Launch, env: Environment, config: str, overrides: Sequence[str]) -> int:
    """Run the worker under torchrun; the exit status of the first process that failed, or 0."""
    command = [sys.executable, "-m", "rlmca.cli.torchrun", *torchrun_arguments(launch, env), "-m", "rlmca.cli.worker", config, *overrides]
    return run_child(command)


def run_child(command: Sequence[str]) -> int:
    """Run a command in a process group of its own; SIGTERM and SIGINT go to that group, the third one kills it.

    Returns its exit status (128 + n when signal n ended it).
    """
    received: list[int] = []
    child: subprocess.Popen[bytes] | None = None

    def forward(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if child is not None:
            _signal_group(child.pid, number if len(received) < 3 else signal.SIGKILL)

    before = {number: signal.signal(number, forward) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        child = subprocess.Popen(command, start_new_session=True)
        if received:
            _signal_group(child.pid, received[-1])
        status = child.wait()
    finally:
        if child is not None:
            _signal_group(child.pid, signal.SIGKILL)
        for number, handler in before.items():
            signal.signal(number, handler)
    return status if status >= 0 else 128 - status


def _signal_group(group: int, number: int) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return
