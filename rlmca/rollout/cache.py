"""A key-value cache that grows in place and forgets rows.

Transformers' `DynamicCache` concatenates the whole cache at every new token. Here keys and values lie in buffers with
room to spare, a new token is written behind the last one, and rows are chosen by an index: once to give every reply a
copy of its prompt, later to drop the replies that are finished.

Shape legend: B rows, H key-value heads, S positions in use, D head dimension.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, DynamicLayer

_ROOM = 16
"""Positions added at least when a buffer is full."""


class _BufferLayer(DynamicLayer):
    """Keys and values of one layer: the first `length` positions of buffers [B, H, capacity, D]."""

    keys: Tensor | None
    values: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.length = 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Appends [B, H, n, D] and returns everything so far as views."""
        if self.keys is None or self.values is None:
            self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True
            self.keys, self.values, self.length = key_states, value_states, key_states.shape[2]
            return key_states, value_states
        end = self.length + key_states.shape[2]
        if end > self.keys.shape[2]:
            self._choose(None, max(end + _ROOM, end + end // 2))
        self.keys[:, :, self.length : end] = key_states
        self.values[:, :, self.length : end] = value_states
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def _choose(self, rows_B: Tensor | None, capacity: int) -> None:
        assert self.keys is not None and self.values is not None
        self.keys, self.values = self._moved(self.keys, rows_B, capacity), self._moved(self.values, rows_B, capacity)

    def _moved(self, old: Tensor, rows_B: Tensor | None, capacity: int) -> Tensor:
        used = old[:, :, : self.length]
        new = old.new_empty(len(old) if rows_B is None else len(rows_B), old.shape[1], capacity, old.shape[3])
        new[:, :, : self.length] = used if rows_B is None else used.index_select(0, rows_B)
        return new

    def get_seq_length(self) -> int:
        """Positions in use."""
        return self.length

    def batch_select_indices(self, indices: Tensor) -> None:
        """Row i becomes the old row indices[i]; an index may come several times or not at all."""
        assert self.keys is not None
        self._choose(indices, max(self.keys.shape[2], self.length + _ROOM))


class RowCache(Cache):
    """One `_BufferLayer` for each decoder layer; `batch_select_indices` chooses, repeats and drops rows.

    Layers with sliding windows keep everything: their window is in the attention mask.
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(layers=[_BufferLayer() for _ in range(config.get_text_config(decoder=True).num_hidden_layers)])


def select_rows(cache: RowCache, rows_B: Tensor) -> None:
    """Every layer's rows chosen by `rows_B` (int64)."""
    for layer in cache.layers:
        layer.batch_select_indices(rows_B)


def repeats(count: list[int], device: torch.device) -> Tensor:
    """Row index [sum(count)] that gives row p count[p] times, in order."""
    return torch.repeat_interleave(torch.arange(len(count), device=device), torch.tensor(count, device=device))
