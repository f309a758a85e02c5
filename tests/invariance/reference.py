"""The same numbers by Transformers and torch alone: row by row, without padding, losses written out.

Shape legend: B rows, T tokens of the padded row, L targets of a row, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from rlmca.types import Batch
from tests.helpers.models import make_model
from tests.helpers.router_losses import CHOSEN, is_router, losses, router_outputs
from tests.invariance.compare import CHOICES, Numbers
from tests.invariance.numbers import BALANCE, ENTROPY_WEIGHT, EXPERTS, FAMILIES, MIXTURES, TEMPERATURE, WithoutFloat32
from tests.invariance.table import LAYERS

ISLANDS = ("norm", "rotary")
ISLANDS_OF_EXPERTS = (*ISLANDS, "router")


def transformers_numbers(
    family: str, batch: Batch, dtype: torch.dtype, islands: Collection[str] = (), *, balanced: bool = False
) -> Numbers:
    """What `numbers.numbers_on_rank` computes, by Transformers' model of the same weights. `islands` stay in float32.

    With experts, `balanced` adds the routers' losses of `numbers.BALANCE` to both.
    """
    assert batch.advantage_BT is not None
    model = _model(family).to(dtype)
    if dtype == torch.float64:
        without_float32_islands(model, islands)
    logp_BT, entropy_BT = torch.zeros(2, *batch.ids_BT.shape, dtype=dtype).unbind()
    sft, policy = torch.zeros(2, dtype=torch.float64).unbind()
    rows_with_targets = batch.mask_BT.any(1).sum()
    with router_outputs(model) as routed, router_outputs(model, CHOSEN) as choices:
        outputs = [_logits(model, batch.ids_BT[b : b + 1, : int(batch.length_B[b])]) for b in range(len(batch))]
    for b, logits_TV in enumerate(outputs):
        ids_1T = batch.ids_BT[b : b + 1]
        place_L = batch.mask_BT[b].nonzero()[:, 0]
        if not len(place_L):
            continue
        logits_LV = logits_TV[place_L - 1]
        logp_L, entropy_L = _of_logits(logits_LV, ids_1T[0, place_L])
        logp_BT[b, place_L], entropy_BT[b, place_L] = logp_L.detach(), entropy_L.detach()
        sft = sft - logp_L.sum() / batch.mask_BT.sum()
        logp_L, entropy_L = _of_logits(logits_LV / TEMPERATURE, ids_1T[0, place_L])
        ratio_L = (logp_L - logp_L.detach()).exp()  # of the policy to itself: 1, with the gradient of the log-prob
        policy = policy - (ratio_L * batch.advantage_BT[b, place_L] + ENTROPY_WEIGHT * entropy_L).mean() / rows_with_targets
    numbers = {"log-prob": logp_BT, "entropy": entropy_BT}
    more = torch.zeros(())
    if routed:
        numbers[CHOICES] = _choices(model, choices)
    if balanced:
        balance, z = losses(routed, [[b] for b in range(len(batch))], model)
        more = BALANCE["moe_aux_loss_coeff"] * balance + BALANCE["moe_z_loss_coeff"] * z
        numbers |= {"seq_aux_loss": balance.detach().double() / len(routed), "z_loss": z.detach().double() / len(routed)}
    for kind, loss in (("sft", sft), ("policy", policy)):
        model.zero_grad()
        (loss + more).backward(retain_graph=True)
        numbers[f"{kind}: loss"] = loss.detach().double()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        if routed:  # Transformers holds the experts of a layer in one tensor
            gradients = dict(revert_weight_conversion(model, gradients))
        numbers.update({f"{kind}: gradient of {name}": gradient for name, gradient in gradients.items()})
    return numbers


def smallest_margin(family: str, batch: Batch) -> float:
    """The least by which a token's last chosen expert is ahead of the first that it did not choose.

    In the router's logits, of which the balance loss takes the largest too; with groups of experts also in what these are
    compared by, their biased scores.
    """
    model = _model(family).double()
    without_float32_islands(model)
    chosen, layers = model.config.num_experts_per_tok, list(_routers(model).values())
    with torch.no_grad(), router_outputs(model) as routed:
        for b in range(len(batch)):
            _logits(model, batch.ids_BT[b : b + 1, : int(batch.length_B[b])])
    least = []
    for router, logits in zip(layers, routed, strict=True):
        logits_XE = torch.cat(logits)
        least.append(_margin(logits_XE, chosen))
        if hasattr(router, "num_group"):
            X, E = logits_XE.shape
            score_XGI = (logits_XE.sigmoid() + router.e_score_correction_bias).reshape(X, router.num_group, -1)
            group_XG = score_XGI.topk(2, dim=-1).values.sum(-1)
            kept_XG1 = torch.zeros_like(group_XG).scatter(1, group_XG.topk(router.topk_group, dim=-1).indices, 1.0)[..., None]
            least += [_margin(group_XG, router.topk_group), _margin(score_XGI.masked_fill(kept_XG1 == 0, -9.0).reshape(X, E), chosen)]
    return min(least)


def _margin(value_XE: Tensor, chosen: int) -> float:
    top = value_XE.topk(chosen + 1, dim=-1).values
    return (top[:, -2] - top[:, -1]).min().item()


def _routers(model: Any) -> dict[int, Any]:
    return {number: layer.mlp.gate for number, layer in enumerate(model.model.layers) if hasattr(layer.mlp, "gate")}


def _model(family: str) -> Any:
    """Attention that takes no softmax in float32, and experts one by one: products of all of them know no float64."""
    more = {"experts_implementation": "eager"} if family in MIXTURES else {}
    return make_model(family, **{**FAMILIES, **MIXTURES}[family], attn_implementation="sdpa", **more)


def _logits(model: Any, ids_1T: Tensor) -> Tensor:
    return model(input_ids=ids_1T, attention_mask=torch.ones_like(ids_1T)).logits[0]


def _choices(model: Any, chosen: Any) -> Tensor:
    """[layers, experts], zero for layers without."""
    choices = torch.zeros(LAYERS, EXPERTS, dtype=torch.float64)
    for number, layer in zip(_routers(model), chosen, strict=True):
        choices[number] = torch.cat(layer).reshape(-1).bincount(minlength=EXPERTS)
    return choices


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
    - Routers of experts: both score experts in float32, Transformers' DeepSeek-V3 from float32 logits; `numbers_on_rank` patches
      Megatron's too, and has its logits in float64.
    """
    for module in model.modules():
        kind = type(module).__name__
        if kind.endswith("RMSNorm") and "norm" not in leave:
            module.forward = _norm(module)
        if kind.endswith("RotaryEmbedding") and "rotary" not in leave:
            module.forward = _rotary(module)
        if is_router(module) and "router" not in leave:
            module.forward = _router(module)


def _router(module: Any) -> Any:
    within = module.forward

    def forward(x: Tensor) -> Any:
        with WithoutFloat32():
            return within(x)

    return forward


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
