"""Rows of a family's table: which Hugging Face tensors make up which Megatron parameter, and how it is laid out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Spec = Literal["local", "te"]
Form = Literal["single", "stacked"]
"""How a folder holds experts: a tensor for each, or one tensor for all experts of a layer, as Transformers' modules do."""


@dataclass(frozen=True)
class Layout:
    """How a Megatron parameter lies on tensor-parallel ranks.

    `axis` is the axis that is cut, None for a copy on every rank. `groups` says how the tensors are interleaved
    before the cut: "one" plain, "kv" one group per KV head, "tp" one group per rank. `padded`: axis 0 is the
    vocabulary and grows to its padded size.
    """

    axis: int | None
    groups: Literal["one", "kv", "tp"] = "one"
    padded: bool = False


REPLICATED = Layout(axis=None)
COLUMN = Layout(axis=0)
ROW = Layout(axis=1)
GATED = Layout(axis=0, groups="tp")
QKV = Layout(axis=0, groups="kv")
VOCABULARY = Layout(axis=0, padded=True)


@dataclass(frozen=True)
class MegatronModel:
    """Keyword arguments for Megatron-Core, without parallelism, types and specs.

    `config` is for `TransformerConfig`; its "activation_func" is the *name* of a function in torch.nn.functional.
    `model` is for `GPTModel`; its "vocab_size" is the real vocabulary, which the builder replaces with the padded one.
    `files` says what a folder holds besides the model, see `kept`. `rope` has the numbers of scaled rotary embeddings, which
    `GPTModel` has no arguments for; empty for plain ones.
    """

    config: Mapping[str, Any]
    model: Mapping[str, Any]
    files: Mapping[str, Any] = field(default_factory=dict)
    rope: Mapping[str, Any] = field(default_factory=dict)

    @property
    def kept(self) -> tuple[str, ...]:
        """How the names of tensors begin that no part of the model reads, and that its exports carry along as they are."""
        return tuple(self.files.get("kept", ()))

    @property
    def latent(self) -> bool:
        """Whether attention keeps queries, keys and values in a narrow form of their own (multi-latent attention)."""
        return bool(self.config.get("multi_latent_attention"))

    @property
    def tied(self) -> bool:
        """Whether the output head uses the embedding's weight."""
        return bool(self.model["share_embeddings_and_output_weights"])

    @property
    def num_experts(self) -> int:
        """Experts of a mixture layer; 0 for a dense model."""
        return int(self.config.get("num_moe_experts") or 0)

    def has_experts(self, layer: int) -> bool:
        """Whether a layer is a mixture of experts."""
        return bool(self.num_experts and self.config["moe_layer_freq"][layer])

    def sizes(self) -> dict[str, int]:
        """Extents that rows name: vocab, hidden, ffn, q and kv (rows of the projections), head; experts, moe_ffn, shared_ffn; one;
        of multi-latent attention see `_latent_sizes`."""
        c, head = self.config, int(self.config["kv_channels"])
        mixture = {"experts": self.num_experts, "moe_ffn": c["moe_ffn_hidden_size"]} if self.num_experts else {}
        if (shared := c.get("moe_shared_expert_intermediate_size")) is not None:
            mixture["shared_ffn"] = shared
        return {
            **mixture,
            **(self._latent_sizes() if self.latent else {}),
            "vocab": self.model["vocab_size"],
            "hidden": c["hidden_size"],
            "ffn": c["ffn_hidden_size"],
            "q": c["num_attention_heads"] * head,
            "kv": c["num_query_groups"] * head,
            "head": head,
            "one": 1,
        }

    def _latent_sizes(self) -> dict[str, int]:
        """q_latent, kv_latent and kv_down (with the rotated key): rows of the way down; kv_up and v: of all heads' way up, and values."""
        c, heads = self.config, self.config["num_attention_heads"]
        return {
            "q_latent": c["q_lora_rank"] or 0,
            "kv_latent": c["kv_lora_rank"],
            "kv_down": c["kv_lora_rank"] + c["qk_pos_emb_head_dim"],
            "kv_up": heads * (c["qk_head_dim"] + c["v_head_dim"]),
            "v": heads * c["v_head_dim"],
        }


def always(_: MegatronModel) -> bool:
    """Condition of a row that every model of the family has."""
    return True


def every(_: MegatronModel, __: int) -> bool:
    """Condition of a row that every layer has."""
    return True


@dataclass(frozen=True)
class Row:
    """One Megatron parameter and the Hugging Face tensors in it.

    `hf` maps names to shapes in units of `MegatronModel.sizes()`. `{l}` in a name is the layer: of the whole model in
    Hugging Face names, of the stage in Megatron names. `te` is the Megatron name in Transformer Engine's
    layer spec where it differs. `at`: on the first stage, on the stage of its layer, or on the last stage. `of` says
    which layers have it. A row with `expert` is one parameter for each expert, `{e}` in names its number: of the whole
    layer in Hugging Face names, of the rank in Megatron names; expert ranks split it instead of tensor-parallel ones.
    `stacked` names the one tensor that is `hf` in the stacked form: its tensors behind each other along axis 0 and, of a row
    with `expert`, all experts along an axis in front; None where the form changes nothing.
    `buffer`: no optimizer trains it, and whatever the type of the parameters it is float32.
    """

    megatron: str
    hf: Mapping[str, tuple[str, ...]]
    layout: Layout
    at: Literal["first", "layer", "last"] = "layer"
    te: str | None = None
    when: Callable[[MegatronModel], bool] = always
    of: Callable[[MegatronModel, int], bool] = every
    expert: bool = False
    stacked: str | None = None
    buffer: bool = False

    def name(self, spec: Spec, layer: int, expert: int = 0) -> str:
        """Parameter name under `spec`; `layer` counts inside the stage, `expert` inside the rank."""
        return (self.te if spec == "te" and self.te else self.megatron).format(l=layer, e=expert)
