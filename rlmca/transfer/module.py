"""Executor ranks -> a Transformers module in memory."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


def copy_to_module(stream: Iterable[tuple[str, Tensor]], module: nn.Module) -> None:
    """Copy every (name, tensor) of the stream into the parameter of that name, cast to its type and device.

    Every parameter of the module must come exactly once with its shape (a tied weight counts once, under its first
    name); otherwise ValueError names the tensor and the module is not to be used.
    """
    left = dict(module.named_parameters())
    done: set[str] = set()
    with torch.no_grad():
        for name, tensor in stream:
            param = left.pop(name, None)
            if param is None:
                raise ValueError(f"{name} came twice" if name in done else f"the module has no parameter {name}")
            if param.shape != tensor.shape:
                raise ValueError(f"{name} has shape {tuple(tensor.shape)}, the module's has {tuple(param.shape)}")
            param.copy_(tensor)
            done.add(name)
    if left:
        raise ValueError(f"no weights came for {', '.join(sorted(left))}")
