"""From a configuration to what a stage works with: tokenizer, template, model folder, policy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from rlmca.config import RunConfig
from rlmca.data import ChatTemplate, DataError, load_tokenizer, stop_ids
from rlmca.engines.megatron import MegatronEngine
from rlmca.engines.setup import engine_options
from rlmca.layouts import ModelLayout
from rlmca.models.spec import choose_spec
from rlmca.observe.console import note
from rlmca.parallel import groups
from rlmca.parallel.groups import Parallel
from rlmca.rollout.base import SamplingParams
from rlmca.rollout.samples import stop_text_ids
from rlmca.transfer.export import export_hf
from rlmca.transfer.source import read_hf_config, resolve_model
from rlmca.workers import SpmdGroup, WorkerGroup


@dataclass(frozen=True)
class Source:
    """The model a run starts from: its folder, tokenizer and chat template."""

    folder: Path
    tokenizer: Any
    template: ChatTemplate

    def stop_ids(self, stop: list[str]) -> tuple[int, ...]:
        """Every id that ends a reply: of the generation config, the tokenizer, the template, and the texts in `stop`."""
        generation = GenerationConfig.from_pretrained(self.folder) if (self.folder / "generation_config.json").is_file() else None
        try:
            texts = stop_text_ids(self.tokenizer, stop)
        except ValueError as error:
            raise DataError(str(error)) from None
        return stop_ids(self.tokenizer, generation, (self.template.end_id, *texts))


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


def open_source(cfg: RunConfig, model: str | None = None) -> Source:
    """Find the model's files and read its tokenizer."""
    folder = resolve_model(model or str(cfg.model.model_name_or_path), cfg.model)
    tokenizer = load_tokenizer(_at(cfg, folder))
    return Source(folder, tokenizer, ChatTemplate(tokenizer, cfg.model.template, cfg.data.enable_thinking, cfg.data.default_system))


def sampling_params(cfg: RunConfig, source: Source, *, greedy: bool = False) -> SamplingParams:
    """How the YAML wants replies drawn."""
    generation = cfg.generation
    return SamplingParams(
        temperature=0.0 if greedy or not generation.do_sample else generation.temperature,
        top_p=generation.top_p,
        top_k=generation.top_k,
        max_new_tokens=generation.max_new_tokens,
        stop_ids=source.stop_ids(generation.stop),
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


def _at(cfg: RunConfig, folder: Path) -> Any:
    import dataclasses

    return dataclasses.replace(cfg.model, model_name_or_path=str(folder))
