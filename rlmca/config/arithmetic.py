"""Batch arithmetic and the process layout: what a run will do, in numbers, before anything is loaded."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from rlmca.config.errors import ConfigError
from rlmca.config.schema import RunConfig


@dataclass(frozen=True)
class BatchPlan:
    """A step is an optimiser step of stages pt, sft and dpo, or a rollout of stage grpo.

    `global_batch` counts rows (pt, sft; packs with packing), pairs (dpo) or prompts (grpo) of a step, `samples` the
    sequences that it trains on.
    """

    num_rows: int
    world_size: int
    data_parallel: int
    micro_batch: int
    accumulation: int
    global_batch: int
    samples: int
    optimizer_steps_per_step: int
    steps_per_epoch: int
    total_steps: int

    @property
    def total_optimizer_steps(self) -> int:
        """Optimiser steps of the whole run."""
        return self.total_steps * self.optimizer_steps_per_step

    @property
    def epochs(self) -> float:
        """Passes over the rows that the run makes."""
        return self.total_steps / self.steps_per_epoch


def model_parallel_size(cfg: RunConfig) -> int:
    """Ranks that hold one copy of the model."""
    m = cfg.megatron
    return m.tensor_model_parallel_size * m.pipeline_model_parallel_size * m.context_parallel_size


def virtual_stages(cfg: RunConfig) -> int:
    """Chunks of the model on each pipeline stage."""
    layout, stages = cfg.megatron.pipeline_model_parallel_layout, cfg.megatron.pipeline_model_parallel_size
    if layout is not None:
        return max(1, len(layout_chunks(layout)) // stages)
    return cfg.megatron.virtual_pipeline_model_parallel_size or 1


def layout_chunks(layout: str) -> list[str]:
    """The chunks of a `pipeline_model_parallel_layout`, repetitions written out: `Et*2|(t|)*2L` is ["Ett", "t", "t", "L"]."""
    text = re.sub(r"[\s,]", "", layout)
    for pattern in (r"\(([^()]*)\)\*(\d+)", r"([A-Za-z])\*(\d+)"):
        while re.search(pattern, text):
            text = re.sub(pattern, lambda found: found[1] * int(found[2]), text)
    return text.split("|")


def layout_errors(cfg: RunConfig, world_size: int) -> list[str]:
    """Why `world_size` processes cannot carry the parallel layout; empty when they can."""
    tensor, pipeline = cfg.megatron.tensor_model_parallel_size, cfg.megatron.pipeline_model_parallel_size
    context = cfg.megatron.context_parallel_size
    size = tensor * pipeline * context
    experts = cfg.megatron.expert_model_parallel_size
    split = tensor if cfg.megatron.expert_tensor_parallel_size is None else cfg.megatron.expert_tensor_parallel_size
    if world_size % size == 0 and world_size % (experts * split * pipeline):
        return [
            f"world size {world_size} is not a multiple of expert tensor {split} x expert {experts} x pipeline {pipeline} = "
            f"{experts * split * pipeline}; change NPROC_PER_NODE or the expert parallel sizes"
        ]
    if world_size % size == 0:
        return []
    fix = f"set NPROC_PER_NODE={size}" if world_size < size else "change NPROC_PER_NODE or the parallel sizes"
    also = f" x context {context}" if context > 1 else ""
    return [f"world size {world_size} is not a multiple of tensor {tensor} x pipeline {pipeline}{also} = {size}; {fix}"]


def batch_plan(cfg: RunConfig, world_size: int, num_rows: int) -> BatchPlan:
    """The batches of a run over `num_rows` rows (with packing: packs; dpo: pairs; grpo: prompts) on `world_size` processes.

    An epoch has floor(rows / global batch) steps; the remaining rows go into the next epoch's order, none is lost.
    ConfigError names both numbers when the run would make no optimiser step, or a mini-batch leaves a rank without a sequence.
    """
    errors = layout_errors(cfg, world_size)
    if errors:
        raise ConfigError(errors)
    data_parallel = world_size // model_parallel_size(cfg)
    micro = cfg.train.per_device_train_batch_size
    if cfg.stage == "grpo":
        rl = cfg.rl
        mini = rl.mini_batch_size or rl.rollout_batch_size
        if rl.rollout_batch_size % mini:
            errors.append(f"rollout_batch_size {rl.rollout_batch_size} is not a multiple of mini_batch_size {mini}")
        if mini * rl.num_generations < data_parallel:
            errors.append(
                f"a mini-batch has {mini} prompts x {rl.num_generations} replies = {mini * rl.num_generations} sequences, "
                f"fewer than {data_parallel} data-parallel ranks; raise mini_batch_size"
            )
        unit, global_batch = "prompts", rl.rollout_batch_size
        accumulation = math.ceil(mini * rl.num_generations / (micro * data_parallel))
        samples, optimizer_steps = global_batch * rl.num_generations, rl.updates_per_step
        formula = "rollout_batch_size"
    else:
        unit = "pairs" if cfg.stage == "dpo" else "packs" if cfg.data.packs else "rows"
        accumulation = cfg.train.gradient_accumulation_steps
        global_batch = samples = micro * accumulation * data_parallel
        optimizer_steps = 1
        formula = f"per_device_train_batch_size {micro} x gradient_accumulation_steps {accumulation} x data-parallel {data_parallel}"
    steps_per_epoch = num_rows // global_batch
    if steps_per_epoch == 0:
        most, lower = ("at most ", "or cutoff_len") if unit == "packs" else ("", f"or add {unit}")
        errors.append(
            f"{most}{num_rows} {unit} make no step with global batch {global_batch} ({formula}): "
            f"the run would make no optimiser step; lower the batch {lower}"
        )
    total = cfg.train.max_steps if cfg.train.max_steps > 0 else math.ceil(cfg.train.num_train_epochs * steps_per_epoch)
    if not errors and total * optimizer_steps == 0:
        errors.append("the run would make no optimiser step: raise max_steps or num_train_epochs")
    if errors:
        raise ConfigError(errors)
    return BatchPlan(
        num_rows=num_rows,
        world_size=world_size,
        data_parallel=data_parallel,
        micro_batch=micro,
        accumulation=accumulation,
        global_batch=global_batch,
        samples=samples,
        optimizer_steps_per_step=optimizer_steps,
        steps_per_epoch=steps_per_epoch,
        total_steps=total,
    )
