"""From a model layout and the run's options to Megatron modules on this rank."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from rlmca.layouts import Coord, ModelLayout, Topology
from rlmca.layouts.pipeline import megatron_layout
from rlmca.layouts.plan import in_chunk
from rlmca.models.latent import leave_biases
from rlmca.models.options import BuildOptions, DataParallelOptions
from rlmca.models.policy import PolicyModel
from rlmca.models.rope import scale_attention, set_angles
from rlmca.models.spec import block_spec, choose_spec, kernel_errors
from rlmca.parallel import platform

HONOURED = ("attention_dropout", "hidden_dropout", "embedding_init_method_std")
"""Fields of `additional_configs` that may change. Megatron itself or the parts in this package follow them."""


def transformer_config(layout: ModelLayout, options: BuildOptions, topology: Topology) -> TransformerConfig:
    """TransformerConfig of the checkpoint's own fields, the run's options and the layout."""
    own = dict(layout.megatron.config)
    own["activation_func"] = getattr(torch.nn.functional, own["activation_func"])
    kind = MLATransformerConfig if layout.megatron.latent else TransformerConfig
    known = {f.name for f in dataclasses.fields(kind)}
    unknown = sorted(set(options.additional_configs) - known)
    if unknown:
        raise ValueError(f"additional_configs: {', '.join(unknown)} is no field of megatron-core's TransformerConfig")
    taken = sorted(set(options.additional_configs) & (set(own) - {"attention_dropout", "hidden_dropout"}))
    if taken:
        raise ValueError(f"additional_configs: {', '.join(taken)} follows from the model's config.json and cannot be set in the YAML")
    run = {
        "tensor_model_parallel_size": topology.tp,
        "pipeline_model_parallel_size": topology.pp,
        "sequence_parallel": options.sequence_parallel,
        **_pipeline(topology),
        "context_parallel_size": options.context_parallel,
        "cp_comm_type": options.cp_comm_type if options.context_parallel > 1 else None,
        **(_experts(layout, options, topology) if layout.megatron.num_experts else {}),
        "params_dtype": options.dtype,
        "pipeline_dtype": options.dtype,
        "bf16": options.dtype == torch.bfloat16,
        "fp16": options.dtype == torch.float16,
        "recompute_granularity": options.recompute_granularity,
        "recompute_method": options.recompute_method,
        "recompute_num_layers": options.recompute_num_layers,
        "recompute_modules": options.recompute_modules,
        "use_cpu_initialization": not platform.is_cuda(),
        "perform_initialization": options.init_weights,
        "gradient_accumulation_fusion": False,
        "bias_activation_fusion": options.bias_activation_fusion,
        "bias_dropout_fusion": options.bias_dropout_fusion,
        "masked_softmax_fusion": options.masked_softmax_fusion,
        "apply_rope_fusion": options.apply_rope_fusion,
        "cross_entropy_loss_fusion": options.cross_entropy_loss_fusion,
        "batch_p2p_comm": False,  # batched, two stages with several chunks each train on mixed-up gradients without an error
        "overlap_p2p_comm": topology.vpp > 1,
        # freed under a send that is still under way (several chunks send ahead), gloo sends whatever is in that memory next
        "deallocate_pipeline_outputs": topology.vpp == 1 or platform.is_cuda(),
    }
    plain = kind(**{**own, **run})
    ignored = [name for name, value in options.additional_configs.items() if name not in HONOURED and value != getattr(plain, name)]
    if ignored:
        raise ValueError(
            f"additional_configs: {', '.join(sorted(ignored))}: not in this version, the layers would not follow it; "
            f"the fields that work are {', '.join(HONOURED)}"
        )
    return kind(**{**own, **run, **{name: value for name, value in options.additional_configs.items() if name in HONOURED}})


def _experts(layout: ModelLayout, options: BuildOptions, topology: Topology) -> dict[str, Any]:
    return {
        "expert_model_parallel_size": topology.ep,
        "expert_tensor_parallel_size": topology.expert_tp,
        "moe_token_dispatcher_type": options.moe_token_dispatcher_type,
        "moe_grouped_gemm": layout.spec == "te",  # the one kernel for all experts is Transformer Engine's
        "moe_router_load_balancing_type": options.moe_router_load_balancing_type,
        "moe_aux_loss_coeff": options.moe_aux_loss_coeff,
        "moe_z_loss_coeff": options.moe_z_loss_coeff or None,
        "moe_router_dtype": options.moe_router_dtype,
        "moe_expert_capacity_factor": options.moe_expert_capacity_factor,
        "moe_pad_expert_input_to_capacity": options.moe_pad_expert_input_to_capacity,
        "moe_token_drop_policy": options.moe_token_drop_policy,
    }


def _pipeline(topology: Topology) -> dict[str, Any]:
    if topology.chunks is None:
        return {}
    virtual = {"virtual_pipeline_model_parallel_size": topology.vpp} if topology.vpp > 1 else {}
    return {"pipeline_model_parallel_layout": megatron_layout(topology.chunks), **virtual}


def build_policy(layout: ModelLayout, options: BuildOptions, topology: Topology, coord: Coord) -> list[PolicyModel]:
    """This rank's part of the policy, one model a chunk, weights uninitialised unless `init_weights`."""
    return [_build_chunk(layout, options, topology, coord, chunk) for chunk in range(topology.vpp)]


