"""From a run's configuration to process groups and engines."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rlmca.config import RunConfig, virtual_stages
from rlmca.engines.base import Engine
from rlmca.observe.console import note
from rlmca.parallel import groups
from rlmca.parallel.groups import Parallel
from rlmca.transfer.hf_folder import layout_of_folder
from rlmca.transfer.kept import kept_note

_logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

# Engines are imported where one is chosen: a run on one of them must not need what the other is built on.


def start_parallel(cfg: RunConfig, *, rank: int, world_size: int, local_rank: int, store: Store | None = None) -> Parallel:
    """The process groups of the run's engine; without a `store` the rendezvous is torchrun's."""
    seed, timeout_s = cfg.train.seed, cfg.train.ddp_timeout
    if cfg.engine == "huggingface":
        return groups.start(rank=rank, world_size=world_size, local_rank=local_rank, seed=seed, timeout_s=timeout_s, store=store)
    from rlmca.parallel import megatron

    return megatron.start(
        tp=cfg.megatron.tensor_model_parallel_size,
        pp=cfg.megatron.pipeline_model_parallel_size,
        cp=cfg.megatron.context_parallel_size,
        vpp=virtual_stages(cfg),
        ep=cfg.megatron.expert_model_parallel_size,
        etp=cfg.megatron.expert_tensor_parallel_size,
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        seed=seed,
        timeout_s=timeout_s,
        store=store,
    )


def end_parallel(cfg: RunConfig) -> None:
    """End what `start_parallel` started."""
    if cfg.engine == "huggingface":
        groups.close()
        return
    from rlmca.parallel import megatron

    megatron.close()


def build_engine(cfg: RunConfig, folder: Path, parallel: Parallel, *, trainable: bool = True) -> Engine:
    """A model with the weights of the Hugging Face folder; with `train_from_scratch` what is trained gets fresh ones."""
    fresh = trainable and cfg.model.train_from_scratch
    if cfg.engine == "huggingface":
        from rlmca.engines.huggingface import HuggingFaceEngine
        from rlmca.engines.huggingface_setup import huggingface_options

        own = huggingface_options(cfg)
        return HuggingFaceEngine(folder, parallel, own if trainable else replace(own, lora=None), fresh=fresh, trainable=trainable)
    from rlmca.engines.megatron import MegatronEngine
    from rlmca.engines.megatron_setup import engine_options
    from rlmca.models.spec import choose_spec

    options = engine_options(cfg)
    if not trainable:
        options = replace(options, lora=None)  # a model to compare with is what its folder holds: adapters are the policy's
    layout = layout_of_folder(folder, choose_spec(options.build.transformer_impl))
    if trainable and not fresh and parallel.is_main and (text := kept_note(folder, layout.megatron.kept)):
        note(text)
    wanted = cfg.megatron.moe_grouped_gemm and "moe_grouped_gemm" in cfg.given and layout.megatron.num_experts
    if wanted and layout.spec == "local" and trainable and parallel.is_main:
        _logger.warning("moe_grouped_gemm: true needs Transformer Engine: experts run one after the other here, with the same result")
    return MegatronEngine(layout, parallel, options, folder=None if fresh else folder, trainable=trainable)
