"""The Ray cluster of a run: a local one that lives as long as the run, or one that exists already."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray

from rlmca.config import RunConfig
from rlmca.workers.base import WorkerError

_LONGEST_FOLDER = 30
_FORWARDED = ("NCCL_", "GLOO_", "HF_", "TORCH_", "OMP_", "MKL_", "CUDA_DEVICE_MAX_CONNECTIONS", "PYTHONHASHSEED", "TOKENIZERS_PARALLELISM")


def connect(stack: contextlib.ExitStack, cfg: RunConfig, world_size: int) -> bool:
    """Connect this process to a cluster until `stack` closes; True when it is one of this machine alone.

    Without `ray_address` a cluster is started that demands the user's token and ends with this process.
    """
    processes = cfg.processes
    if ray.is_initialized():
        return processes.ray_address is None
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # one rank's error ends a call; what the others say of it is noise
    arguments: dict[str, Any] = {"log_to_driver": True, "logging_level": "ERROR"}
    if processes.ray_address is None:
        cpus = max(os.cpu_count() or 1, world_size)
        # "local": no cluster that happens to run on this machine, or that RAY_ADDRESS names, is meant
        arguments |= {"address": "local", "num_cpus": cpus, "include_dashboard": False}
        if len(tempfile.gettempdir()) > _LONGEST_FOLDER:
            arguments["_temp_dir"] = "/tmp/ray"  # addresses of Ray's sockets are limited to 107 characters
    else:
        arguments |= {"address": processes.ray_address}
    if processes.ray_address is None:
        stack.enter_context(_guarded())
    try:
        with _terminate_blocked():
            ray.init(**arguments | processes.ray_init_kwargs)
    except (OSError, ValueError, TypeError, RuntimeError) as error:
        where = "ray_init_kwargs" if processes.ray_address is None else f"ray_address: {processes.ray_address}"
        raise WorkerError(f"{where}: Ray did not start: {str(error).splitlines()[0]}") from error
    stack.callback(ray.shutdown)
    return processes.ray_address is None


@contextlib.contextmanager
def _terminate_blocked() -> Iterator[None]:
    """Processes started meanwhile never see SIGTERM.

    Schedulers send it to a whole process group. The run answers with a checkpoint, for which it needs its cluster.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _guarded() -> Iterator[None]:
    """A guardian that ends the cluster's processes should this one be killed."""
    command = [sys.executable, str(Path(__file__).with_name("guardian.py")), str(os.getpid())]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        yield
    finally:
        process.kill()  # an orderly end needs no guardian
        process.wait()


def rank_resources(cfg: RunConfig, world_size: int) -> dict[str, float]:
    """What one rank takes of the cluster: a core and, where there are any, a GPU. WorkerError when all ranks can never fit."""
    total = ray.cluster_resources()
    one: dict[str, float] = {"CPU": 1}
    if total.get("GPU", 0) and not cfg.train.use_cpu:
        one["GPU"] = 1
    for kind, amount in one.items():
        if total.get(kind, 0) < world_size * amount:
            raise WorkerError(
                f"{world_size} ranks take {world_size * amount:g} {kind}s and the Ray cluster has {total.get(kind, 0):g}: "
                "lower ray_num_workers (or NPROC_PER_NODE), or add nodes"
            )
    return one


def forwarded_environment(cfg: RunConfig) -> dict[str, str]:
    """Variables of this process that ranks on other nodes need too: settings of NCCL, gloo, threads and the hub."""
    found = {name: value for name, value in os.environ.items() if name.startswith(_FORWARDED)}
    found.setdefault("OMP_NUM_THREADS", "1")
    if cfg.train.use_cpu:
        found["CUDA_VISIBLE_DEVICES"] = ""
    return found
