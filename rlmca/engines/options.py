"""What engines are told to do; plain values, none of which needs megatron."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlmca.models.options import BuildOptions, DataParallelOptions, FreezeOptions, LoraOptions


@dataclass(frozen=True)
class OptimizerOptions:
    """AdamW as Hugging Face names it."""

    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    max_grad_norm: float = 1.0
    """0 turns clipping off."""


@dataclass(frozen=True)
class LossScaleOptions:
    """How a float16 loss is scaled, in Megatron's terms: by a constant, or by a factor that overflows and their absence move."""

    constant: float | None = None
    initial: float = 65536.0
    minimum: float = 1.0
    window: int = 1000
    """Steps without an overflow after which the factor doubles."""
    hysteresis: int = 2
    """Overflows since it last doubled from which on each one halves it."""


@dataclass(frozen=True)
class PipelineOptions:
    """How layers are dealt out to pipeline chunks; see `layouts.pipeline.chunk_sizes`."""

    embedding_counts: bool = False
    loss_counts: bool = False
    layout: str | None = None


@dataclass(frozen=True)
class EngineOptions:
    """Everything a `MegatronEngine` needs besides the model's layout and the process groups."""

    build: BuildOptions = field(default_factory=BuildOptions)
    data_parallel: DataParallelOptions = field(default_factory=DataParallelOptions)
    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)
    loss_scale: LossScaleOptions | None = None
    """Of a model in float16; None there: the defaults."""
    pipeline: PipelineOptions = field(default_factory=PipelineOptions)
    lora: LoraOptions | None = None
    """Train low-rank adapters and nothing else."""
    freeze: FreezeOptions | None = None
    """Train some of the weights only."""
    micro_batch_size: int = 1
    """Rows of one forward and backward."""
    eval_batch_size: int = 8
    """Rows of one forward without gradient."""
    packing: bool = False
    """Rows of a micro-batch behind each other in one, with borders that attention and positions keep; no padding between."""
    max_tokens_per_microbatch: int | None = None
    """Most tokens of a micro-batch, in place of a number of rows; rows are then balanced over ranks by their cost."""
    save_optimizer: bool = True
    """False: checkpoints hold the weights alone."""


@dataclass(frozen=True)
class HuggingFaceOptions:
    """Everything a `HuggingFaceEngine` needs besides the model's folder and the process groups."""

    bf16: bool = False
    """Forward and backward under autocast to bfloat16, weights and optimizer in float32; otherwise float32 throughout."""
    loss_scale: LossScaleOptions | None = None
    """Given: under autocast to float16, with a scaled loss."""
    attention: str | None = None
    """Transformers' `attn_implementation`; None: what it takes by itself."""
    gradient_checkpointing: bool = False
    """Keep no activations inside a layer, compute them again in the backward pass."""
    use_reentrant: bool = False
    """Which of torch's two implementations of that."""
    find_unused_parameters: bool = False
    """Data parallelism: look for parameters that a forward did not use."""
    bucket_cap_mb: int | None = None
    """Data parallelism: most MiB of gradients in one reduction; None: torch's default."""
    trust_remote_code: bool = False
    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)
    lora: LoraOptions | None = None
    """Train low-rank adapters and nothing else."""
    freeze: FreezeOptions | None = None
    """Train some of the weights only."""
    micro_batch_size: int = 1
    """Rows of one forward and backward."""
    eval_batch_size: int = 8
    """Rows of one forward without gradient."""
    packing: bool = False
    """Rows of a micro-batch behind each other in one, with borders that attention and positions keep; no padding between."""
    max_tokens_per_microbatch: int | None = None
    """Most tokens of a micro-batch, in place of a number of rows; rows are then balanced over ranks by their cost."""
    save_optimizer: bool = True
    """False: checkpoints hold the weights alone."""
