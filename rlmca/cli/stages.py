"""From a checked configuration to the code that runs it, imported only then."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rlmca.cli import show
from rlmca.config import ConfigError, LateError, RunConfig

Runner = Callable[[RunConfig], Mapping[str, Any] | Path]


def run_command(cfg: RunConfig, command: str) -> int:
    """Run a command in this process; the exit status. Mistakes of the user come back as ConfigError."""
    if cfg.env.is_main:
        show.notes(cfg)
    runner = _runner(cfg, command)
    from rlmca.run.session import Interrupted

    try:
        results = runner(cfg)
    except _user_errors() as error:
        raise LateError(str(error).splitlines() or [type(error).__name__]) from error
    except ConfigError as error:
        raise LateError(error.errors) from error
    except Interrupted as error:
        if cfg.env.is_main:
            show.message(str(error))
        return 128 + error.signal_number
    if cfg.env.is_main and command == "train" and isinstance(results, Mapping):
        show.results(f"train {cfg.stage}", results)
    return 0


def _runner(cfg: RunConfig, command: str) -> Runner:
    if command == "eval":
        from rlmca.run.commands import run_eval

        return run_eval
    if command == "generate":
        from rlmca.run.commands import run_generate

        return run_generate
    if command == "chat":
        from rlmca.run.chat import run_chat

        return run_chat
    if command == "export":
        from rlmca.run.commands import run_export

        return run_export
    if cfg.stage == "grpo":
        from rlmca.rl import grpo

        return grpo.run
    if cfg.stage == "pt":
        from rlmca.supervised import pt

        return pt.run
    if cfg.stage == "dpo":
        from rlmca.supervised import dpo

        return dpo.run
    from rlmca.supervised import sft

    return sft.run


def _user_errors() -> tuple[type[Exception], ...]:
    """Errors that say what to write instead; a traceback would only hide that."""
    from rlmca.data import DataError
    from rlmca.engines.freeze import FreezeError
    from rlmca.layouts import LayoutError, UnsupportedField
    from rlmca.layouts.adapters import UnknownTarget
    from rlmca.rewards import RewardError
    from rlmca.rewards.user import BadReward
    from rlmca.rollout.base import RolloutError
    from rlmca.run.checkpoint import CheckpointError
    from rlmca.run.commands import CommandError
    from rlmca.run.output import OutputDirError
    from rlmca.transfer.hf_folder import HFFolderError
    from rlmca.transfer.source import ModelNotFound
    from rlmca.workers import WorkerError

    return (
        DataError,
        FreezeError,
        LayoutError,
        UnknownTarget,
        UnsupportedField,
        OutputDirError,
        CheckpointError,
        CommandError,
        HFFolderError,
        ModelNotFound,
        BadReward,
        RewardError,
        RolloutError,
        WorkerError,
    )
