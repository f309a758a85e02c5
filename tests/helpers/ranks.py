"""Real processes for parallel tests: one pool of gloo ranks per world size, kept for the whole test session.

The processes are no daemons, since a save starts writers of its own; they end when their pipe closes, whatever
happens to the test process.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

TIMEOUT_S = 300
MOST_THREADS = 200
"""Process groups that libraries never end leave threads which poll for ever: beyond so many in a rank, new processes are cheaper."""


class RankPool:
    """`world_size` processes that run the same function at the same time: `pool.run(function, *args)` -> results by rank.

    Functions must be importable (module level). A failure on any rank ends the pool and raises with that rank's
    traceback; the next `run` starts new processes.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((function, args))
        results: dict[int, Any] = {}
        threads = 0
        pending = dict(enumerate(self._pipes))
        try:
            while pending:
                ready = wait(list(pending.values()), timeout=TIMEOUT_S)
                if not ready:
                    raise TimeoutError(f"ranks {sorted(pending)} did not answer within {TIMEOUT_S} s")
                for rank, pipe in list(pending.items()):
                    if pipe in ready:
                        ok, value, count = pipe.recv()
                        threads = max(threads, count)
                        if not ok:
                            raise AssertionError(f"rank {rank} of {self.world_size} failed:\n{value}")
                        results[rank] = value
                        del pending[rank]
        except BaseException:
            self.close()
            raise
        if threads > MOST_THREADS:
            self.close()
        return [results[rank] for rank in range(self.world_size)]

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.world_size, port, theirs))
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._pipes = [], []


def _serve(rank: int, world_size: int, port: int, pipe: Connection) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
    )
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, function(*args), _threads()))
        except Exception:
            pipe.send((False, traceback.format_exc(), _threads()))


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


_POOLS: dict[int, RankPool] = {}


def rank_pool(world_size: int) -> RankPool:
    """The session's pool of that size; all pools end with the session, also after failures."""
    if world_size not in _POOLS:
        _POOLS[world_size] = RankPool(world_size)
    return _POOLS[world_size]


def close_pools() -> None:
    """End every pool."""
    while _POOLS:
        _POOLS.popitem()[1].close()


atexit.register(close_pools)
