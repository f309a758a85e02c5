"""Core attention and norms in plain torch, for machines without Transformer Engine.

Shape legend: S tokens, B rows, H heads (query: H, key/value: G groups), D head size.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


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
    """Causal attention with grouped queries through torch's scaled_dot_product_attention.

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
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        if config.context_parallel_size > 1:
            raise ValueError("the torch core attention does not split sequences: context_parallel_size must be 1")
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
        """query [S, B, H, D], key and value [S, B, G, D] -> [S, B, H * D]."""
        if attention_mask is not None or attention_bias is not None or packed_seq_params is not None:
            raise ValueError("the torch core attention computes plain causal attention: no mask, bias or packed rows")
        if attn_mask_type not in (AttnMaskType.causal, None) or key.shape[0] != query.shape[0]:
            raise ValueError(f"the torch core attention is causal over equal lengths, not {attn_mask_type}")
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
                is_causal=True,
                scale=self.scale,
                dropout_p=dropout,
                enable_gqa=query.shape[2] != key.shape[2],
            )
        S, B = query.shape[:2]
        return out_BHSD.permute(2, 0, 1, 3).reshape(S, B, -1)
