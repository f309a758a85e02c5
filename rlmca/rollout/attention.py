"""Attention for one new token per row, without copying the cache.

With grouped key-value heads and a mask, Transformers' SDPA path repeats keys and values for every query head before it
attends: at one query per row that copy costs more than the attention. Here the query heads that share a key-value head
become query *positions* of that head, which is the same arithmetic because a single query has no causal order.

Shape legend: B rows, H query heads, K key-value heads, R = H / K, S positions, D head dimension.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

GROUPED_ATTENTION = "rlmca_grouped"
"""Name under which Transformers finds it (`attn_implementation`)."""


def grouped_attention(
    module: torch.nn.Module,
    query_BHTD: Tensor,
    key_BKSD: Tensor,
    value_BKSD: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """SDPA as Transformers calls it; several queries per row take Transformers' own path. Returns [B, T, H, D]."""
    B, H, T, D = query_BHTD.shape
    K = key_BKSD.shape[1]
    if T > 1 or H == K:
        return sdpa_attention_forward(module, query_BHTD, key_BKSD, value_BKSD, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
    out_BKRD = torch.nn.functional.scaled_dot_product_attention(
        query_BHTD.reshape(B, K, H // K, D), key_BKSD, value_BKSD, attn_mask=attention_mask, scale=scaling
    )
    return out_BKRD.reshape(B, 1, H, D), None


def register_grouped_attention() -> None:
    """Makes `GROUPED_ATTENTION` known to Transformers, with SDPA's boolean masks. Calling it again changes nothing."""
    AttentionInterface.register(GROUPED_ATTENTION, grouped_attention)
    AttentionMaskInterface.register(GROUPED_ATTENTION, sdpa_mask)
