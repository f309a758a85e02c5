"""Keys of the Megatron-Core engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlmca.config.fields import option


@dataclass(frozen=True)
class MegatronConfig:
    """Parallel layout and memory of the Megatron engine."""

    tensor_model_parallel_size: int = option(1, "Ranks over which each layer is split.", at_least=1)
    pipeline_model_parallel_size: int = option(1, "Stages over which the layers are split.", at_least=1)
    virtual_pipeline_model_parallel_size: int | None = option(
        None, "Chunks of layers on each pipeline stage (interleaved schedule).", at_least=1
    )
    pipeline_model_parallel_layout: str | None = option(
        None, "Layers of each chunk in Megatron's letters: Et*3|t*4|t*4|t*3L is the embedding and 3 layers, ..., 3 layers and the head."
    )
    account_for_embedding_in_pipeline_split: bool = option(False, "The embedding takes the place of a layer in the first chunk.")
    account_for_loss_in_pipeline_split: bool = option(False, "The head takes the place of a layer in the last chunk.")
    context_parallel_size: int = option(1, "Ranks over which each sequence is split.", at_least=1)
    expert_model_parallel_size: int = option(
        1, "Groups of ranks that the experts of a layer are dealt out to. Takes ranks of tensor, context and data parallelism.", at_least=1
    )
    expert_tensor_parallel_size: int | None = option(
        None, "Ranks over which each expert is split; tensor_model_parallel_size when not set.", at_least=1
    )
    moe_token_dispatcher_type: str = option(
        "allgather",
        "How tokens reach experts on other ranks: allgather (all tokens to all) or alltoall (each to the ranks it chose).",
        choices=("allgather", "alltoall"),
        refused={k: f"{k}: not in this version; write alltoall" for k in ("flex", "alltoall_seq")},
    )
    moe_grouped_gemm: bool = option(
        True, "All experts of a rank in one kernel, where Transformer Engine is; elsewhere one after the other, with the same result."
    )
    moe_router_load_balancing_type: str = option(
        "none",
        "Auxiliary loss that keeps experts evenly used: seq_aux_loss (within each row) or aux_loss (within a micro-batch).",
        choices=("none", "aux_loss", "seq_aux_loss"),
        refused={k: f"{k}: not in this version; write seq_aux_loss, aux_loss or none" for k in ("global_aux_loss", "sinkhorn")},
    )
    moe_aux_loss_coeff: float = option(0.0, "Weight of that loss in each layer with experts.", at_least=0)
    moe_z_loss_coeff: float = option(
        0.0, "Weight of the mean square of the log-sum-exp of the router's logits, which keeps them small.", at_least=0
    )
    moe_router_dtype: str = option("fp32", "In which the router computes and experts' results are weighed.", choices=("fp32", "fp64"))
    moe_expert_capacity_factor: float | None = option(
        None, "Most tokens of an expert, as a multiple of an even share of a rank's micro-batch; others are dropped there.", above=0
    )
    moe_pad_expert_input_to_capacity: bool = option(False, "Every expert gets exactly its capacity; needs alltoall.")
    moe_token_drop_policy: str = option(
        "probs", "Which tokens beyond the capacity are dropped: of the smallest weight (probs) or the last.", choices=("probs", "position")
    )
    cp_comm_type: str = option(
        "all_gather",
        "How context-parallel ranks see each other's tokens: all_gather (keys and values) or a2a (heads for tokens, Ulysses).",
        choices=("all_gather", "a2a"),
        refused={
            k: f"{k}: ring exchange is Transformer Engine's and not in this version; write all_gather or a2a" for k in ("p2p", "a2a+p2p")
        },
    )
    sequence_parallel: bool = option(False, "Split norms and residuals along the sequence over the tensor ranks.")
    use_distributed_optimizer: bool = option(True, "Split optimiser state over the data-parallel ranks.")
    overlap_grad_reduce: bool = option(False, "Reduce gradients while the backward pass runs.")
    overlap_param_gather: bool = option(False, "Gather parameters while the forward pass runs; needs overlap_grad_reduce.")
    accumulate_allreduce_grads_in_fp32: bool = option(True, "Accumulate and reduce gradients in float32.")
    recompute_granularity: str | None = option(None, "Recompute activations in the backward pass.", choices=("full", "selective"))
    recompute_method: str | None = option(
        None, "How full recompute picks layers; uniform, layer by layer, when only the granularity is set.", choices=("uniform", "block")
    )
    recompute_num_layers: int | None = option(
        None, "Layers of one recompute unit (uniform), or recomputed in each chunk of a stage (block).", at_least=1
    )
    recompute_modules: list[str] | None = option(
        None,
        "Parts that selective recompute recomputes; core_attn when not set.",
        choices=("core_attn", "layernorm", "mlp"),
        refused={
            k: f"{k}: not in this version; write core_attn, layernorm or mlp" for k in ("moe", "moe_act", "shared_experts", "mla_up_proj")
        },
    )
    bias_activation_fusion: bool = option(False, "Fuse bias and activation of the MLP.")
    bias_dropout_fusion: bool = option(False, "Fuse bias, dropout and the residual sum after attention and MLP.")
    masked_softmax_fusion: bool = option(
        True, "Attention in one fused kernel; false: torch's plain products with a whole matrix of scores, not with Transformer Engine."
    )
    apply_rope_fusion: bool = option(False, "Rotary embeddings by Transformer Engine's fused kernel; needs CUDA.")
    cross_entropy_loss_fusion: bool = option(
        True, "Log-probs from hidden states a tile of logits at a time; false: all logits of a micro-batch's targets are made."
    )
    transformer_impl: str = option(
        "auto", "Layer kernels. auto: Transformer Engine when present, else torch.", choices=("auto", "local", "transformer_engine")
    )
    ckpt_format: str = option(
        "torch_dist",
        "Format of checkpoints.",
        choices=("torch_dist",),
        refused={k: f"{k}: not in this version; write torch_dist" for k in ("torch", "zarr", "fsdp_dtensor")},
    )
    additional_configs: dict[str, Any] = option(
        {},
        "TransformerConfig fields by Megatron's names: attention_dropout, hidden_dropout, embedding_init_method_std.",
    )
