"""The backward of `head_log_probs`: logits again, tile by tile, and their gradient carried on to hidden states and weight.

Shape legend: N tokens, L those of them that have a gradient (or whose target is in a block), H hidden size, V rows of
the head's weight on this rank (padding rows included); a tile is R of the tokens times C of the rows.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlmca.models.logprobs_tiles import Head


@dataclass(frozen=True)
class Tokens:
    """What a backward knows of each token; `of_...` are the gradients of the outputs, that of the entropy beside the entropy.

    `local_N` is the target's row of this rank's weight, or beside it; a probability is exp(z - top) / total.
    """

    hidden_NH: Tensor
    local_N: Tensor
    top_N: Tensor
    total_N: Tensor
    logp_N: Tensor
    of_logp_N: Tensor
    of_entropy_2N: Tensor | None

    def live(self) -> tuple[Tokens, Tensor | None]:
        """Those that have a gradient, and which they are (None: all); no part of the entropy where its gradients are all zero."""
        live_N, of_entropy_2N = self.of_logp_N != 0, self.of_entropy_2N
        if of_entropy_2N is not None:
            of_entropy_N = of_entropy_2N[0] != 0
            live_N = live_N | of_entropy_N
            of_entropy_2N = of_entropy_2N if of_entropy_N.any() else None
        live_L = live_N.nonzero()[:, 0]
        if live_L.shape[0] == live_N.shape[0]:
            return dataclasses.replace(self, of_entropy_2N=of_entropy_2N), None
        taken: dict[str, Any] = {name: values.index_select(0, live_L) for name, values in vars(self).items() if name != "of_entropy_2N"}
        return Tokens(**taken, of_entropy_2N=None if of_entropy_2N is None else of_entropy_2N.index_select(1, live_L)), live_L

    def of_target(self, temperature: Tensor | None) -> Tensor:
        """[N] gradient of the target's logit: d logp / d z = 1 - p and d H / d z = -p (log p + H), over the temperature."""
        slope_N = -torch.expm1(self.logp_N) * self.of_logp_N  # 1 - p of a likely token, without cancellation
        if self.of_entropy_2N is not None:
            slope_N = slope_N - self.logp_N.exp() * (self.logp_N + self.of_entropy_2N[1]) * self.of_entropy_2N[0]
        return slope_N if temperature is None else slope_N / temperature

    def of_others(self, temperature: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """(constant_N, slope_N) for `Passes.gradient`: d logp / d z = -p and d H / d z = -p (log p + H), over the temperature.

        Both are -exp(s) / total times a factor, with log p + H = s - log total + H.
        """
        unit_N = 1 / self.total_N if temperature is None else 1 / (self.total_N * temperature)
        if self.of_entropy_2N is None:
            return self.of_logp_N * unit_N, None
        of_entropy_N, entropy_N = self.of_entropy_2N
        return (self.of_logp_N + of_entropy_N * (entropy_N - self.total_N.log())) * unit_N, of_entropy_N * unit_N


def add_gradients(
    head: Head, tokens: Tokens, weight_VH: Tensor, grad_NH: Tensor | None, own_VH: Tensor | None, main_grad_VH: Tensor | None
) -> None:
    """Add the hidden states' gradient to `grad_NH`; write the weight's to `own_VH` or add it to `main_grad_VH`; each may be None.

    Tokens go inside, vocabulary outside: then the sum over tokens of a block of the weight is small enough for fp32. The
    targets' logits, which have most of the gradient, are left out of the tiles and added in fp32.
    """
    N, device = tokens.hidden_NH.shape[0], tokens.hidden_NH.device
    temperature, compute_NH = head.divisor(device), tokens.hidden_NH.to(head.compute)
    constant_N, slope_N = tokens.of_others(temperature)
    if own_VH is not None:
        own_VH[head.real(weight_VH) if N else 0 :] = 0
    targets = Targets.of(head, tokens, weight_VH, temperature)
    for block, block_CH in head.columns(weight_VH) if N else ():
        sum_CH = torch.zeros_like(block_CH, dtype=head.precise) if own_VH is not None or main_grad_VH is not None else None
        for rows in head.rows(N):
            logits_RC = compute_NH[rows] @ block_CH.t()
            factors = (constant_N[rows], None if slope_N is None else slope_N[rows])
            grad_RC = head.passes.gradient(logits_RC, temperature, tokens.local_N[rows] - block.start, tokens.top_N[rows], *factors)
            if grad_NH is not None:
                grad_NH[rows] += grad_RC @ block_CH
            if sum_CH is not None:
                sum_CH += grad_RC.t() @ compute_NH[rows]
        targets.add(block, block_CH, compute_NH, grad_NH, sum_CH)
        if sum_CH is not None and own_VH is not None:
            own_VH[block] = sum_CH
        if sum_CH is not None and main_grad_VH is not None:
            main_grad_VH[block] += sum_CH


@dataclass(frozen=True)
class Targets:
    """Tokens in the order of their targets, so that those of a block of the vocabulary lie together."""

    order_N: Tensor
    local_N: Tensor
    slope_N: Tensor
    ends: dict[int, tuple[int, int]]
    """First row of a block -> where its tokens lie in the order."""

    @staticmethod
    def of(head: Head, tokens: Tokens, weight_VH: Tensor, temperature: Tensor | None) -> Targets:
        local_N, order_N = tokens.local_N.sort(stable=True)
        starts = range(0, head.real(weight_VH), head.tiles.columns)
        bounds = torch.tensor([*starts, head.real(weight_VH)], device=local_N.device)
        places = torch.searchsorted(local_N, bounds).tolist()
        ends = dict(zip(starts, zip(places[:-1], places[1:], strict=True), strict=True))
        return Targets(order_N, local_N, tokens.of_target(temperature).index_select(0, order_N), ends)

    def add(self, block: slice, block_CH: Tensor, hidden_NH: Tensor, grad_NH: Tensor | None, sum_CH: Tensor | None) -> None:
        """Add what the logits of this block's targets give to both gradients."""
        first, last = self.ends[block.start]
        if first == last:
            return
        token_L, column_L, slope_L1 = self.order_N[first:last], self.local_N[first:last] - block.start, self.slope_N[first:last, None]
        if grad_NH is not None:
            grad_NH.index_add_(0, token_L, slope_L1 * block_CH.index_select(0, column_L))
        if sum_CH is not None:  # targets repeat; index_put_ adds in one order on every device
            sum_CH.index_put_((column_L,), slope_L1 * hidden_NH.index_select(0, token_L), accumulate=True)
