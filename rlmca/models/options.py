"""What a Megatron model and its data parallelism are told; plain values, so that reading them needs no megatron."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
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
    moe_router_load_balancing_type: Literal["none", "aux_loss", "seq_aux_loss"] = "none"
    """What the router's auxiliary loss balances the use of experts over: a micro-batch, or each row."""
    moe_aux_loss_coeff: float = 0.0
    moe_z_loss_coeff: float = 0.0
    moe_router_dtype: Literal["fp32", "fp64"] = "fp32"
    """In which the router's logits are computed and experts' results are weighed."""
    moe_expert_capacity_factor: float | None = None
    """Most tokens of an expert over those it would have if all had as many; None: no limit."""
    moe_pad_expert_input_to_capacity: bool = False
    moe_token_drop_policy: Literal["probs", "position"] = "probs"
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

    @property
    def exchanges_fixed_sizes(self) -> bool:
        """Whether ranks that share experts must have micro-batches of one shape."""
        return self.moe_token_dispatcher_type == "allgather" or self.moe_pad_expert_input_to_capacity


@dataclass(frozen=True)
class DataParallelOptions:
    """How gradients and optimizer states are kept over data-parallel ranks (Megatron's names)."""

    use_distributed_optimizer: bool = True
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    accumulate_allreduce_grads_in_fp32: bool = True
    ddp_bucket_size: int | None = None


@dataclass(frozen=True)
class LoraOptions:
    """Low-rank adapters beside linear layers (Hu et al., 2021: LoRA, section 4.1): y = W x + scaling * B (A dropout(x))."""

    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.0
    targets: tuple[str, ...] = ("all",)
    """Ends of the layers' Hugging Face names (`q_proj`, `mlp.down_proj`), or `all` linear layers but the head."""
    rslora: bool = False
    """Scaling by alpha / sqrt(rank) (Kalajdzievski, 2023: rank-stabilised LoRA, equation 4) instead of alpha / rank."""
    seed: int = 42
    """Of the initial A, which follows from it and the layer's name alone: it is the same on every layout."""
    start: Path | None = None
    """Folder of an adapter in PEFT's format to start from. None: B is zero, so that the model starts as its base."""
    keep_start: bool = False
    """Keep what `start` holds for as long as the run lasts: it is the reference that training is measured against."""
    merged: tuple[Path, ...] = ()
    """Folders of adapters to merge into the weights first."""

    @property
    def scaling(self) -> float:
        """What the product of the matrices is multiplied by."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


@dataclass(frozen=True)
class FreezeOptions:
    """Which weights are trained: those of `modules` ("all", or parts of their names) in the last `layers` layers, with a
    negative number the first, and those of modules outside of layers that `extra` names (LLaMA-Factory's meaning)."""

    layers: int = 2
    modules: tuple[str, ...] = ("all",)
    extra: tuple[str, ...] = ()
