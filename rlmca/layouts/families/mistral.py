"""Mistral (7B v0.1 to v0.3, Nemo, Small): Llama's layers; v0.1 lets a token see the last 4096 tokens alone, in every layer."""

from __future__ import annotations

from rlmca.layouts.families.common import ATTENTION, DECODER, EMBEDDING, FIXED, HEAD, MLP, Part, head_fields, heads, rope
from rlmca.layouts.family import Family
from rlmca.layouts.fields import Joint, Mapped, Values


def window(values: Values) -> Part:
    """`sliding_window` counts the token itself, Megatron's `window_size` the tokens to its left and to its right."""
    size = values["sliding_window"]
    return {"config": {"window_size": None if size is None else (size - 1, 0)}}


MISTRAL = Family(
    model_type="mistral",
    fields=head_fields("MistralForCausalLM")
    | DECODER
    | {
        "vocab_size": Mapped("vocab_size", 32000, "int", into="model"),
        "intermediate_size": Mapped("ffn_hidden_size", 14336, "int"),
        "num_key_value_heads": Joint(8, "int", nullable=False),
        "max_position_embeddings": Mapped("max_sequence_length", 131072, "int", into="model"),
        "sliding_window": Joint(4096, "int"),
    },
    fixed=FIXED,
    joint=(heads, rope, window),
    rows=(*EMBEDDING, *ATTENTION, *MLP, *HEAD),
)
