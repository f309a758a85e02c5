"""Runs Python programs of strangers, each in a jail of its own (`jail.py`)."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SYSTEM = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib64", "/lib32"),
    *("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/alternatives", "/etc/localtime", "/nix/store"),
)
"""What a program sees of the machine besides the interpreter's own folders, read-only."""
FIRST_USER, USERS = 50_000, 10_000
"""Users that programs run as when root starts them: one each, so that the limit of processes counts each alone."""


@dataclass(frozen=True)
class Limits:
    """Of one program. `seconds`: of the clock, and of the processor in each process. `memory_mb`: address space of each process.
    `output_kb`: standard output, and every file it writes. `disk_mb`: its files together (they are held in memory)."""

    seconds: float = 5.0
    memory_mb: int = 1024
    processes: int = 16
    output_kb: int = 1024
    disk_mb: int = 64

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise ValueError(f"option {name!r} must be above 0, not {value}")


@dataclass(frozen=True)
class Ran:
    """How a program ended. `status`: its exit status, 128 + signal when killed."""

    stdout: bytes
    status: int
    timed_out: bool


class SandboxError(RuntimeError):
    """The jail could not be built: nothing is known about the program."""


class Sandbox:
    """Runs programs one at a time in each calling thread; holds nothing open between runs.

    python: an interpreter whose packages the programs may import; None: the one that runs this, standard
    library only. apart: with namespaces of their own (no network, a file system and processes of their own);
    else limits only.
    """

    def __init__(self, limits: Limits, python: str | None = None, *, apart: bool = True) -> None:
        self.limits = limits
        self.apart = apart
        flags = ["-I", "-B", "-X", "utf8", *(["-S"] if python is None else [])]
        executable, folders = _interpreter(python)
        self._command = [executable, *flags]
        self._visible = [*SYSTEM, *folders]

    def run(self, files: Mapping[str, str], stdin: str, seconds: float | None = None) -> Ran:
        """Runs `files["main.py"]` in a folder that holds `files`, for at most `seconds` (those of the limits when not given).

        Nothing of it is left when this returns: processes are killed, files are removed. Raises SandboxError
        when the program could not be started.
        """
        limit = self.limits.seconds if seconds is None else seconds
        with tempfile.TemporaryDirectory(prefix="rlmca-code-", ignore_cleanup_errors=True) as folder:
            root = Path(folder)
            (root / "root").mkdir()
            (root / "stdin").write_text(stdin, encoding="utf-8", errors="replace")
            (root / "stdout").touch()
            (root / "plan.json").write_text(json.dumps(self._plan(files, limit)))
            report = _report(folder, limit)
            if report["trouble"]:
                raise SandboxError(report["trouble"])
            with (root / "stdout").open("rb") as file:
                return Ran(file.read(self.limits.output_kb * 1024), report["status"], report["timed_out"])

    def _plan(self, files: Mapping[str, str], seconds: float) -> dict[str, Any]:
        limits = self.limits
        return {
            "apart": self.apart,
            "parent": os.getpid(),
            "uid": FIRST_USER + int.from_bytes(os.urandom(4)) % USERS,
            "visible": self._visible,
            "files": {name: text.encode("utf-8", "replace").decode() for name, text in files.items()},
            "argv": [*self._command, "main.py"],
            "environment": {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"},
            "seconds": seconds,
            "disk": limits.disk_mb * 2**20,
            "limits": {
                "CPU": int(seconds) + 1,
                "AS": limits.memory_mb * 2**20,
                "NPROC": limits.processes,
                "FSIZE": limits.output_kb * 1024,
                "NOFILE": 64,
                "CORE": 0,
            },
        }


def _report(folder: str, seconds: float) -> dict[str, Any]:
    """What the jail says. It keeps the time itself; the limit here is for a jail that hangs."""
    command = [sys.executable, "-I", "-S", str(Path(__file__).with_name("jail.py")), folder]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd="/", env={}, start_new_session=True
    ) as jail:
        try:
            out, err = jail.communicate(timeout=seconds + 20)
        except BaseException as error:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(jail.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                raise SandboxError(f"the jail did not answer in {seconds + 20:g} s") from None
            raise
    try:
        return dict(json.loads(out))
    except ValueError:
        raise SandboxError(f"the jail ended with status {jail.returncode}: {err.decode(errors='replace')[-500:]}") from None


def _interpreter(python: str | None) -> tuple[str, list[str]]:
    """(the executable, the folders that it needs)."""
    if python is None:
        # not the virtual environment's: without `site` it needs only what the real one needs
        executable = os.path.realpath(sys.executable)
        return executable, [sys.base_prefix]
    ask = "import sys, json; print(json.dumps([sys.executable, sys.prefix, sys.base_prefix]))"
    try:
        out = subprocess.run([python, "-I", "-c", ask], capture_output=True, text=True, check=True, timeout=60, env={}).stdout
        executable, *folders = json.loads(out)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise ValueError(f"option 'python': {python!r} is no Python interpreter that runs: {error}") from None
    return executable, list(dict.fromkeys(folders))
