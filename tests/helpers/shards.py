"""What each Megatron rank holds, by plain slicing of Hugging Face arrays: the oracle of the copy plan (local layer spec)."""

from __future__ import annotations

from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray]


def shards(hf: Arrays, *, layers: int, kv_heads: int, tied: bool, tp: int, pp: int, multiple: int) -> dict[tuple[int, int], Arrays]:
    """{(tp rank, pp rank): {parameter: array}}; arrays may have any dtype."""
    vocab = hf["model.embed_tokens.weight"].shape[0]
    rows = vocab
    while rows % (tp * multiple):
        rows += 1

    def padded(x: np.ndarray) -> np.ndarray:
        return np.concatenate([x, np.zeros((rows - vocab, x.shape[1]), x.dtype)])

    ranks: dict[tuple[int, int], Arrays] = {}
    for p in range(pp):
        for t in range(tp):
            out: Arrays = {}
            if p == 0:
                out["embedding.word_embeddings.weight"] = np.split(padded(hf["model.embed_tokens.weight"]), tp)[t]
            for i in range(layers // pp):
                _layer(hf, f"model.layers.{p * (layers // pp) + i}.", out, f"decoder.layers.{i}.", kv_heads, tp, t)
            if p == pp - 1:
                out["decoder.final_layernorm.weight"] = hf["model.norm.weight"]
                if not tied:
                    out["output_layer.weight"] = np.split(padded(hf["lm_head.weight"]), tp)[t]
                elif pp > 1:
                    out["output_layer.weight"] = np.split(padded(hf["model.embed_tokens.weight"]), tp)[t]
            ranks[t, p] = out
    return ranks


def _layer(hf: Arrays, src: str, out: Arrays, dst: str, kv_heads: int, tp: int, t: int) -> None:
    mine = range(t * kv_heads // tp, (t + 1) * kv_heads // tp)
    for kind in ("weight", "bias"):
        if src + f"self_attn.q_proj.{kind}" in hf:
            q, k, v = (np.split(hf[src + f"self_attn.{x}_proj.{kind}"], kv_heads) for x in "qkv")
            out[dst + f"self_attention.linear_qkv.{kind}"] = np.concatenate([part for g in mine for part in (q[g], k[g], v[g])])
        if src + f"mlp.gate_proj.{kind}" in hf:
            gate, up = (np.split(hf[src + f"mlp.{x}_proj.{kind}"], tp)[t] for x in ("gate", "up"))
            out[dst + f"mlp.linear_fc1.{kind}"] = np.concatenate([gate, up])
    for theirs, ours in (("self_attn.o_proj", "self_attention.linear_proj"), ("mlp.down_proj", "mlp.linear_fc2")):
        out[dst + ours + ".weight"] = np.split(hf[src + theirs + ".weight"], tp, axis=1)[t]
        if src + theirs + ".bias" in hf:
            out[dst + ours + ".bias"] = hf[src + theirs + ".bias"]
    norms = {"input_layernorm": "input_layernorm", "post_attention_layernorm": "pre_mlp_layernorm",
             "self_attn.q_norm": "self_attention.q_layernorm", "self_attn.k_norm": "self_attention.k_layernorm"}  # fmt: skip
    for theirs, ours in norms.items():
        if src + theirs + ".weight" in hf:
            out[dst + ours + ".weight"] = hf[src + theirs + ".weight"]


def numbered(shapes: dict[str, tuple[int, ...]]) -> Arrays:
    """An array per name in which every element of every array is another integer, from 1."""
    out, at = {}, 1
    for name, shape in shapes.items():
        n = int(np.prod(shape))
        out[name] = np.arange(at, at + n, dtype=np.int64).reshape(shape)
        at += n
    return out


def shards_of(config: dict[str, Any], hf: Arrays, *, tp: int, pp: int, multiple: int) -> dict[tuple[int, int], Arrays]:
    """`shards` with the sizes taken from a Hugging Face config that names them."""
    return shards(hf, layers=config["num_hidden_layers"], kv_heads=config["num_key_value_heads"],
                  tied=config.get("tie_word_embeddings", False), tp=tp, pp=pp, multiple=multiple)  # fmt: skip
