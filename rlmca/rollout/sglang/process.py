"""A process of one's own that leaves nothing behind: its whole group ends with it, and it ends with us.

A thread of its own starts the process and waits for it. That matters twice: the kernel's "end with your parent" speaks of
the *thread* that started a process, and somebody has to clear the group away the moment its leader dies, while the
leader's number cannot yet be given to another process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

_LINGER_S = 2.0
"""Seconds that a dead leader's helpers have to end by themselves: its resource tracker frees shared memory."""
_GONE_S = 10.0


class OwnProcess:
    """A command in its own session and process group, its output in `log`. Raises OSError when it cannot be started."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        self._command, self._env, self._log = list(command), dict(env), log
        self._started, self._ended = threading.Event(), threading.Event()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._error: OSError | None = None
        threading.Thread(target=self._keep, name=f"keeps {log.name}", daemon=True).start()
        self._started.wait()
        if self._error is not None:
            raise self._error

    @property
    def pid(self) -> int:
        """Number of the process and of its group."""
        assert self._process is not None
        return self._process.pid

    @property
    def alive(self) -> bool:
        """False once the process has ended and its group is cleared away."""
        return not self._ended.is_set()

    def wait(self, seconds: float) -> bool:
        """Waits for the end of process and group; False when they are still there after `seconds`."""
        return self._ended.wait(seconds)

    def kill(self) -> None:
        """Ends process and group. SGLang answers SIGTERM by draining (12 s) and has nothing to save, so none is sent."""
        with self._lock:
            process = self._process
            if process is not None and process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
        self.wait(_LINGER_S + 2 * _GONE_S)

    def how_it_ended(self) -> str:
        """`ended with exit status 1`, `was killed by SIGKILL`, or `is running`."""
        code = None if self._process is None else self._process.returncode
        if code is None:
            return "is running"
        return f"ended with exit status {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"

    def _keep(self) -> None:
        try:
            with open(self._log, "ab", opener=_private) as out:
                self._process = subprocess.Popen(
                    self._command, env=self._env, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
                )
        except OSError as error:
            self._error = error
            self._ended.set()
            return
        finally:
            self._started.set()
        with contextlib.suppress(ChildProcessError):  # where SIGCHLD is ignored, ended children are gone at once
            os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)  # ended, not yet reaped: its number is still taken
        _wait_until_empty(self._process.pid, _LINGER_S)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        _wait_until_empty(self._process.pid, _GONE_S)
        with self._lock:
            self._process.wait()
        self._ended.set()


def group_members(group: int) -> list[int]:
    """Processes of a group that have not ended (Linux; elsewhere none are found)."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, its_group = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[:3]
        except (OSError, ValueError):  # it ended meanwhile
            continue
        if int(its_group) == group and state not in "ZX":
            found.append(int(stat.parent.name))
    return found


def _wait_until_empty(group: int, seconds: float) -> None:
    until = time.monotonic() + seconds
    while group_members(group) and time.monotonic() < until:
        time.sleep(0.05)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
