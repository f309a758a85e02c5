"""The router of a layer with experts: who goes where, what keeps experts evenly used, and how many tokens one may take.

Megatron's own auxiliary losses count padding, take a packed row for one sequence, and weigh a sequence by the micro-batch that
it came in. Here a step's losses have one denominator each, counted before its first forward, as every loss has
(`algorithms.contract`).

Shape legend: S tokens of this rank, B rows, X tokens of this rank over all rows (S first), E experts, G groups of tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_capacity, topk_routing_with_score_function
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_block import TransformerBlock
from torch import Tensor


@dataclass(frozen=True)
class RouterStep:
    """What routers must know of an optimizer step, the same for all of its micro-batches."""

    groups: int
    """No micro-batch has more groups of tokens to balance."""
    group_weight: float
    """Of one group's loss in the step's: the engine's factor over the number of groups on all ranks."""
    token_weight: float
    """Of one token's z-loss."""


class ExpertLayer(MoELayer):
    """Megatron's layer with experts, which hands its router the sequence numbers of tokens instead of a mask of padding.

    They come as `padding_mask` [B, S], which Megatron carries through pipelines and recompute: number of the row of the batch that
    a token belongs to, -1 for padding.
    """

    sequence_BS: Tensor | None = None
    """What to take where Megatron hands on none, see `ExpertBlock`."""

    def forward(self, hidden_states: Tensor, intermediate_tensors: Any = None, padding_mask: Tensor | None = None) -> Any:
        router: Any = self.router
        padding_mask = self.sequence_BS if padding_mask is None else padding_mask
        router.sequence_X = None if padding_mask is None else padding_mask.transpose(0, 1).reshape(-1)
        try:
            return super().forward(hidden_states, intermediate_tensors)
        finally:
            router.sequence_X = None


class ExpertBlock(TransformerBlock):
    """Megatron's stack of layers. Its block recompute (0.16.1) loses `padding_mask` on the way to layers that are not recomputed.

    These run once, within this call; what is recomputed later is handed its own.
    """

    def _checkpointed_forward(self, *args: Any, padding_mask: Tensor | None = None, **kwargs: Any) -> Any:
        experts = [layer.mlp for layer in self.layers if isinstance(layer.mlp, ExpertLayer)]
        for layer in experts:
            layer.sequence_BS = padding_mask
        try:
            return super()._checkpointed_forward(*args, padding_mask=padding_mask, **kwargs)
        finally:
            for layer in experts:
                layer.sequence_BS = None


class Router(TopKRouter):
    """Megatron's top-k router with losses that know rows and padding, and a capacity that padding takes no part of."""

    def __init__(self, config: Any, pg_collection: Any = None) -> None:
        super().__init__(config=config, pg_collection=pg_collection)
        self.step: RouterStep | None = None
        self.sequence_X: Tensor | None = None
        self.seen = torch.zeros(2, dtype=torch.float64)
        """This rank's share of the step's (load-balancing loss, z-loss), neither weighed nor divided."""

    def begin(self, step: RouterStep, device: torch.device) -> None:
        """A new optimizer step."""
        self.step = step
        self.seen = torch.zeros(2, dtype=torch.float64, device=device)

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """[S, B, E] -> (weights, choices) [X, E], the losses attached to what the gradient will come through."""
        config = self.config
        logits_XE = logits.reshape(-1, config.num_moe_experts)
        step = self.step if self.training and torch.is_grad_enabled() else None  # not in evaluation, once under recompute
        sequence_X = self.sequence_X
        if sequence_X is None:
            if step is not None or config.moe_expert_capacity_factor is not None:
                raise RuntimeError(f"the router of layer {self.layer_number} was not told which tokens are padding")
            sequence_X = logits_XE.new_zeros(len(logits_XE), dtype=torch.int64)
        if step is not None and config.moe_z_loss_coeff:
            logits_XE = self._with_z_loss(logits_XE, sequence_X, step)
        weight_XE, chosen_XE = topk_routing_with_score_function(
            logits_XE,
            self.topk,
            use_pre_softmax=config.moe_router_pre_softmax,
            num_groups=config.moe_router_num_groups,
            group_topk=config.moe_router_group_topk,
            scaling_factor=config.moe_router_topk_scaling_factor,
            score_function=self.score_function,
            expert_bias=self.expert_bias,
            fused=config.moe_router_fusion,
            router_replay=self.router_replay,
        )
        real_X1 = (sequence_X >= 0)[:, None]
        if config.moe_expert_capacity_factor is not None:
            capacity = get_capacity(len(logits_XE) * self.topk, config.num_moe_experts, config.moe_expert_capacity_factor)
            weight_XE, chosen_XE = within_capacity(
                weight_XE * real_X1,
                chosen_XE & real_X1,
                capacity,
                by_weight=config.moe_token_drop_policy == "probs",
                fill=config.moe_pad_expert_input_to_capacity,
            )
        if step is not None and config.moe_aux_loss_coeff and self.routing_type != "none":
            weight_XE = self._with_balance_loss(weight_XE, logits_XE, sequence_X, step)
        self._apply_expert_bias(chosen_XE & real_X1)
        return weight_XE, chosen_XE

    def _with_balance_loss(self, weight_XE: Tensor, logits_XE: Tensor, sequence_X: Tensor, step: RouterStep) -> Tensor:
        group_X = sequence_X if self.routing_type == "seq_aux_loss" else sequence_X.clamp(max=0)
        group = self.tp_cp_group if self.tp_cp_group.size() > 1 else None
        scores_XE = _scores(logits_XE, self.score_function)
        share = balance_loss(scores_XE, group_X, groups=step.groups, topk=self.topk, group=group)
        self.seen[0] += share.detach()
        return _Attached.apply(weight_XE, share * (self.config.moe_aux_loss_coeff * step.group_weight), self.config.grad_scale_func)

    def _with_z_loss(self, logits_XE: Tensor, sequence_X: Tensor, step: RouterStep) -> Tensor:
        """Zoph et al. 2022, ST-MoE (arXiv 2202.08906), equation 5: the mean over tokens of (log sum exp logits)^2."""
        wide_XE = logits_XE.to(torch.promote_types(logits_XE.dtype, torch.float32))
        share = (torch.logsumexp(wide_XE, -1).square() * (sequence_X >= 0)).sum()
        self.seen[1] += share.detach()
        return _Attached.apply(logits_XE, share * (self.config.moe_z_loss_coeff * step.token_weight), self.config.grad_scale_func)


