"""Angles of scaled rotary embeddings, number for number as Transformers computes them.

Megatron-Core 0.16.1 has Llama 3's scaling with constants built in, divides positions where Transformers divides frequencies,
and of YaRN has no `attention_factor`. Angles grow with positions, so that the last bit of a frequency shows in long rows.

Shape legend: F frequencies, half as many as a head has rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


def inverse_frequencies(rope: Mapping[str, Any], base: float, rows: int) -> Tensor:
    """[F] float32 of a head with `rows` rows; `rope` as `layouts.families.angles.scaling` gives it.

    The order of operations is that of `ROPE_INIT_FUNCTIONS` in Transformers' `modeling_rope_utils.py`.
    """
    powers_F: Tensor = base ** (torch.arange(0, rows, 2, dtype=torch.float32) / rows)
    plain_F = 1.0 / powers_F
    match rope["rope_type"]:
        case "linear":
            return plain_F / rope["factor"]
        case "llama3":
            return _llama3(rope, plain_F)
        case "yarn":
            return _yarn(rope, base, rows, powers_F)
        case other:
            raise ValueError(f"no angles of rope_type {other}")


def _llama3(rope: Mapping[str, Any], plain_F: Tensor) -> Tensor:
    factor, low, high, old = (rope[k] for k in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"))
    wave_F = 2 * math.pi / plain_F
    scaled_F = torch.where(wave_F > old / low, plain_F / factor, plain_F)
    smooth_F = (old / wave_F - low) / (high - low)
    between_F = (1 - smooth_F) * scaled_F / factor + smooth_F * scaled_F
    return torch.where(~(wave_F < old / high) & ~(wave_F > old / low), between_F, scaled_F)


def _yarn(rope: Mapping[str, Any], base: float, rows: int, powers_F: Tensor) -> Tensor:
    def turning(times: float) -> float:
        """The row at which a frequency turns so many times within the original length."""
        return (rows * math.log(rope["original_max_position_embeddings"] / (times * 2 * math.pi))) / (2 * math.log(base))

    low, high = turning(rope["beta_fast"]), turning(rope["beta_slow"])
    if rope["truncate"]:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rows - 1)
    high = high + 0.001 if low == high else high
    ramp_F = torch.clamp((torch.arange(rows // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    kept_F = 1 - ramp_F
    return 1.0 / (rope["factor"] * powers_F) * (1 - kept_F) + 1.0 / powers_F * kept_F


def scale_attention(config: TransformerConfig, rope: Mapping[str, Any]) -> None:
    """Cosines and sines times `attention_factor`; before a model is built from the config.

    Megatron's attention reads the factor off these attributes of the config, as 0.1 * mscale * ln(scaling factor) + 1, so it
    is written in these terms.
    """
    factor = rope.get("attention_factor", 1.0)
    if factor == 1.0:
        return
    if config.apply_rope_fusion:
        raise ValueError(
            f"apply_rope_fusion: the fused kernel leaves out the attention factor of YaRN ({factor:.4g}); write apply_rope_fusion: false"
        )
    read: Any = config
    read.yarn_rotary_scaling_factor, read.yarn_mscale, read.yarn_mscale_all_dim = math.exp(10.0), factor - 1.0, 0.0


def set_angles(model: Any, rope: Mapping[str, Any], base: float) -> None:
    """Give a built GPTModel the frequencies of `rope`. They are no buffer: no change of the weights' type reaches them."""
    if rope:
        embedding = model.rotary_pos_emb
        embedding.inv_freq = inverse_frequencies(rope, base, 2 * len(embedding.inv_freq)).to(embedding.inv_freq.device)
