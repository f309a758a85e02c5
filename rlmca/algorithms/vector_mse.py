"""Reward of a critic that reads a vector out of a text: how far the vector that it predicts lies from the target.

Both are brought to one length s first, so only directions count: at s = sqrt(d) the mean over d of the squared difference
is 2 (1 - cos). Shape legend: N texts, D components of a vector.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rlmca.algorithms.numeric import working

SHORTEST = 1e-12
SMALLEST_MSE = 1e-8
FAILURE_MSE = 2.0
"""That of an orthogonal vector: no prediction must pay more than a wrong one of no relation."""


def normalised(vector_ND: Tensor, scale: float | None = None) -> Tensor:
    """v * scale / max(|v|, 1e-12), fp32 or better; `scale` None: sqrt(D)."""
    vector_ND = working(vector_ND)
    length = math.sqrt(vector_ND.shape[-1]) if scale is None else scale
    return vector_ND * (length / vector_ND.norm(dim=-1, keepdim=True).clamp(min=SHORTEST))


def vector_mse(predicted_ND: Tensor, target_ND: Tensor, *, scale: float | None = None) -> Tensor:
    """[N] mean over D of the squared difference of both vectors, normalised; differentiable."""
    return (normalised(predicted_ND, scale) - normalised(target_ND, scale)).square().mean(-1)


def vector_rewards(
    predicted_ND: Tensor, target_ND: Tensor, *, scale: float | None = None, log: bool = False, failed: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(rewards [N], failures bool [N]): -mse, or with `log` -log(max(mse, 1e-8)); 0 is best, -2 orthogonal, -4 opposite.

    A failure gets -2 (log: -ln 2): a row marked in `failed`, and a prediction that is zero or not finite, which plain
    arithmetic would score -1, better than an orthogonal one. No gradient. ValueError for a target that is zero or not
    finite: that is the data's fault, not the text's.
    """
    with torch.no_grad():
        predicted_ND, target_ND = working(predicted_ND), working(target_ND)
        bad_N = ~_usable(target_ND)
        if bool(bad_N.any()):
            raise ValueError(f"target vector {int(bad_N.nonzero()[0, 0])} is zero or not finite, so it has no direction")
        failed_N = ~_usable(predicted_ND)
        if failed is not None:
            failed_N |= failed.to(failed_N.device).bool()
        mse_N = vector_mse(predicted_ND, target_ND, scale=scale).masked_fill(failed_N, FAILURE_MSE)
        return -(mse_N.clamp(min=SMALLEST_MSE).log() if log else mse_N), failed_N


def _usable(vector_ND: Tensor) -> Tensor:
    """Bool [N]: finite and long enough to have a direction."""
    return vector_ND.isfinite().all(-1) & (vector_ND.norm(dim=-1) > SHORTEST)
