"""What every engine does around its forwards: denominators before them, the shape of their results, metrics after them.

Shape legend: B rows, T tokens of the padded row, N targets of a micro-batch in row-major order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rlmca.algorithms.contract import Loss, Metrics, TokenOutputs
from rlmca.engines.base import Limits
from rlmca.engines.microbatch import MicroBatch
from rlmca.parallel.groups import Parallel
from rlmca.types import Batch

Collected = list[tuple[Tensor, Metrics]]
"""(loss, metrics) of each micro-batch of a step."""

NOTHING_LIVE = {"loss": 0.0, "grad_norm": 0.0, "skipped": 1.0}
"""Metrics of a step without a live target: nothing was computed, nothing moved."""


def global_counts(batch: Batch, loss: Loss, parallel: Parallel) -> dict[str, Tensor]:
    """The loss's denominators over all ranks' shares: summed once a step, before the first forward."""
    counts = loss.counts(batch)
    total = parallel.dp_sum(torch.stack([c.double().cpu() for c in counts.values()]).to(parallel.device))
    return dict(zip(counts, total.unbind(), strict=True))


def step_metrics(grad_norm: float, *, stepped: bool, finite_loss: bool, loss_scale: float | None) -> dict[str, float]:
    """What is said of every step. With a scaled loss also the factor, and whether the step was skipped because gradients
    overflowed (`overflow`), which lowers the factor, and not because the loss itself was not finite, which does not."""
    metrics = {"grad_norm": grad_norm, "skipped": 0.0 if stepped else 1.0}
    if loss_scale is not None:
        metrics |= {"loss_scale": loss_scale, "overflow": float(finite_loss and not stepped)}
    return metrics


def beyond(metrics: Mapping[str, float], limits: Limits | None) -> bool:
    """Whether a metric is beyond its limit. KeyError when the loss has no such metric: a limit on it would never hold."""
    return any(metrics[name] > most for name, most in (limits or {}).items())


def stop_metrics(stopped: bool, limits: Limits | None) -> dict[str, float]:
    """What is said of a step that had limits."""
    return {} if limits is None else {"stopped": float(stopped)}


def token_outputs(raw_2N: Tensor, batch: Batch, entropy: bool) -> TokenOutputs:
    """[2, N] of the targets in row-major order -> [B, T], zero elsewhere, differentiable."""
    zeros_BT = raw_2N.new_zeros(batch.mask_BT.shape)
    logp_BT = zeros_BT.masked_scatter(batch.mask_BT, raw_2N[0])
    return TokenOutputs(logp_BT=logp_BT, entropy_BT=zeros_BT.masked_scatter(batch.mask_BT, raw_2N[1]) if entropy else None)


def gathered_outputs(found: Sequence[Tensor], pieces: Sequence[MicroBatch], shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """[2, B, T] of a share from [2, N] of each of its micro-batches (none: zeros), rows where they were, zero off the targets."""
    device = pieces[0].ids_BT.device
    out_2BT = torch.zeros(2, *shape, dtype=dtype, device=device)
    for raw_2N, piece in zip(found, pieces, strict=bool(found)):
        row_N, place_N = piece.rows.mask_BT.nonzero(as_tuple=True)
        if piece.numbers:
            out_2BT[:, torch.tensor(piece.numbers, device=device)[row_N], place_N] = raw_2N.to(dtype)
    return out_2BT


def reduce_metrics(collected: Collected, parallel: Parallel) -> dict[str, float]:
    """Sum (or maximum) over micro-batches and data-parallel ranks, divided at the end; the same on every rank."""
    result: dict[str, float] = {}
    if parallel.is_last_stage:
        names = sorted(collected[0][1])
        if names:
            stacked = torch.stack([torch.stack([torch.stack(m[n]).double() for n in names]) for _, m in collected])
            sums = parallel.dp_sum(stacked.sum(0))
            tops = parallel.dp_max(stacked[..., 0].amax(0))
            for name, (total, count), top in zip(names, sums.tolist(), tops.tolist(), strict=True):
                if name.endswith("_max"):
                    result[name] = top
                elif count:
                    result[name] = total / count
        value = parallel.dp_sum(torch.stack([v.double() for v, _ in collected]).sum().reshape(1))
        result["loss"] = float(value)
    return parallel.object_from_last_stage(result)
