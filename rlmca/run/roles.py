"""From a configuration to the ranks of a run, and what leaves them at the end."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from rlmca.config import RunConfig
from rlmca.observe.console import note
from rlmca.parallel.groups import Parallel
from rlmca.run.source import Source, run_dtype
from rlmca.workers import ExportOptions, Ranks, SpmdRanks, WorkerGroup


def start_ranks(cfg: RunConfig) -> Ranks:
    """The processes that hold the run's models: Ray actors, or the processes that execute the loop themselves."""
    if cfg.ray_ranks is not None:
        # Read when Ray is imported. Its deduplication takes lines that differ in numbers for one line.
        os.environ.setdefault("RAY_DEDUP_LOGS", "0")
        from rlmca.workers.ray import RayRanks  # Ray is needed only here

        return RayRanks(cfg, cfg.ray_ranks)
    return SpmdRanks(cfg)


def export_policy(cfg: RunConfig, policy: WorkerGroup, source: Source) -> Path | None:
    """The Hugging Face folder at the end of a run, `output_dir/hf`; None when `save_hf_model` is off.

    An adapter is merged into it, and written by itself into `output_dir` as LLaMA-Factory does.
    """
    export_adapter(cfg, policy, Path(str(cfg.train.output_dir)))
    if not cfg.train.save_hf_model:
        return None
    target = Path(str(cfg.train.output_dir)) / "hf"
    policy.export(ExportOptions(target, source.folder, run_dtype(cfg), cfg.export.export_size), source.tokenizer)
    return target


def export_adapter(cfg: RunConfig, policy: WorkerGroup, folder: Path) -> None:
    """With finetuning_type: lora the adapter in PEFT's format, into the existing `folder`."""
    if cfg.finetuning.lora:
        policy.export_adapter(folder, cfg.model.model_name_or_path)


def say(parallel: Parallel) -> Callable[[str], None]:
    """A line for the console, printed by the main process of the loop alone."""
    return note if parallel.is_main else (lambda text: None)
