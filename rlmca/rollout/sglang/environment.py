"""Which Python has SGLang, and whether a configuration means SGLang at all."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Literal

import torch

from rlmca.config import ConfigError, RunConfig

BESIDE = Path(".venv-sglang") / "bin" / "python"
"""Where the set-up puts SGLang's environment: beside the folder of the trainer's own."""

_FIND = "import importlib.util, sys; s = importlib.util.find_spec('sglang'); sys.exit(s is None or s.origin is None)"
"""A folder of that name, without an `__init__.py`, is no SGLang; -I keeps the current folder out."""


def sglang_python(configured: str | None = None) -> Path:
    """The Python that runs servers: the configured one, else the trainer's own, else the one in `.venv-sglang`.

    Raises ConfigError when the configured one is wrong or there is none.
    """
    if configured is not None:
        path = Path(configured).expanduser()
        problem = _problem(path)
        if problem:
            raise ConfigError(f"sglang: python: {path} {problem}")
        return path
    found = _unconfigured()
    if found is None:
        raise ConfigError(
            f"rollout_engine sglang: neither this environment nor {_beside()} has sglang: "
            "run `make venv`, or write sglang: {python: ...}, the Python of an environment that has it"
        )
    return found


def uses_cuda(cfg: RunConfig) -> bool:
    """True when servers run on CUDA devices."""
    return torch.cuda.is_available() and not cfg.train.use_cpu


def resolve_engine(cfg: RunConfig) -> Literal["local", "sglang"]:
    """The engine that `rollout_engine` means on this machine.

    auto is sglang when `sglang_base_urls` are given, or with a CUDA device and an environment that has SGLang. Raises
    ConfigError when sglang is asked for and cannot run.
    """
    rollout = cfg.rollout
    if rollout.rollout_engine == "local":
        return "local"
    if rollout.sglang_base_urls:
        return "sglang"
    if rollout.rollout_engine == "auto":
        if not uses_cuda(cfg):
            return "local"
        if rollout.sglang.python is None and _unconfigured() is None:
            return "local"
    sglang_python(rollout.sglang.python)
    return "sglang"


def _beside() -> Path:
    return Path(sys.prefix).parent / BESIDE


def _unconfigured() -> Path | None:
    own = importlib.util.find_spec("sglang")
    if own is not None and own.origin is not None:
        return Path(sys.executable)
    return _beside() if _problem(_beside()) is None else None


def _problem(python: Path) -> str | None:
    """Why this Python cannot run servers, or None. SGLang is looked for, not imported."""
    if not python.is_file():
        return "does not exist: write the path of a Python interpreter"
    try:
        done = subprocess.run([str(python), "-I", "-c", _FIND], capture_output=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"cannot be run: {error}"
    return None if done.returncode == 0 else "has no sglang: install it there, or name another"
