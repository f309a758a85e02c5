"""What PEFT does with adapters of feed-forward layers in models that have experts: not all that it is given.

Transformers 5 holds the experts of a layer in one tensor for gate and up and one for down, and PEFT 0.21 turns a file's targets
into those tensors while it loads: all targets of these names, whatever layers they are of. tests/engines/test_peft_limits.py
holds every sentence here against PEFT.
"""

from __future__ import annotations

from rlmca.layouts.adapters import PREFIX, AdapterLayout

VERSION = "0.21"
_GATE, _UP, _DOWN = {"gate_proj", "w1"}, {"up_proj", "w3"}, {"down_proj", "w2"}
_NOT_JOINED = ("qwen2_moe",)
"""Families whose experts PEFT attaches nothing to, and whose other layers it takes as they are written."""


def peft_limit(layout: AdapterLayout) -> str | None:
    """What PEFT leaves out of an adapter of this layout, or that it refuses it; None when it reads all of it."""
    if not layout.megatron.num_experts:
        return None
    layers = {name.removeprefix(PREFIX).split(".lora_")[0] for name in layout.hf_tensors()}
    feed_forward = {name for name in layers if _leaf(name) in _GATE | _UP | _DOWN}
    experts = {name for name in feed_forward if ".experts." in name}
    attached = layout.family.model_type not in _NOT_JOINED
    leaves = {_leaf(name) for name in (feed_forward if attached else experts)}
    gate, up, down = (bool(leaves & part) for part in (_GATE, _UP, _DOWN))
    if gate != up:
        return f"PEFT {VERSION} refuses this adapter: it joins gate and up of experts, and lora_target has one of them alone"
    if not attached:
        return _left_out("the experts") if experts else None
    if experts and gate and not down:
        return _left_out("the feed-forward layers, whose down projections have none")
    if feed_forward - experts:
        return _left_out("feed-forward layers outside of experts (dense layers and shared experts)")
    return None


def _left_out(what: str) -> str:
    return f"PEFT {VERSION} leaves out, without an error, the adapters of {what}"


def _leaf(name: str) -> str:
    return name.rsplit(".", 1)[-1]
