"""Running the installed program as its user does, in processes of their own."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

RLMCA = (sys.executable, "-m", "rlmca.cli.main")
"""The program behind `rlmca-cli`, in the interpreter that runs now."""


class CommandFailed(RuntimeError):
    """A command that ended with a status other than 0; the text says which and shows the end of its log."""


def run_command(command: Sequence[str], *, env: Mapping[str, str], log: Path | None = None, shown: str | None = None) -> float:
    """Run a command to its end and return its wall seconds.

    `env` comes on top of this process's environment. The output goes to the terminal, or to the file `log`; then only
    the command line is printed (`shown` in its place, where the real one is long).
    """
    prefix = "".join(f"{name}={value} " for name, value in env.items())
    print(f"$ {prefix}{shown or shlex.join(command)}", flush=True)
    start = time.perf_counter()
    if log is None:
        status = subprocess.run(command, env={**os.environ, **env}, check=False).returncode
    else:
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as out:
            status = subprocess.run(command, env={**os.environ, **env}, stdout=out, stderr=subprocess.STDOUT, check=False).returncode
    if status:
        end = "" if log is None else "\n" + "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-20:])
        raise CommandFailed(f"{shown or shlex.join(command)} ended with status {status}{end}")
    return time.perf_counter() - start
