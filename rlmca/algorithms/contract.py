"""The contract between losses and engines: counts first, then already normalised terms.

Shape legend: B rows of a micro-batch, T token positions.

An optimizer step sees its batch in pieces: micro-batches, data-parallel ranks. A loss stays independent of
the split because it divides only by *global* counts: the engine sums `counts(batch)` over all pieces before
the first forward and hands the totals to every `terms` call; the step's loss is the plain sum of the terms.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from rlmca.types import Batch

Counts = Mapping[str, Tensor]
Metrics = dict[str, tuple[Tensor, Tensor]]


@dataclass
class TokenOutputs:
    """What a forward gives a loss: log-probabilities of the batch's tokens, aligned with them, [B, T]."""

    logp_BT: Tensor
    """fp32 or better, at the loss's temperature, over the real vocabulary; zeros off the mask."""
    entropy_BT: Tensor | None
    """Entropy in nats of the distribution each token was drawn from; None unless `Loss.needs_entropy`."""


class Loss(Protocol):
    """A loss that engines can run on any split of a batch."""

    temperature: float
    """Logits are divided by it before log-probabilities are taken."""
    needs_entropy: bool
    """Whether `terms` reads `TokenOutputs.entropy_BT`."""

    def counts(self, batch: Batch) -> dict[str, Tensor]:
        """float64 scalars from masks alone, additive over any split of the batch."""

    def terms(self, out: TokenOutputs, batch: Batch, counts: Counts) -> tuple[Tensor, Metrics]:
        """(this micro-batch's share of the loss, metrics), given the counts of the whole optimizer step.

        The share is normalised already: the shares of all pieces add up to the loss. A metric is a pair of
        detached scalars (sum, denominator), to be added over pieces and divided at the end; one whose name
        ends in `_max` is reduced by the maximum of the first element instead.
        """
