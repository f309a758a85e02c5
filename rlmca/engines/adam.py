"""AdamW in the shape that Megatron's optimizers and their checkpoints expect, on torch's fused kernel.

Used where neither Transformer Engine nor Apex is installed. Megatron's distributed optimizer reads and writes the
step count in the parameter group (as Apex keeps it), torch's own AdamW keeps it per parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import megatron.core.optimizer as megatron_optimizer
import megatron.core.optimizer.distrib_optimizer as megatron_distributed_optimizer
import torch
from torch.optim.adamw import adamw


class TorchFusedAdam(torch.optim.Optimizer):
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019, algorithm 2) and Apex's constructor and state."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        **_: Any,
    ) -> None:
        if not (bias_correction and adam_w_mode):
            raise ValueError("TorchFusedAdam corrects the bias and decouples weight decay, always")
        super().__init__(params, {"lr": lr, "bias_correction": True, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if not group["params"]:
                continue
            group["step"] = int(group.get("step", 0)) + 1
            for p in params:
                if not self.state[p]:
                    self.state[p].update(exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
            before = float(group["step"] - 1)  # the kernel counts up by itself
            adamw(
                params,
                [p.grad for p in params],
                [self.state[p]["exp_avg"] for p in params],
                [self.state[p]["exp_avg_sq"] for p in params],
                [],
                [torch.full((), before, dtype=torch.float32, device=p.device) for p in params],
                fused=True,
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )


def install_torch_adam() -> None:
    """Let megatron-core take `TorchFusedAdam` for Apex's when it found neither Apex nor Transformer Engine."""
    if not megatron_optimizer.USING_PYTORCH_OPTIMIZER:
        return
    megatron_optimizer.Adam = megatron_distributed_optimizer.Adam = TorchFusedAdam
    megatron_optimizer.USING_PYTORCH_OPTIMIZER = False
    megatron_distributed_optimizer.HAVE_APEX_OR_TE = True
    megatron_distributed_optimizer.USING_APEX_OPTIMIZER = True
