"""Llama (2, 3 and models of its shape): grouped-query attention, gated MLP; biases everywhere or nowhere."""

from __future__ import annotations

from rlmca.layouts.families.common import ATTENTION, DECODER, EMBEDDING, FIXED, HEAD, MLP, Part, head_fields, heads, rope
from rlmca.layouts.family import Family
from rlmca.layouts.fields import FieldError, Joint, Mapped, NoEffect, Only, Values


def biases(values: Values) -> Part:
    """`attention_bias` and `mlp_bias` together are Megatron's `add_bias_linear`; one alone has no counterpart."""
    attention, mlp = values["attention_bias"], values["mlp_bias"]
    if attention != mlp:
        works = f"attention_bias and mlp_bias must be both true or both false (mlp_bias is {mlp})"
        raise FieldError("attention_bias", attention, works)
    return {"config": {"add_bias_linear": attention}}


LLAMA = Family(
    model_type="llama",
    fields=head_fields("LlamaForCausalLM")
    | DECODER
    | {
        "vocab_size": Mapped("vocab_size", 32000, "int", into="model"),
        "intermediate_size": Mapped("ffn_hidden_size", 11008, "int"),
        "max_position_embeddings": Mapped("max_sequence_length", 2048, "int", into="model"),
        "num_key_value_heads": Joint(None, "int"),
        "attention_bias": Joint(False, "bool"),
        "mlp_bias": Joint(False, "bool"),
        "pretraining_tp": NoEffect("splits a product into parts of the same sum"),
        "is_llama_config": NoEffect("a marker"),
        "rope_interleaved": Only((False, None), "only false works"),
        "transformers.js_config": NoEffect("read by another runtime"),
    },
    fixed=FIXED,
    joint=(heads, rope, biases),
    rows=(*EMBEDDING, *ATTENTION, *MLP, *HEAD),
)
