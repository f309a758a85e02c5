"""The learning rate of every step, under the names and with the arithmetic of Transformers' schedulers."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import SchedulerType, get_scheduler

from rlmca.config.train import TrainConfig

_REFUSED = {
    "reduce_lr_on_plateau": "it follows the evaluation loss instead of the step",
    "greedy": "it follows the loss instead of the step",
}
_MIN_LR = {
    "cosine": "cosine_with_min_lr",
    "cosine_with_min_lr": "cosine_with_min_lr",
    "cosine_warmup_with_min_lr": "cosine_warmup_with_min_lr",
    "linear": "polynomial",
    "polynomial": "polynomial",
    "warmup_stable_decay": "warmup_stable_decay",
}
"""Scheduler names that `min_lr` bends, and the scheduler that then computes them."""


def scheduler_names() -> list[str]:
    """Every `lr_scheduler_type` that works."""
    return [kind.value for kind in SchedulerType if kind.value not in _REFUSED]


class LearningRate:
    """Step -> learning rate, a pure function: nothing to save, nothing to restore.

    `rate(step)` is the rate of optimizer step `step`, the first being 1, exactly as Transformers' trainer has it: the
    first step of a linear warm-up runs at 0. `min_lr` is where the decay ends: with cosine and linear it is Megatron's
    formula (min + factor * (learning_rate - min)), with a scheduler that takes a floor of its own it is that floor.
    `warmup_steps` >= 1 wins over `warmup_ratio`; below 1 it is a share of the run itself, as in Transformers 5.
    """

    def __init__(self, options: TrainConfig, total_steps: int) -> None:
        name, kwargs = _resolve(options)
        self.base = float(options.learning_rate)
        self.warmup = warmup_steps(options, total_steps)
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=self.base)
        try:
            scheduler = get_scheduler(name, optimizer, self.warmup, total_steps, scheduler_specific_kwargs=kwargs)
        except (TypeError, ValueError) as error:
            raise ValueError(f"lr_scheduler_type: {options.lr_scheduler_type} with lr_scheduler_kwargs {kwargs}: {error}") from error
        assert isinstance(scheduler, LambdaLR)
        self._factor = scheduler.lr_lambdas[0]

    def __call__(self, step: int) -> float:
        """The rate of optimizer step `step` >= 1."""
        if step < 1:
            raise ValueError(f"optimizer steps count from 1, got {step}")
        return self.base * float(self._factor(step - 1))


def warmup_steps(options: TrainConfig, total_steps: int) -> int:
    """Number of warm-up steps: `warmup_steps`, or the share `warmup_ratio` of the run, rounded up."""
    if options.warmup_steps >= 1:
        return int(options.warmup_steps)
    return math.ceil(total_steps * (options.warmup_steps or options.warmup_ratio))


def _resolve(options: TrainConfig) -> tuple[str, dict[str, Any]]:
    """The Transformers scheduler to ask, and its own arguments."""
    name, kwargs = str(options.lr_scheduler_type), dict(options.lr_scheduler_kwargs or {})
    if name in _REFUSED:
        raise ValueError(f"lr_scheduler_type: {name}: not in this version, {_REFUSED[name]}; write one of {', '.join(scheduler_names())}")
    if name not in scheduler_names():
        raise ValueError(f"lr_scheduler_type: {name} is not known; write one of {', '.join(scheduler_names())}")
    if not options.min_lr:
        if name == "warmup_stable_decay" and "num_decay_steps" not in kwargs:
            raise ValueError("lr_scheduler_type: warmup_stable_decay needs lr_scheduler_kwargs: {num_decay_steps: ...}")
        return name, kwargs
    if name not in _MIN_LR:
        raise ValueError(f"min_lr: has no meaning with lr_scheduler_type {name}; it works with {', '.join(_MIN_LR)}")
    if not options.min_lr < options.learning_rate:
        raise ValueError(f"min_lr {options.min_lr} must be below learning_rate {options.learning_rate}")
    own = {"polynomial": "lr_end", "warmup_stable_decay": "min_lr_ratio"}.get(_MIN_LR[name], "min_lr")
    if twice := {own, "min_lr_rate"} & kwargs.keys():
        raise ValueError(f"min_lr and lr_scheduler_kwargs: {', '.join(sorted(twice))} say the same twice; write one of them")
    kwargs[own] = options.min_lr / options.learning_rate if own == "min_lr_ratio" else options.min_lr
    return _MIN_LR[name], kwargs
