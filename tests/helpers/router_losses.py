"""The routers' auxiliary losses by Transformers' router logits and torch alone.

Shape legend: B rows, T tokens of a row, X tokens of a group, E experts, K of them chosen.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from rlmca.types import Batch

LOGITS, CHOSEN = 0, -1
"""Where in what a router of Transformers answers."""


def is_router(module: Any) -> bool:
    """Whether Transformers chooses experts with it."""
    return type(module).__name__.lower().endswith("topkrouter")


@contextlib.contextmanager
def router_outputs(model: Any, part: int = LOGITS) -> Iterator[list[list[Tensor]]]:
    """Fills, for every layer with experts, a list of the router's logits [X, E] (or CHOSEN experts [X, K]) of each forward."""
    found: list[list[Tensor]] = []
    hooks = []
    for module in model.modules():
        if is_router(module):
            own: list[Tensor] = []
            found.append(own)
            hooks.append(module.register_forward_hook(lambda _, __, out, own=own: own.append(out[part])))
    yield found
    for hook in hooks:
        hook.remove()


def scores(logits_XE: Tensor, by_sigmoid: bool) -> Tensor:
    """What the losses take for the experts' probabilities; DeepSeek-V3's are sigmoids over their sum."""
    if not by_sigmoid:
        return torch.softmax(logits_XE, -1)
    score_XE = torch.sigmoid(logits_XE)
    return score_XE / score_XE.sum(-1, keepdim=True)


def by_sigmoid(model: Any) -> bool:
    """Whether a model of Transformers scores experts so."""
    return model.config.model_type == "deepseek_v3"


def balance(score_XE: Tensor, chosen: int) -> Tensor:
    """E sum_i f_i P_i over these tokens, token by token."""
    X, E = score_XE.shape
    f = [0.0] * E
    for x in range(X):
        for expert in torch.topk(score_XE[x], chosen).indices.tolist():
            f[expert] += 1 / (chosen * X)
    return E * sum((f[i] * score_XE[:, i].mean() for i in range(E)), torch.zeros((), dtype=score_XE.dtype))


def losses(found: Sequence[Sequence[Tensor]], groups: Sequence[Sequence[int]], model: Any) -> tuple[Tensor, Tensor]:
    """(balance, z) summed over layers: a mean over groups of rows, and over tokens. `found` holds the rows' logits one by one."""
    chosen, sigmoid = model.config.num_experts_per_tok, by_sigmoid(model)
    balanced = z = torch.zeros((), dtype=found[0][0].dtype)
    for layer in found:
        for group in groups:
            balanced = balanced + balance(scores(torch.cat([layer[row] for row in group]), sigmoid), chosen) / len(groups)
        z = z + torch.logsumexp(torch.cat(list(layer)), -1).square().mean()
    return balanced, z


def reference(
    model: Any, batch: Batch, *, groups: Sequence[Sequence[int]] | None = None, weight: float = 0.0, z_weight: float = 0.0
) -> dict[str, Any]:
    """Mean negative log-prob of the targets, the losses as means over layers, and gradients of all with their weights."""
    from transformers.core_model_loading import revert_weight_conversion

    model.zero_grad()
    total = torch.zeros((), dtype=next(model.parameters()).dtype)
    with router_outputs(model) as found:
        for b in range(len(batch)):
            ids_1T = batch.ids_BT[b : b + 1, : int(batch.length_B[b])]
            logp_TV = torch.log_softmax(model(input_ids=ids_1T, attention_mask=torch.ones_like(ids_1T)).logits[0, :-1], -1)
            total = total - logp_TV.gather(1, ids_1T[0, 1:, None])[batch.mask_BT[b, 1 : ids_1T.shape[1]], 0].sum()
    loss = total / batch.mask_BT.sum()
    balanced, z = losses(found, groups or [[b] for b in range(len(batch))], model)
    (loss + weight * balanced + z_weight * z).backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return {
        "loss": loss.item(),
        "balance": balanced.item() / len(found),
        "z": z.item() / len(found),
        "gradients": dict(revert_weight_conversion(model, gradients)),
    }
