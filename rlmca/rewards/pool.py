"""A bounded pool of processes for checks that may hang: what runs too long is killed, and the worker replaced.

Uses pebble, which times each task from the moment a worker takes it, kills the worker and starts another.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

from pebble import ProcessFuture, ProcessPool

from rlmca.rewards.base import Failure

MEMORY_LIMIT = 4 * 2**30
"""Bytes of private memory a checking process may hold: 9^9^9 must end in MemoryError, not in the machine's memory."""


class CheckPool:
    """Runs checks in at most `workers` processes, each check for at most `timeout` seconds.

    Nothing is started before the first check. Usable from several threads. Processes import `modules` before
    they take checks, so the time of imports is in no check's limit.
    """

    def __init__(self, workers: int, timeout: float, modules: Sequence[str] = ()) -> None:
        if workers < 1 or not timeout > 0:
            raise ValueError(f"a pool of checks needs at least 1 worker and a positive limit in seconds, not {workers} and {timeout}")
        self.workers = workers
        self.timeout = timeout
        self._modules = tuple(modules)
        self._lock = threading.Lock()
        self._pool: ProcessPool | None = None
        self._waiting: set[ProcessFuture[Any]] = set()

    def run(self, check: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """`check(*arguments[i])` for every i, in order; a `Failure` where it hung, raised or died.

        `check` must be importable by name and its arguments and results picklable.
        """
        if not arguments:
            return []
        with self._lock:
            pool = self._started()
            futures = [pool.schedule(check, args=args, timeout=self.timeout) for args in arguments]
            self._waiting.update(futures)
        try:
            return [self._outcome(future) for future in futures]
        finally:
            with self._lock:
                self._waiting.difference_update(futures)

    def close(self) -> None:
        """Ends all processes, also those that are busy: their checks fail. The pool may be used again; it starts anew then."""
        with self._lock:
            self._stop()

    def _started(self) -> ProcessPool:
        if self._pool is not None and not self._pool.active:
            self._stop()  # it broke, and would refuse every check from now on
        if self._pool is None:
            # spawn: a fork would copy a process full of threads (torch, gloo), which may deadlock in the child
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPool(self.workers, initializer=_prepare, initargs=(self._modules, os.getpid()), context=context)
        return self._pool

    def _stop(self) -> None:
        if self._pool is not None:
            self._pool.stop()
            self._pool.join()
            self._pool = None
        # a stopped pool never answers for what it had taken: whoever waits is told here
        for future in self._waiting:
            future.cancel()

    def _outcome(self, future: ProcessFuture[Any]) -> Any:
        try:
            return future.result()
        except FutureTimeout:
            return Failure("timeout", f"a check ran for more than {self.timeout:g} s and was stopped")
        except Exception as error:
            return Failure.of(error)


def _prepare(modules: Sequence[str], parent: int) -> None:
    # pebble's own handler for SIGTERM runs between bytecodes: a loop inside C code would never see it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = MEMORY_LIMIT if hard == resource.RLIM_INFINITY else min(MEMORY_LIMIT, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (wanted, hard))
    threading.Thread(target=_leave_with, args=(parent,), daemon=True).start()
    for module in modules:
        importlib.import_module(module)


def _leave_with(parent: int) -> None:
    """Ends this process when its parent was killed: a hung check would otherwise burn a core for good."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)
