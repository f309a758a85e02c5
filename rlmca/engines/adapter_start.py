"""The adapter that a run starts from, kept beside the one that it trains: what the KL of reinforcement learning is measured against."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from rlmca.models.options import LoraOptions


class AdapterStart:
    """Copies of the `parameters` of adapters as they are now, when `options.keep_start` asks for them."""

    def __init__(self, parameters: Mapping[str, Tensor], options: LoraOptions) -> None:
        self._parameters = parameters
        self._fresh = options.start is None
        keep = options.keep_start and not self._fresh
        self._kept: dict[str, Tensor] | None = {name: p.detach().clone() for name, p in parameters.items()} if keep else None

    @property
    def tensors(self) -> list[Tensor]:
        """The copies."""
        return list((self._kept or {}).values())

    @property
    def is_base(self) -> bool:
        """Whether the model started as its base: a new adapter adds nothing yet. ValueError when the start was not kept."""
        if self._kept is None and not self._fresh:
            raise ValueError("this engine did not keep the adapter that it started from: set keep_start in its LoraOptions")
        return self._fresh

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """The adapters as they were at the start inside the block, bit by bit as they are now after it."""
        now = {name: p.detach().clone() for name, p in self._parameters.items()}
        try:
            self._write(self._kept or {})
            yield
        finally:
            self._write(now)

    @torch.no_grad()
    def _write(self, values: Mapping[str, Tensor]) -> None:
        for name, value in values.items():
            self._parameters[name].copy_(value)