def _build_chunk(layout: ModelLayout, options: BuildOptions, topology: Topology, coord: Coord, chunk: int) -> PolicyModel:
    stage = chunk if topology.vpp > 1 else None
    if missing := kernel_errors(options):
        raise ValueError("\n".join(missing))
    if options.recompute_method is not None:
        layout.check_recompute(topology, options.recompute_method, options.recompute_num_layers or 1)
    config = transformer_config(layout, options, topology)
    scale_attention(config, layout.megatron.rope)
    spec = choose_spec(options.transformer_impl)
    if spec != layout.spec:
        raise ValueError(f"the layout names {layout.spec} parameters, the model is built from {spec} parts")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*sequence_parallel.*")
        model = PolicyModel(
            config=config,
            transformer_layer_spec=block_spec(config, spec, stage),
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
            parallel_output=True,
            vp_stage=stage,
            real_vocab_size=layout.megatron.model["vocab_size"],
            **{**layout.megatron.model, "vocab_size": layout.padded_vocab(topology)},
        )
    leave_biases(model.modules(), model.config)
    set_angles(model, layout.megatron.rope, layout.megatron.model.get("rotary_base", 0))
    _mark_shards(model, layout, topology, coord, chunk)
    if platform.is_cuda():
        model.cuda(torch.cuda.current_device())
    return model


def _mark_shards(model: PolicyModel, layout: ModelLayout, topology: Topology, coord: Coord, chunk: int) -> None:
    """Tell Megatron which parameters are shards of a tensor and which are copies.

    Its own initialisation sets these attributes, and we skip that initialisation when a checkpoint fills the weights.
    Without them the gradient norm counts the shards of one rank only: the loss is right and clipping is wrong.
    """
    plans = layout.rank_plan(topology, coord)
    parameters: Any = model.named_parameters()
    for name, parameter in parameters:
        plan, tensor = plans[in_chunk(name, coord.pp + topology.pp * chunk, topology)], parameter
        if plan.axis is not None:
            tensor.tensor_model_parallel, tensor.partition_dim, tensor.partition_stride = True, plan.axis, 1
        if plan.expert and topology.expert_tp != topology.tp:
            # without expert parallelism Megatron reduces the gradients of experts over the ranks that hold the same dense
            # weights; with another tensor split these are not the ranks that hold the same part of an expert
            tensor.allreduce = False


def wrap_data_parallel(model: PolicyModel, options: DataParallelOptions, *, first: bool = True) -> DistributedDataParallel:
    """Megatron's DDP around a chunk of the model: gradient buffers, buckets and their reduction.

    Chunks other than the `first` keep their gradients in one bucket: the schedule says when they are complete.
    """
    return DistributedDataParallel(
        config=model.config,
        ddp_config=DistributedDataParallelConfig(
            grad_reduce_in_fp32=options.accumulate_allreduce_grads_in_fp32,
            use_distributed_optimizer=options.use_distributed_optimizer,
            overlap_grad_reduce=options.overlap_grad_reduce,
            overlap_param_gather=options.overlap_param_gather,
            bucket_size=options.ddp_bucket_size if options.overlap_grad_reduce or options.ddp_bucket_size else None,
        ),
        module=model,
        disable_bucketing=not first,
    )
