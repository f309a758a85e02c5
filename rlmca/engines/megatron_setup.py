"""From a run's configuration to an engine."""

from __future__ import annotations

import dataclasses

import torch

from rlmca.config import RunConfig, virtual_stages
from rlmca.engines.budget import micro_batch_tokens
from rlmca.engines.finetuning_setup import freeze_options, lora_options
from rlmca.engines.loss_scale import loss_scale_options
from rlmca.engines.options import EngineOptions, OptimizerOptions, PipelineOptions
from rlmca.layouts import Topology
from rlmca.layouts.pipeline import pipeline_topology
from rlmca.models.options import BuildOptions, DataParallelOptions


def pipeline_options(cfg: RunConfig) -> PipelineOptions:
    """How the configuration deals layers out to the pipeline."""
    megatron = cfg.megatron
    return PipelineOptions(
        embedding_counts=megatron.account_for_embedding_in_pipeline_split,
        loss_counts=megatron.account_for_loss_in_pipeline_split,
        layout=megatron.pipeline_model_parallel_layout,
    )


def run_topology(cfg: RunConfig, num_layers: int) -> Topology:
    """The split of a model that the configuration describes. LayoutError when its layers do not come out even."""
    megatron = cfg.megatron
    return pipeline_topology(
        num_layers,
        tp=megatron.tensor_model_parallel_size,
        pp=megatron.pipeline_model_parallel_size,
        vpp=virtual_stages(cfg),
        ep=megatron.expert_model_parallel_size,
        etp=megatron.expert_tensor_parallel_size,
        **dataclasses.asdict(pipeline_options(cfg)),
    )


def engine_options(cfg: RunConfig) -> EngineOptions:
    """The engine's part of a run configuration.

    In RL the log-probs of the old policy run in the update's own micro-batches, so that the first ratio is exactly 1.
    """
    megatron, train = cfg.megatron, cfg.train
    on_policy = cfg.stage == "grpo"
    return EngineOptions(
        build=BuildOptions(
            dtype=torch.bfloat16 if train.bf16 else torch.float16 if train.fp16 else torch.float32,
            transformer_impl="local" if cfg.finetuning.lora else megatron.transformer_impl,  # type: ignore[arg-type]
            sequence_parallel=megatron.sequence_parallel,
            context_parallel=megatron.context_parallel_size,
            cp_comm_type=megatron.cp_comm_type,  # type: ignore[arg-type]
            moe_token_dispatcher_type=megatron.moe_token_dispatcher_type,  # type: ignore[arg-type]
            moe_grouped_gemm=megatron.moe_grouped_gemm,
            moe_router_load_balancing_type=megatron.moe_router_load_balancing_type,  # type: ignore[arg-type]
            moe_aux_loss_coeff=megatron.moe_aux_loss_coeff,
            moe_z_loss_coeff=megatron.moe_z_loss_coeff,
            moe_router_dtype=megatron.moe_router_dtype,  # type: ignore[arg-type]
            moe_expert_capacity_factor=megatron.moe_expert_capacity_factor,
            moe_pad_expert_input_to_capacity=megatron.moe_pad_expert_input_to_capacity,
            moe_token_drop_policy=megatron.moe_token_drop_policy,  # type: ignore[arg-type]
            recompute_granularity=megatron.recompute_granularity,
            recompute_method=megatron.recompute_method,
            recompute_num_layers=megatron.recompute_num_layers,
            recompute_modules=megatron.recompute_modules,
            bias_activation_fusion=megatron.bias_activation_fusion,
            bias_dropout_fusion=megatron.bias_dropout_fusion,
            masked_softmax_fusion=megatron.masked_softmax_fusion,
            apply_rope_fusion=megatron.apply_rope_fusion,
            cross_entropy_loss_fusion=megatron.cross_entropy_loss_fusion,
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
        loss_scale=loss_scale_options(train),
        pipeline=pipeline_options(cfg),
        lora=lora_options(cfg),
        freeze=freeze_options(cfg),
        micro_batch_size=train.per_device_train_batch_size,
        eval_batch_size=train.per_device_train_batch_size if on_policy else train.per_device_eval_batch_size,
        packing=cfg.data.packs,
        max_tokens_per_microbatch=micro_batch_tokens(cfg),
        save_optimizer=not train.save_only_model,
    )
