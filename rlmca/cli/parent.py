"""A process that must not outlive the one that started it (Linux: the kernel sees to it)."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def end_with_parent(number: signal.Signals, parent: int) -> None:
    """Get signal `number` when process `parent`, which started this one, ends; at once when it has ended already."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number))
    if os.getppid() != parent:
        os.kill(os.getpid(), number)
