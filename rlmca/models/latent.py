"""Multi-latent attention of Megatron-Core with torch's parts, right under tensor parallelism, and routers left as they are.

Shape legend: S tokens, B rows, H hidden size, R rows of the way down.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from rlmca.models.attention import TorchRMSNorm

if not isinstance(multi_latent_attention.TELinear, type):
    # megatron-core 0.16.1 takes its own wrappers' file for Transformer Engine, and then asks whether a module is a stand-in
    multi_latent_attention.HAVE_TE = False

LATENT_EPS = 1e-6
"""Transformers' classes norm latent vectors with this whatever `rms_norm_eps` says."""


class LatentRMSNorm(TorchRMSNorm):
    """The norm of a latent vector."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = LATENT_EPS, **_: Any) -> None:
        super().__init__(config, hidden_size, eps=LATENT_EPS)


class WholeLinear(MegatronModule):
    """A linear layer that every tensor-parallel rank holds whole; under sequence parallelism it sees this rank's tokens."""

    def __init__(self, config: TransformerConfig, inputs: int, outputs: int) -> None:
        super().__init__(config=config)
        self.weight = torch.nn.Parameter(torch.empty(outputs, inputs, dtype=config.params_dtype))
        if config.perform_initialization and config.init_method is not None:
            config.init_method(self.weight)
        weight: Any = self.weight
        weight.sequence_parallel = config.sequence_parallel  # see TorchRMSNorm

    def forward(self, x_SBH: Tensor) -> tuple[Tensor, None]:
        """[S, B, H] -> [S, B, R] and no bias, as Megatron's linear layers answer."""
        return torch.nn.functional.linear(x_SBH, self.weight), None


class LatentAttention(MLASelfAttention):
    """Megatron's, with whole ways down, as its Transformer Engine spec has them.

    megatron-core 0.16.1 cuts them over tensor ranks in its local spec and gathers what they give. All heads share the
    rotated key, but backward every rank keeps only what its own heads did with it: the loss is right, gradients are not.
    """

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        if config.q_lora_rank is not None:
            self.linear_q_down_proj = WholeLinear(config, config.hidden_size, config.q_lora_rank)
        self.linear_kv_down_proj = WholeLinear(config, config.hidden_size, config.kv_lora_rank + config.qk_pos_emb_head_dim)


def use_latent_attention(layer: Any) -> None:
    """Put these parts into a layer of Megatron's local spec."""
    attention = layer.submodules.self_attention
    attention.module = LatentAttention
    attention.submodules.q_layernorm = attention.submodules.kv_layernorm = LatentRMSNorm


def leave_biases(modules: Iterable[Any], config: TransformerConfig) -> None:
    """Routers go on choosing by their bias, and nothing counts tokens or moves it: Megatron would after every step."""
    for module in modules:
        if isinstance(module, TopKRouter):
            module.enable_expert_bias = False
    config.moe_router_enable_expert_bias = False
