"""Starts the ordinary SGLang server on a machine with CUDA: `python launch.py PARENT_PID [flags of sglang.launch_server]`.

Two things are added to `python -m sglang.launch_server`: the server ends when process PARENT_PID, which started it, ends,
however that happens; and the API key comes from the environment, because everybody on the machine can read a command line.

SGLang starts its workers with the spawn method, which imports this file again under another name: what stands outside
`main` runs in every worker, what stands inside it in the server alone. Workers end with the server by SGLang's own means.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

API_KEY_VARIABLE = "RLMCA_SGLANG_API_KEY"
_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int) -> None:
    """Be killed when process `parent` ends; at once when it has ended already (Linux: the kernel sees to it)."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def server_arguments(arguments: list[str], api_key: str | None) -> list[str]:
    """Flags for `sglang.launch_server`, the API key added."""
    return [*arguments, *([f"--api-key={api_key}"] if api_key else [])]


def main(arguments: list[str]) -> None:
    """`arguments`: the parent's process id, then flags of `sglang.launch_server`."""
    end_with_parent(int(arguments[0]))
    sys.argv[1:] = server_arguments(arguments[1:], os.environ.pop(API_KEY_VARIABLE, None))
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=False)


if __name__ == "__main__":
    main(sys.argv[1:])
