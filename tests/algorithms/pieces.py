"""Random batches, every loss with every choice, and what an engine does with the pieces of a batch.

Shape legend: B rows, T token positions.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from rlmca.algorithms import Loss, PolicyLoss, PolicyOptions, PreferenceLoss, PreferenceOptions, RolloutCorrection, SftLoss, TokenOutputs
from rlmca.types import Batch

AGGREGATIONS = ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"]
KINDS: dict[str, dict[str, Any]] = {
    "ppo": {"dual_clip": 2.0, "kl_coef": 0.1, "kl_kind": "k2"},
    "grpo": {"kl_coef": 0.1},
    "cispo": {"cispo_cap": 1.5, "cispo_floor": 0.7, "kl_coef": 0.1},
    "gspo": {"clip_low": 0.1, "clip_high": 0.1, "kl_coef": 0.1},
    "gspo_token": {"clip_low": 0.1, "clip_high": 0.1},
    "reinforce": {},
}
CORRECTIONS = [None, *(RolloutCorrection(kind) for kind in ("tis", "icepop", "tis_sequence", "icepop_sequence"))]  # type: ignore[arg-type]
PREFERENCES: dict[str, dict[str, Any]] = {
    "sigmoid": {"label_smoothing": 0.1},
    "hinge": {"ftx": 0.3},
    "ipo": {},
    "orpo": {},
    "simpo": {"beta": 2.0, "simpo_gamma": 0.7, "ftx": 0.5},
}

Piece = tuple[Batch, Tensor, Tensor]
"""(batch, log-probabilities, entropies)."""


def policy_losses(kind: str) -> Iterator[PolicyLoss]:
    """Every aggregation with every correction."""
    for agg, correction in itertools.product(AGGREGATIONS, CORRECTIONS):
        constant = 5.0 if agg.endswith("norm") else None
        options = {**KINDS[kind], "loss_agg": agg, "loss_agg_constant": constant, "correction": correction, "entropy_coef": 0.02}
        yield PolicyLoss(PolicyOptions(kind=kind, **options))  # type: ignore[arg-type]


def every_loss() -> list[Loss]:
    preferences = [PreferenceLoss(PreferenceOptions(kind=kind, **options)) for kind, options in PREFERENCES.items()]  # type: ignore[arg-type]
    return [SftLoss(), *preferences, *(loss for kind in KINDS for loss in policy_losses(kind))]


def random_batch(B: int, T: int, seed: int, dtype: torch.dtype = torch.float64) -> Piece:
    """Rows of every kind, one without any live token among them; rows 2i and 2i + 1 are a pair."""
    g = torch.Generator().manual_seed(seed)
    length_B = torch.randint(0, T + 1, (B,), generator=g)
    length_B[seed % B] = 0
    mask_BT = (torch.arange(T) < length_B[:, None]) & (torch.rand(B, T, generator=g) < 0.8)

    def logp() -> Tensor:
        return -torch.rand(B, T, generator=g, dtype=dtype) * 2

    batch = Batch(
        ids_BT=torch.zeros(B, T, dtype=torch.int64),
        length_B=length_B,
        mask_BT=mask_BT,
        unit_B=torch.arange(B) // 2,
        old_logp_BT=logp(),
        ref_logp_BT=logp(),
        rollout_logp_BT=logp(),
        advantage_BT=torch.randn(B, T, generator=g, dtype=dtype),
    )
    if B % 2:  # the last row has no partner, as a row has that fills up a batch
        batch.mask_BT[-1] = False
    return batch, logp(), -logp()


def run(loss: Loss, pieces: list[Piece]) -> tuple[Tensor, list[Tensor], dict[str, float]]:
    """What an engine does: global counts, then the sum of the pieces' terms; gradients to logp and entropy."""
    counts: dict[str, Tensor] = {}
    for batch, _, _ in pieces:
        for name, value in loss.counts(batch).items():
            counts[name] = counts.get(name, torch.zeros((), dtype=torch.float64)) + value
    total, leaves = torch.zeros((), dtype=torch.float64), []
    metrics: dict[str, tuple[float, float]] = {}
    for batch, logp, entropy in pieces:
        logp, entropy = logp.clone().requires_grad_(), entropy.clone().requires_grad_()
        term, pairs = loss.terms(TokenOutputs(logp, entropy), batch, counts)
        term.backward()
        total = total + term.detach()
        leaves += [logp, entropy]
        for name, (top, bottom) in pairs.items():
            assert not top.requires_grad and not bottom.requires_grad, name
            have = metrics.get(name, (0.0, 0.0))
            metrics[name] = (max(have[0], float(top)) if name.endswith("_max") else have[0] + float(top), have[1] + float(bottom))
    means = {n: top if n.endswith("_max") else top / max(bottom, 1) for n, (top, bottom) in metrics.items()}
    grads = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
    return total, grads, means
