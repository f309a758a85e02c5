"""What the Megatron engine is told to do."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlmca.models.build import BuildOptions, DataParallelOptions


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
class EngineOptions:
    """Everything a `MegatronEngine` needs besides the model's layout and the process groups."""

    build: BuildOptions = field(default_factory=BuildOptions)
    data_parallel: DataParallelOptions = field(default_factory=DataParallelOptions)
    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)
    micro_batch_size: int = 1
    """Rows of one forward and backward."""
    eval_batch_size: int = 8
    """Rows of one forward without gradient."""
    save_optimizer: bool = True
    """False: checkpoints hold the weights alone."""
