"""Core attention and norms in plain torch, for machines without Transformer Engine.

Shape legend: S tokens, B rows, H heads (query: H, key/value: G groups), D head size.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from rlmca.models.context import Borders, heads_to_tokens, held_places, natural_order, tokens_to_heads


class TorchRMSNorm(torch.nn.RMSNorm):
    """RMSNorm that sequence parallelism accepts.

    Under sequence parallelism every tensor-parallel rank sees a part of the tokens, so the weight's gradient must
    be summed over them; the marker is what Megatron's `finalize_model_grads` looks for.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        weight: Any = self.weight
        weight.sequence_parallel = config.sequence_parallel


@dataclass
class PackedRows(PackedSeqParams):
    """Megatron's description of a packed row, and the same borders as numbers: reading them off a device would wait for it."""

    borders: Borders = ()


def packed_rows(borders: Borders, device: torch.device) -> PackedRows:
    """Sequences behind each other in one row. Padding belongs to the sequence that it follows, or is one of its own."""
    cumulative = torch.tensor(borders, dtype=torch.int32, device=device)
    longest = max(end - begin for begin, end in itertools.pairwise(borders))
    return PackedRows(
        qkv_format="thd",
        cu_seqlens_q=cumulative,
        cu_seqlens_kv=cumulative,
        cu_seqlens_q_padded=cumulative,
        cu_seqlens_kv_padded=cumulative,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        borders=borders,
    )


class TorchCoreAttention(MegatronModule):
    """Causal attention with grouped queries through torch's scaled_dot_product_attention, also over context-parallel ranks.

    Sequences are right-padded and pads come after every real token, so the causal mask alone keeps them out of real
    tokens; what pads compute is never read. Packed sequences are taken one by one and never see each other. With a window
    (Megatron's `window_size`, tokens to the left of one's own) a token sees the last ones alone. Any other mask and biases
    raise: computing something else than asked would go unnoticed.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.cp_group: Any = parallel_state.get_context_parallel_group() if config.context_parallel_size > 1 else None
        self.exchange = cp_comm_type or "all_gather"
        if self.exchange not in ("all_gather", "a2a"):
            raise ValueError(f"the torch core attention knows cp_comm_type all_gather and a2a, not {self.exchange}")
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window: int | None = config.window_size[0] + 1 if windowed and config.window_size else None
        """How many tokens one sees, itself included."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedRows | None = None,
    ) -> Tensor:
        """query [S, B, H, D], key and value [S, B, G, D] -> [S, B, H * D]; S are this rank's tokens of each row.

        Packed, Megatron leaves out the axis of rows: [S, H, D] and [S, G, D] -> [S, H * D].
        """
        if attention_mask is not None or attention_bias is not None:
            raise ValueError("the torch core attention computes plain causal attention: no mask, no bias")
        if attn_mask_type not in (AttnMaskType.causal, None) or key.shape[0] != query.shape[0]:
            raise ValueError(f"the torch core attention is causal over equal lengths, not {attn_mask_type}")
        if packed_seq_params is not None:
            query, key, value = (t.unsqueeze(1) for t in (query, key, value))
        whole: Borders = (0, query.shape[0] * (1 if self.cp_group is None else self.cp_group.size()))
        borders = whole if packed_seq_params is None else packed_seq_params.borders
        if self.cp_group is None:
            out_SBHD = self._attend(query, key, value, borders)
        elif self.exchange == "a2a":
            query_, key_, value_ = (tokens_to_heads(t, borders, self.cp_group) for t in self._split_heads(query, key, value))
            out_SBHD = heads_to_tokens(self._attend(query_, key_, value_, borders), borders, self.cp_group)
        else:
            out_SBHD = self._attend_to_all(query, key, value, borders)
        S, B = query.shape[:2]
        return out_SBHD.reshape(S, -1) if packed_seq_params is not None else out_SBHD.reshape(S, B, -1)

    def _split_heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Key and value heads repeated as far as it takes to give every rank of the group as many."""
        groups, size = key.shape[2], self.cp_group.size()
        repeats = size // math.gcd(groups, size)
        if repeats > 1:
            key, value = (t.repeat_interleave(repeats, dim=2) for t in (key, value))
        return query, key, value

    def _attend_to_all(self, query: Tensor, key: Tensor, value: Tensor, borders: Borders) -> Tensor:
        """This rank's queries against the keys and values of all ranks; their gradients are summed back to their owners."""
        size = self.cp_group.size()
        held_S = held_places(borders, size, self.cp_group.rank(), query.device)
        order_T = natural_order(borders, size, query.device)
        key, value = (_gather_summing(t, self.cp_group)[order_T] for t in (key, value))
        parts = []
        for begin, end in itertools.pairwise(borders):
            own, all_ = slice(begin // size, end // size), slice(begin, end)
            mask_ST = self._seen(held_S[own], torch.arange(begin, end, device=query.device))
            parts.append(self._sequence(query[own], key[all_], value[all_], mask_ST))
        return torch.cat(parts)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, borders: Borders) -> Tensor:
        """[T, B, H, D], causal within each sequence."""
        parts = []
        for begin, end in itertools.pairwise(borders):
            step = min(end - begin, self.window or end - begin)
            for a in range(begin, end, max(1, step)):  # one part, or as many as windows fit in: scores stay that small
                b, first = min(a + step, end), max(begin, a + 1 - step)
                mask_ST = None if a == begin else self._seen(*(torch.arange(p, b, device=query.device) for p in (a, first)))
                parts.append(self._sequence(query[a:b], key[first:b], value[first:b], mask_ST))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _seen(self, query_S: Tensor, key_T: Tensor) -> Tensor:
        """[S, T]: which places a token at a place sees."""
        seen_ST = query_S[:, None] >= key_T
        return seen_ST if self.window is None else seen_ST & ((query_S - self.window)[:, None] < key_T)

    def _sequence(self, query: Tensor, key: Tensor, value: Tensor, mask_ST: Tensor | None = None) -> Tensor:
        """[S, B, H, D], causal unless a mask says which keys a query sees."""
        q_BHSD, k_BGSD, v_BGSD = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        dropout = self.dropout if self.training else 0.0
        # Tensor ranks hold different heads, so they must drop differently; the default generator draws alike on all of
        # them. Under sequence parallelism Megatron runs the whole block on the model-parallel generator.
        own_draw = get_cuda_rng_tracker().fork() if dropout and not self.config.sequence_parallel else contextlib.nullcontext()
        with own_draw, contextlib.nullcontext() if self.config.masked_softmax_fusion else sdpa_kernel(SDPBackend.MATH):
            out_BHSD = F.scaled_dot_product_attention(
                q_BHSD,
                k_BGSD,
                v_BGSD,
                attn_mask=mask_ST,
                is_causal=mask_ST is None,
                scale=self.scale,
                dropout_p=dropout,
                enable_gqa=query.shape[2] != key.shape[2],
            )
        return out_BHSD.permute(2, 0, 1, 3)


def _gather_summing(x_SBGD: Tensor, group: Any) -> Tensor:
    """The tokens of all ranks, rank by rank; backward, what all ranks did with a token is summed up for its owner."""
    return gather_from_sequence_parallel_region(x_SBGD.contiguous(), tensor_parallel_output_grad=True, group=group)
