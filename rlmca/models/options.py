"""What a Megatron model and its data parallelism are told; plain values, so that reading them needs no megatron."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch


@dataclass(frozen=True)
class BuildOptions:
    """What the run, not the checkpoint, says about a model."""

    dtype: torch.dtype = torch.float32
    transformer_impl: Literal["auto", "local", "transformer_engine"] = "auto"
    sequence_parallel: bool = False
    context_parallel: int = 1
    cp_comm_type: Literal["all_gather", "a2a"] = "all_gather"
    """How attention sees the tokens of other context-parallel ranks: keys and values gathered, or heads exchanged for tokens."""
    moe_token_dispatcher_type: Literal["allgather", "alltoall"] = "allgather"
    """How tokens reach their experts on other ranks."""
    moe_grouped_gemm: bool = True
    """All experts of a rank in one kernel; Transformer Engine's alone, torch's parts take them one by one."""
    recompute_granularity: str | None = None
    recompute_method: str | None = None
    recompute_num_layers: int | None = None
    recompute_modules: list[str] | None = None
    bias_activation_fusion: bool = False
    bias_dropout_fusion: bool = False
    masked_softmax_fusion: bool = True
    """False: attention by plain products, with a whole matrix of scores."""
    apply_rope_fusion: bool = False
    cross_entropy_loss_fusion: bool = True
    """False: the head makes all logits of the chosen tokens instead of a tile at a time."""
    init_weights: bool = False
    """Draw initial weights instead of leaving them for a checkpoint to fill. An engine without a folder sets it."""
    additional_configs: dict[str, Any] = field(default_factory=dict)
    """Further fields of TransformerConfig, by Megatron's names: those in `build.HONOURED`, others only at the value they have."""


@dataclass(frozen=True)
class DataParallelOptions:
    """How gradients and optimizer states are kept over data-parallel ranks (Megatron's names)."""

    use_distributed_optimizer: bool = True
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    accumulate_allreduce_grads_in_fp32: bool = True
    ddp_bucket_size: int | None = None
