"""Rollout correction: importance weights between the trainer's policy and the rollout engine's.

The engine that samples computes other log-probabilities mu than the trainer does (other kernels, other precision, stale
weights), so its tokens come from another distribution than the loss assumes.

Shape legend: B rows, T positions, N live tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from rlmca.algorithms.aggregate import row_sums, to_tokens
from rlmca.algorithms.numeric import clamp_log_ratio

CorrectionKind = Literal["tis", "icepop", "tis_sequence", "icepop_sequence"]


@dataclass(frozen=True)
class RolloutCorrection:
    """w = exp(logp_old - mu) per token; with `_sequence` the product of a row's, for each of its tokens. No gradient flows.

    tis: min(w, cap) (truncated importance sampling, Ionides 2008; Yao et al. 2025, "Your efficient RL framework secretly
    brings you off-policy RL training"). icepop: w inside `range`, both ends included, zero outside (Ling Team 2025, "IcePop").
    Rejected tokens stay in every denominator, so that a rejection does not make the others weigh more.
    """

    kind: CorrectionKind = "tis"
    cap: float = 2.0
    """Read by tis alone."""
    range: tuple[float, float] = (0.5, 2.0)
    """Read by icepop alone."""

    def __post_init__(self) -> None:
        kinds = get_args(CorrectionKind)
        if self.kind not in kinds:
            raise ValueError(f"rollout correction {self.kind!r} is unknown; write one of {', '.join(kinds)}")
        if not self.cap > 0:
            raise ValueError(f"rollout correction cap {self.cap} must be positive: weights are cut down to it")
        low, high = self.range
        if not 0 <= low < high:
            raise ValueError(f"rollout correction range [{low}, {high}] must be two numbers, 0 <= low < high")

    @property
    def by_sequence(self) -> bool:
        """Whether a row has one weight."""
        return self.kind.endswith("_sequence")

    @property
    def truncates(self) -> bool:
        """Whether weights are cut (tis) and not rejected (icepop)."""
        return self.kind.startswith("tis")


@torch.no_grad()
def correction_ratio(trainer_N: Tensor, rollout_N: Tensor, mask_BT: Tensor, index_N: Tensor, *, by_sequence: bool) -> Tensor:
    """[N] exp(trainer's - rollout's log-probability), of a row the product over its live tokens; log ratios clamped to +-20."""
    log_N = trainer_N - rollout_N
    if by_sequence:
        log_N = to_tokens(row_sums(log_N, mask_BT, index_N), mask_BT, index_N).to(log_N.dtype)
    return clamp_log_ratio(log_N).exp()


@torch.no_grad()
def correction_weights(ratio_N: Tensor, correction: RolloutCorrection) -> Tensor:
    """[N] what each token's policy loss is multiplied by."""
    if correction.truncates:
        return ratio_N.clamp(max=correction.cap)
    return ratio_N.masked_fill(outside(ratio_N, correction), 0.0)


def outside(ratio_N: Tensor, correction: RolloutCorrection) -> Tensor:
    """Bool [N]: out of `range`."""
    low, high = correction.range
    return ~((ratio_N >= low) & (ratio_N <= high))


def correction_metrics(ratio_N: Tensor, correction: RolloutCorrection | None) -> dict[str, Tensor]:
    """Per-token values to be averaged, also without a correction: then what the default one would do.

    `correction_ratio` w; `correction_capped` share above the cap; `correction_rejected` share outside the range; with a
    correction `correction_weight`, what the loss was multiplied by.
    """
    rule = correction or RolloutCorrection()
    metrics = {"correction_ratio": ratio_N, "correction_capped": ratio_N > rule.cap, "correction_rejected": outside(ratio_N, rule)}
    if correction is not None:
        metrics["correction_weight"] = correction_weights(ratio_N, correction)
    return metrics
