"""Megatron's optimizer: build it, and one guarded step."""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

from rlmca.engines.adam import install_torch_adam
from rlmca.engines.options import LossScaleOptions, OptimizerOptions
from rlmca.models.options import DataParallelOptions


def build_optimizer(
    models: list[DistributedDataParallel],
    options: OptimizerOptions,
    data_parallel: DataParallelOptions,
    dtype: torch.dtype,
    loss_scale: LossScaleOptions | None = None,
) -> Any:
    """AdamW over the wrapped chunks of the model, with fp32 master weights for bf16 and fp16, states sharded over data-parallel ranks
    when asked. In fp16 it has a `grad_scaler`, and the schedule must scale the loss with `scale_loss`.

    Biases and one-dimensional weights (norms) do not decay, as in Megatron-LM and Hugging Face's Trainer.
    """
    install_torch_adam()
    scaling = loss_scale or LossScaleOptions()
    config = OptimizerConfig(
        optimizer="adam",
        lr=0.0,  # set before every step
        weight_decay=options.weight_decay,
        adam_beta1=options.adam_beta1,
        adam_beta2=options.adam_beta2,
        adam_eps=options.adam_epsilon,
        clip_grad=options.max_grad_norm,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        loss_scale=scaling.constant if dtype == torch.float16 else None,
        initial_loss_scale=scaling.initial,
        min_loss_scale=scaling.minimum,
        loss_scale_window=scaling.window,
        hysteresis=scaling.hysteresis,
        params_dtype=dtype,
        use_distributed_optimizer=data_parallel.use_distributed_optimizer,
        overlap_param_gather=data_parallel.overlap_param_gather,
    )
    return get_megatron_optimizer(config, models, use_gloo_process_groups=False)


def guarded_step(optimizer: Any, options: OptimizerOptions, learning_rate: float, *, allowed: bool) -> tuple[float, bool]:
    """(gradient norm before clipping, whether weights moved).

    A norm that is not finite, or `allowed=False`, leaves weights and optimizer state untouched. The norm is global,
    so every rank decides alike. In fp16 gradients are unscaled first and the loss scale follows from whether they were
    finite; a step that is not allowed (its loss was not finite before any scaling) says nothing about the scale.
    """
    scalers = [part.grad_scaler for part in _parts(optimizer) if getattr(part, "grad_scaler", None) is not None]
    before = [scaler.state_dict() for scaler in scalers]
    overflow = bool(optimizer.prepare_grads())
    if not allowed:
        for scaler, state in zip(scalers, before, strict=True):
            scaler.load_state_dict(state)
    norm = float(optimizer.get_grad_norm())
    if overflow or not allowed or not math.isfinite(norm):
        return norm, False
    for group in optimizer.param_groups:
        # Megatron's own scheduler would write these; doing it every step keeps a resumed run from taking one step
        # with the values of a constructor or of an old checkpoint
        group["lr"] = learning_rate * group.get("lr_mult", 1.0)
        group["weight_decay"] = options.weight_decay * group.get("wd_mult", 1.0)
        group["betas"], group["eps"] = (options.adam_beta1, options.adam_beta2), options.adam_epsilon
    if options.max_grad_norm > 0:
        for part in _parts(optimizer):
            parameters = [] if getattr(part, "is_stub_optimizer", False) else part.get_parameters()
            if parameters:
                clip_grad_by_total_norm_fp32(parameters, options.max_grad_norm, norm)
    return norm, bool(optimizer.step_with_ready_grads())


def _parts(optimizer: Any) -> list[Any]:
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))
