"""From a configuration to the ranks of a run and the models on them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from rlmca.config import RunConfig
from rlmca.engines.megatron import MegatronEngine
from rlmca.engines.setup import engine_options
from rlmca.layouts import ModelLayout
from rlmca.models.spec import choose_spec
from rlmca.observe.console import note
from rlmca.parallel import groups
from rlmca.parallel.groups import Parallel
from rlmca.run.source import Source
from rlmca.transfer.export import export_hf
from rlmca.transfer.source import read_hf_config
from rlmca.workers import SpmdGroup, WorkerGroup


def start_parallel(cfg: RunConfig) -> Parallel:
    """The process groups of the run, from what torchrun told this process (nothing: a world of one)."""
    env = cfg.env
    return groups.start(
        tp=cfg.megatron.tensor_model_parallel_size,
        pp=cfg.megatron.pipeline_model_parallel_size,
        rank=env.rank or 0,
        world_size=env.world_size or 1,
        local_rank=env.local_rank or 0,
        seed=cfg.train.seed,
        timeout_s=cfg.train.ddp_timeout,
    )


def build_role(cfg: RunConfig, folder: Path, parallel: Parallel, *, trainable: bool = True) -> WorkerGroup:
    """A model on the ranks of the run: the policy, or a frozen reference."""
    layout = ModelLayout(read_hf_config(folder), spec=choose_spec(cfg.megatron.transformer_impl))
    fresh = trainable and cfg.model.train_from_scratch
    options = engine_options(cfg)
    return SpmdGroup(MegatronEngine(layout, parallel, options, folder=None if fresh else folder, trainable=trainable), parallel)


def export_policy(cfg: RunConfig, policy: WorkerGroup, source: Source) -> Path | None:
    """The Hugging Face folder at the end of a run, `output_dir/hf`; None when `save_hf_model` is off."""
    if not cfg.train.save_hf_model:
        return None
    target = Path(str(cfg.train.output_dir)) / "hf"
    dtype = torch.bfloat16 if cfg.train.bf16 else torch.float32
    export_hf(policy.weights(), target, source.folder, source.tokenizer, dtype=dtype, shard_gb=cfg.export.export_size, overwrite=True)
    return target


def say(parallel: Parallel) -> Callable[[str], None]:
    """A line for the console, printed by the main rank alone."""
    return note if parallel.is_main else (lambda text: None)
