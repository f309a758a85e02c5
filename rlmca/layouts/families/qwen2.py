"""Qwen2 and Qwen2.5 (dense): grouped-query attention with biases on q, k and v, gated MLP."""

from __future__ import annotations

from rlmca.layouts.families.common import (
    ATTENTION,
    DECODER,
    EMBEDDING,
    FIXED,
    HEAD,
    MLP,
    WINDOWS,
    full_attention,
    head_fields,
    heads,
    rope,
)  # fmt: skip
from rlmca.layouts.family import Family
from rlmca.layouts.fields import Only

QWEN2 = Family(
    model_type="qwen2",
    fields=head_fields("Qwen2ForCausalLM") | DECODER | WINDOWS | {"use_mrope": Only((False, None), "only false works")},
    fixed=FIXED | {"add_qkv_bias": True},
    joint=(heads, rope, full_attention),
    rows=(*EMBEDDING, *ATTENTION, *MLP, *HEAD),
)
