"""Core attention and norms in plain torch, for machines without Transformer Engine.

Shape legend: S tokens, B rows, H heads (query: H, key/value: G groups), D head size.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from rlmca.models.context import heads_to_tokens, tokens_to_heads, zigzag_positions


class TorchRMSNorm(torch.nn.RMSNorm):
    """RMSNorm that sequence parallelism accepts.

    Under sequence parallelism every tensor-parallel rank sees a part of the tokens, so the weight's gradient must
    be summed over them; the marker is what Megatron's `finalize_model_grads` looks for.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        weight: Any = self.weight
        weight.sequence_parallel = config.sequence_parallel


class TorchCoreAttention(MegatronModule):
    """Causal attention with grouped queries through torch's scaled_dot_product_attention, also over context-parallel ranks.

    Rows are right-padded and pads come after every real token, so the causal mask alone keeps them out of real
    tokens; what pads compute is never read. Any other mask, packed rows and biases raise: computing something
    else than asked would go unnoticed.
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

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """query [S, B, H, D], key and value [S, B, G, D] -> [S, B, H * D]; S are this rank's tokens of each row."""
        if attention_mask is not None or attention_bias is not None or packed_seq_params is not None:
            raise ValueError("the torch core attention computes plain causal attention: no mask, bias or packed rows")
        if attn_mask_type not in (AttnMaskType.causal, None) or key.shape[0] != query.shape[0]:
            raise ValueError(f"the torch core attention is causal over equal lengths, not {attn_mask_type}")
        if self.cp_group is None:
            out_SBHD = self._attend(query, key, value)
        elif self.exchange == "a2a":
            heads = [tokens_to_heads(t, self.cp_group) for t in self._split_heads(query, key, value)]
            out_SBHD = heads_to_tokens(self._attend(*heads), self.cp_group)
        else:
            out_SBHD = self._attend_to_all(query, key, value)
        S, B = query.shape[:2]
        return out_SBHD.reshape(S, B, -1)

    def _split_heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Key and value heads repeated as far as it takes to give every rank of the group as many."""
        groups, size = key.shape[2], self.cp_group.size()
        repeats = size // math.gcd(groups, size)
        if repeats > 1:
            key, value = (t.repeat_interleave(repeats, dim=2) for t in (key, value))
        return query, key, value

    def _attend_to_all(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """This rank's queries against the keys and values of all ranks; their gradients are summed back to their owners."""
        size, rank = self.cp_group.size(), self.cp_group.rank()
        T = query.shape[0] * size
        position_T = torch.cat([zigzag_positions(T, size, r, query.device) for r in range(size)])
        key, value = (_gather_summing(t, self.cp_group) for t in (key, value))
        own_S = zigzag_positions(T, size, rank, query.device)
        return self._attend(query, key, value, mask_ST=own_S[:, None] >= position_T)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask_ST: Tensor | None = None) -> Tensor:
        """[S, B, H, D], causal unless a mask says which keys a query sees."""
        q_BHSD, k_BGSD, v_BGSD = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        dropout = self.dropout if self.training else 0.0
        # Tensor ranks hold different heads, so they must drop differently; the default generator draws alike on all of
        # them. Under sequence parallelism Megatron runs the whole block on the model-parallel generator.
        own_draw = get_cuda_rng_tracker().fork() if dropout and not self.config.sequence_parallel else contextlib.nullcontext()
        with own_draw:
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
