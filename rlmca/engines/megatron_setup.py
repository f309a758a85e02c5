"""From a run's configuration to an engine."""

from __future__ import annotations

import torch

from rlmca.config import RunConfig
from rlmca.engines.options import EngineOptions, OptimizerOptions
from rlmca.models.options import BuildOptions, DataParallelOptions


def engine_options(cfg: RunConfig) -> EngineOptions:
    """The engine's part of a run configuration.

    In RL the log-probs of the old policy run in the update's own micro-batches, so that the first ratio is exactly 1.
    """
    megatron, train = cfg.megatron, cfg.train
    on_policy = cfg.stage == "grpo"
    return EngineOptions(
        build=BuildOptions(
            dtype=torch.bfloat16 if train.bf16 else torch.float32,
            transformer_impl=megatron.transformer_impl,  # type: ignore[arg-type]
            sequence_parallel=megatron.sequence_parallel,
            recompute_granularity=megatron.recompute_granularity,
            recompute_method=megatron.recompute_method,
            recompute_num_layers=megatron.recompute_num_layers,
            recompute_modules=megatron.recompute_modules,
            bias_activation_fusion=megatron.bias_activation_fusion,
            additional_configs=dict(megatron.additional_configs or {}),
        ),
        data_parallel=DataParallelOptions(
            use_distributed_optimizer=megatron.use_distributed_optimizer,
            overlap_grad_reduce=megatron.overlap_grad_reduce,
            overlap_param_gather=megatron.overlap_param_gather,
            accumulate_allreduce_grads_in_fp32=megatron.accumulate_allreduce_grads_in_fp32,
        ),
        optimizer=OptimizerOptions(
            weight_decay=train.weight_decay,
            adam_beta1=train.adam_beta1,
            adam_beta2=train.adam_beta2,
            adam_epsilon=train.adam_epsilon,
            max_grad_norm=train.max_grad_norm,
        ),
        micro_batch_size=train.per_device_train_batch_size,
        eval_batch_size=train.per_device_train_batch_size if on_policy else train.per_device_eval_batch_size,
        save_optimizer=not train.save_only_model,
    )
