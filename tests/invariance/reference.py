"""The same numbers by Transformers and torch alone: row by row, without padding, losses written out.

Shape legend: B rows, T tokens of the padded row, L targets of a row, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from rlmca.types import Batch
from tests.helpers.models import make_model
from tests.invariance.compare import Numbers
from tests.invariance.numbers import ENTROPY_WEIGHT, FAMILIES, TEMPERATURE

ISLANDS = ("norm", "rotary")


def transformers_numbers(family: str, batch: Batch, dtype: torch.dtype, islands: Collection[str] = ()) -> Numbers:
    """What `numbers.numbers_on_rank` computes, by Transformers' model of the same weights. `islands` stay in float32."""
    assert batch.advantage_BT is not None
    model = make_model(family, **FAMILIES[family], attn_implementation="sdpa").to(dtype)  # "eager" takes its softmax in float32
    if dtype == torch.float64:
        without_float32_islands(model, islands)
    logp_BT, entropy_BT = torch.zeros(2, *batch.ids_BT.shape, dtype=dtype).unbind()
    sft, policy = torch.zeros(2, dtype=torch.float64).unbind()
    rows_with_targets = batch.mask_BT.any(1).sum()
    for b in range(len(batch)):
        length, mask_T = int(batch.length_B[b]), batch.mask_BT[b]
        ids_1T = batch.ids_BT[b : b + 1, :length]
        place_L = mask_T.nonzero()[:, 0]
        if not len(place_L):
            continue
        logits_LV = model(input_ids=ids_1T, attention_mask=torch.ones_like(ids_1T)).logits[0, place_L - 1]
        logp_L, entropy_L = _of_logits(logits_LV, ids_1T[0, place_L])
        logp_BT[b, place_L], entropy_BT[b, place_L] = logp_L.detach(), entropy_L.detach()
        sft = sft - logp_L.sum() / batch.mask_BT.sum()
        logp_L, entropy_L = _of_logits(logits_LV / TEMPERATURE, ids_1T[0, place_L])
        ratio_L = (logp_L - logp_L.detach()).exp()  # of the policy to itself: 1, with the gradient of the log-prob
        policy = policy - (ratio_L * batch.advantage_BT[b, place_L] + ENTROPY_WEIGHT * entropy_L).mean() / rows_with_targets
    numbers = {"log-prob": logp_BT, "entropy": entropy_BT}
    for kind, loss in (("sft", sft), ("policy", policy)):
        model.zero_grad()
        loss.backward(retain_graph=True)
        numbers[f"{kind}: loss"] = loss.detach().double()
        numbers.update({f"{kind}: gradient of {name}": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    return numbers


def _of_logits(logits_LV: Tensor, target_L: Tensor) -> tuple[Tensor, Tensor]:
    logp_LV = torch.log_softmax(logits_LV, -1)
    return logp_LV.gather(1, target_L[:, None])[:, 0], -(logp_LV.exp() * logp_LV).sum(-1)


def without_float32_islands(model: Any, leave: Collection[str] = ()) -> None:
    """Let a float64 model of Transformers compute in float64 what it casts to float32 whatever its type is.

    - RMSNorm: Transformers casts its input to float32; Megatron's is torch's, which does not. It alone makes 1e-7 of difference.
    - Rotary angles, their sines and cosines: float32 in Transformers and in Megatron (`RotaryEmbedding` counts positions in the
      type of `inv_freq`). Today both round alike, in the same order, so that either both or neither has to be patched; patching
      one makes 1e-8. `numbers_on_rank` patches Megatron's too: the test must not rest on two roundings that happen to agree.
      The inverse frequencies themselves stay what both compute in float32, equal to the last bit.
    """
    for module in model.modules():
        kind = type(module).__name__
        if kind.endswith("RMSNorm") and "norm" not in leave:
            module.forward = _norm(module)
        if kind.endswith("RotaryEmbedding") and "rotary" not in leave:
            module.forward = _rotary(module)


def _norm(module: Any) -> Any:
    def forward(x: Tensor) -> Tensor:
        return module.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + module.variance_epsilon))

    return forward


def _rotary(module: Any) -> Any:
    @torch.no_grad()
    def forward(x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angle = position_ids[..., None] * module.inv_freq.double()
        angle = torch.cat((angle, angle), dim=-1)
        return angle.cos() * module.attention_scaling, angle.sin() * module.attention_scaling

    return forward