def balance_loss(scores_XE: Tensor, group_X: Tensor, *, groups: int, topk: int, group: dist.ProcessGroup | None = None) -> Tensor:
    """This rank's share of the sum over groups of tokens of E sum_i f_i P_i; over the ranks of `group` shares add up to it.

    f_i is the part of a group's choices that fell on expert i, P_i the mean of the expert's normalised scores over the
    group's T tokens: f_i = 1 / (k T) sum_t [i among the k best of t], P_i = 1 / T sum_t s_it. With a sequence as the group it is
    equations 17 to 20 of DeepSeek-V3 (arXiv 2412.19437), there with E / (k T) inside f_i, and Megatron's `seq_aux_loss`; with
    all tokens of a micro-batch Megatron's `aux_loss` (Fedus et al. 2021, Switch Transformers, equations 4 to 6). Tokens of
    group -1 (padding) are left out; a group without tokens is 0. Choices have no gradient. The `group`'s ranks hold parts of
    the same tokens' sequences: choices are summed over them, scores are not.
    """
    E = scores_XE.shape[1]
    real_X1, index_X = (group_X >= 0)[:, None].to(scores_XE.dtype), group_X.clamp(min=0)
    with torch.no_grad():
        best_XE = torch.zeros_like(scores_XE).scatter(1, scores_XE.topk(topk, dim=1).indices, 1.0)
        choices_GE = scores_XE.new_zeros(groups, E).index_add(0, index_X, best_XE * real_X1)
        if group is not None:
            dist.all_reduce(choices_GE, group=group)
        tokens_G1 = choices_GE.sum(1, keepdim=True).clamp(min=topk) / topk
        f_GE = choices_GE / (topk * tokens_G1)
    score_GE = scores_XE.new_zeros(groups, E).index_add(0, index_X, scores_XE * real_X1)
    return E * (f_GE * score_GE / tokens_G1).sum()


def within_capacity(weight_XE: Tensor, chosen_XE: Tensor, capacity: int, *, by_weight: bool, fill: bool) -> tuple[Tensor, Tensor]:
    """(weights, choices) of at most `capacity` tokens an expert: those of the largest weight, or the first.

    `fill` gives every expert exactly as many, the rest at weight 0. Megatron's `apply_router_token_dropping`, whose order by
    position is left to how `topk` breaks ties.
    """
    if capacity < len(weight_XE):
        key_XE = weight_XE.detach() if by_weight else chosen_XE.int()
        first_CE = key_XE.argsort(dim=0, descending=True, stable=True)[:capacity]
        kept_XE = torch.zeros_like(chosen_XE).scatter(0, first_CE, True)
    else:
        kept_XE = torch.ones_like(chosen_XE)
    chosen_XE = kept_XE if fill else kept_XE & chosen_XE
    return weight_XE * chosen_XE, chosen_XE


def _scores(logits_XE: Tensor, function: str) -> Tensor:
    """Normalised scores of all experts, in float32 or better (Megatron's `compute_routing_scores_for_aux_loss`)."""
    wide_XE = logits_XE.to(torch.promote_types(logits_XE.dtype, torch.float32))
    if function == "softmax":
        return torch.softmax(wide_XE, -1)
    score_XE = torch.sigmoid(wide_XE)
    return score_XE / (score_XE.sum(-1, keepdim=True) + 1e-20)


class _Attached(torch.autograd.Function):
    """`x` as it is; backward also starts at `loss`, scaled as the main loss is.

    Megatron's `MoEAuxLossAutoScaler` keeps that scale, 1 over the micro-batches, in a float32 of the class.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, scale: Callable[[Tensor], Tensor] | None) -> Tensor:
        ctx.scale, ctx.one = scale, torch.ones_like(loss)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return grad, ctx.one if ctx.scale is None else ctx.scale(ctx.one), None
