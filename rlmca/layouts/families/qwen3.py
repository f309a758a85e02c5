"""Qwen3 (dense): grouped-query attention with RMS norms on the query and key heads, gated MLP, no biases."""

from __future__ import annotations

from rlmca.layouts.families.common import (
    ATTENTION,
    DECODER,
    EMBEDDING,
    FIXED,
    HEAD,
    MLP,
    QK_NORM,
    WINDOWS,
    full_attention,
    head_fields,
    heads,
    rope,
)  # fmt: skip
from rlmca.layouts.family import Family
from rlmca.layouts.fields import Joint, Only

QWEN3 = Family(
    model_type="qwen3",
    fields=head_fields("Qwen3ForCausalLM")
    | DECODER
    | WINDOWS
    | {
        "head_dim": Joint(128, "int", nullable=False),
        "attention_bias": Only((False,), "only false works: true adds biases to q, k, v and o, and Megatron would add one to the MLP too"),
    },
    fixed=FIXED | {"qk_layernorm": True},
    joint=(heads, rope, full_attention),
    rows=(*EMBEDDING, *ATTENTION, *QK_NORM, *MLP, *HEAD),
)
