"""Executors to and from a Transformers module in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlmca.layouts import Form
from rlmca.layouts.boxes import Shape


@dataclass(frozen=True)
class ModuleWeights:
    """Tensors that every rank of `group` holds whole, as `transfer.stream.Weights`: a module's parameters, or some of them.

    All have one dtype. Of `named_parameters()` a tied weight comes once, under its first name.
    """

    params: Mapping[str, Tensor]
    hf_config: Mapping[str, Any]
    group: dist.ProcessGroup | None = None
    readable: Callable[[], None] = lambda: None
    """Raises while the parameters have no memory; see `LiveWeights`."""
    added: Callable[[str], Tensor | None] = lambda name: None
    """What is to be added to a parameter, in a wider type; see `LiveWeights`."""

    @property
    def dtype(self) -> torch.dtype:
        """See `Weights`."""
        return next(iter(self.params.values())).dtype

    def in_form(self, form: Form) -> ModuleWeights:
        """See `Weights`. Names are the module's own in any case."""
        return self

    @property
    def own_dtypes(self) -> Mapping[str, torch.dtype]:
        """See `Weights`: all is trained."""
        return {}

    def shapes(self) -> Mapping[str, Shape]:
        """See `Weights`."""
        return {name: tuple(parameter.shape) for name, parameter in self.params.items()}

    def tensors(self, dst_rank: int = 0) -> Iterator[tuple[str, Tensor]]:
        """See `Weights`. Nothing is sent: `dst_rank` has them all."""
        if self.group is None or dist.get_rank() == dst_rank:
            for name, parameter in self.params.items():
                self.readable()
                value, delta = parameter.detach(), self.added(name)
                yield name, value if delta is None else (value.to(delta.dtype) + delta).to(value.dtype)


def copy_to_module(stream: Iterable[tuple[str, Tensor]], module: nn.Module) -> None:
    """Copy every (name, tensor) of the stream into the parameter (or the stored buffer) of that name, cast to its type and device.

    Every parameter of the module must come exactly once with its shape (a tied weight counts once, under its first
    name); otherwise ValueError names the tensor and the module is not to be used.
    """
    left = dict(module.named_parameters())
    stored = module.state_dict(keep_vars=True)
    buffers = {name: buffer for name, buffer in module.named_buffers() if name in stored}
    done: set[str] = set()
    with torch.no_grad():
        for name, tensor in stream:
            param = left.pop(name, None) if name in left else buffers.pop(name, None)
            if param is None:
                raise ValueError(f"{name} came twice" if name in done else f"the module has no parameter {name}")
            if param.shape != tensor.shape:
                raise ValueError(f"{name} has shape {tuple(tensor.shape)}, the module's has {tuple(param.shape)}")
            param.copy_(tensor)
            done.add(name)
    if left:
        raise ValueError(f"no weights came for {', '.join(sorted(left))}")
