"""AdamW over a Transformers module: build it, one guarded step, its state by parameter name."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from rlmca.engines.loss_scale import LossScaler
from rlmca.engines.options import OptimizerOptions

State = dict[str, dict[str, Tensor]]


def build_optimizer(trained: Mapping[str, nn.Parameter], options: OptimizerOptions) -> torch.optim.AdamW:
    """torch's fused AdamW over named parameters.

    Biases and one-dimensional weights (norms) do not decay, as in Megatron-LM and Hugging Face's Trainer.
    """
    decayed: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in trained.items():
        (others if parameter.dim() == 1 or name.endswith(".bias") else decayed).append(parameter)
    groups = [{"params": decayed, "weight_decay": options.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=0.0,  # set before every step
        betas=(options.adam_beta1, options.adam_beta2),
        eps=options.adam_epsilon,
        fused=True,
    )


@torch.no_grad()
def guarded_step(
    optimizer: torch.optim.AdamW, options: OptimizerOptions, learning_rate: float, *, allowed: bool, scaler: LossScaler | None = None
) -> tuple[float, bool]:
    """(gradient norm before clipping, whether weights moved).

    A norm that is not finite, or `allowed=False`, leaves weights and optimizer state untouched. Data-parallel ranks hold
    the same gradients by now, so every rank decides alike. With a `scaler` gradients are unscaled first; a step that is not
    allowed (its loss was not finite before any scaling) says nothing about the scale.
    """
    if scaler is not None:
        scaler.unscale_(optimizer)
        scaler.settle(learn=allowed)
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    total = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    norm = float(total)
    if not allowed or not math.isfinite(norm):
        return norm, False
    if options.max_grad_norm > 0:  # times max_norm / (norm + 1e-6) where that is below 1, as Megatron does
        torch.nn.utils.clip_grads_with_norm_(parameters, options.max_grad_norm, total)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    optimizer.step()
    return norm, True


def moments(optimizer: torch.optim.AdamW, trained: Mapping[str, nn.Parameter]) -> State:
    """The optimizer's state under the parameters' names; empty before the first step. Options stay the run's own."""
    return {name: dict(optimizer.state[p]) for name, p in trained.items() if p in optimizer.state}


def restore_moments(optimizer: torch.optim.AdamW, trained: Mapping[str, nn.Parameter], state: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Take over what `moments` gave; with an empty state the optimizer begins anew. ValueError for other parameters."""
    optimizer.state.clear()
    if strangers := sorted(set(state) - set(trained)):
        raise ValueError(f"the optimizer state speaks of parameters that this run does not train: {', '.join(strangers[:8])}")
    for name, values in state.items():
        optimizer.state[trained[name]] = {key: value.to(trained[name].device, copy=True) for key, value in values.items()}
