"""Estimators of KL(pi || pi_ref) per token, on tokens sampled from pi (Schulman, "Approximating KL divergence", 2020)."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from rlmca.algorithms.numeric import clamp_log_ratio, working

KlKind = Literal["k1", "abs", "k2", "k3"]


def kl(logp: Tensor, ref_logp: Tensor, *, kind: KlKind) -> Tensor:
    """Per-token estimate, any shape (both the same), fp32 or better.

    With D = ref_logp - logp: k1 = -D (unbiased, high variance), abs = |D|, k2 = D^2/2 (biased; its gradient
    is that of the KL), k3 = e^D - D - 1 (unbiased, never negative; D clamped to +-20).
    """
    delta = working(ref_logp) - working(logp)
    if kind == "k1":
        return -delta
    if kind == "abs":
        return delta.abs()
    if kind == "k2":
        return delta.square() / 2
    if kind == "k3":
        delta = clamp_log_ratio(delta)
        # expm1 keeps the small differences that exp(D) - 1 would cancel away in fp32
        return torch.expm1(delta) - delta
    raise ValueError(f"KL estimator {kind!r} is unknown; write one of {', '.join(get_args(KlKind))}")
