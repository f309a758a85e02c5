"""Ends what a run leaves of the processes below it, however it ended: `python guardian.py PID` with a pipe as its stdin.

Run by path as a process of its own, so it imports the standard library alone. While process PID lives (the pipe is open)
the guardian keeps a list of all processes below it; when the pipe closes it gives them a moment and kills the rest.
Ray's own agents notice a killed run only after a minute.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from pathlib import Path

_EVERY_SECONDS = 2.0
_GRACE_SECONDS = 3.0


def processes() -> dict[int, tuple[int, str]]:
    """pid -> (parent's pid, time of start) of every process that is no zombie."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with contextlib.suppress(OSError, IndexError):
                fields = (folder / "stat").read_text().rsplit(")", 1)[1].split()
                if fields[0] != "Z":
                    found[int(folder.name)] = int(fields[1]), fields[19]
    return found


def below(root: int, known: dict[int, tuple[int, str]]) -> dict[int, str]:
    """pid -> time of start of all descendants of `root`, this process left out."""
    found: dict[int, str] = {}
    level = {root}
    while level:
        level = {pid for pid, (parent, _) in known.items() if parent in level and pid not in found and pid != os.getpid()}
        found |= {pid: known[pid][1] for pid in level}
    return found


def main() -> None:
    """See the module."""
    root = int(sys.argv[1])
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the run decides when it ends
    seen: dict[int, str] = {}
    while True:
        seen |= below(root, processes())
        if select.select([sys.stdin], [], [], _EVERY_SECONDS)[0] and not os.read(sys.stdin.fileno(), 1):
            break
    end = time.monotonic() + _GRACE_SECONDS
    while left := [pid for pid, (_, started) in processes().items() if seen.get(pid) == started]:
        if time.monotonic() > end:
            for pid in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            break
        time.sleep(0.1)


if __name__ == "__main__":
    main()
