"""Scaling of a float16 loss: what a configuration says about it, and the Hugging Face engine's way to do it.

Small gradients are zero in float16, so the loss is multiplied before the backward pass and gradients divided after it;
a factor that is too large shows as gradients that are not finite (Micikevicius et al. 2018, section 3.2). Megatron's
optimizer brings its own scaler, with the same rule for the factor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlmca.config.train import TrainConfig
from rlmca.engines.options import LossScaleOptions


def loss_scale_options(train: TrainConfig) -> LossScaleOptions | None:
    """The loss scaling of a configuration; None unless it trains in float16."""
    if not train.fp16:
        return None
    return LossScaleOptions(
        constant=train.loss_scale or None,
        initial=train.initial_loss_scale,
        minimum=train.min_loss_scale,
        window=train.loss_scale_window,
        hysteresis=train.hysteresis,
    )


class LossScaler:
    """torch's GradScaler, its factor moved as Megatron's `DynamicGradScaler` moves it.

    Invariant: `settle` is called once after every `unscale_`, before the next one.
    """

    def __init__(self, options: LossScaleOptions, device: torch.device) -> None:
        self.options = options
        self._scaler = torch.amp.GradScaler(device.type, init_scale=options.constant or options.initial, growth_interval=options.window)
        self._patience = options.hysteresis

    @property
    def scale(self) -> float:
        """The factor of the next step."""
        return float(self._scaler.get_scale())

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss to run backward from."""
        return self._scaler.scale(loss)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients of the optimizer's parameters by the factor."""
        self._scaler.unscale_(optimizer)

    def settle(self, *, learn: bool) -> None:
        """Choose the next factor by the gradients that were unscaled; with `learn=False` they said nothing about it."""
        before = self.scale
        if learn and self.options.constant is None:
            self._scaler.update()
            after = self.scale
            if after < before:
                self._patience -= 1
                before = before if self._patience > 0 else max(after, self.options.minimum)
            elif after > before:
                self._patience, before = self.options.hysteresis, after
        self._scaler.update(before)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs."""
        return {"scaler": self._scaler.state_dict(), "patience": self._patience, "constant": self.options.constant is not None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave; rules and a constant factor stay the run's own.

        What a constant factor left says nothing about a dynamic one, which starts as in a new run.
        """
        if self.options.constant is not None or state["constant"]:
            return
        kept = {name: state["scaler"][name] for name in ("scale", "_growth_tracker")}
        kept["scale"] = max(kept["scale"], self.options.minimum)
        self._scaler.load_state_dict({**self._scaler.state_dict(), **kept})
        self._patience = int(state["patience"])
