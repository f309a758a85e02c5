"""Supervised cross-entropy on the counts/terms contract."""

from __future__ import annotations

from torch import Tensor

from rlmca.algorithms.aggregate import mask_counts
from rlmca.algorithms.contract import Counts, Metrics, TokenOutputs
from rlmca.algorithms.numeric import live_index, poison, take
from rlmca.types import Batch


class SftLoss:
    """Token-weighted cross-entropy: -sum(logp over targets) / number of targets. Metric: `loss`."""

    temperature = 1.0
    needs_entropy = False

    def counts(self, batch: Batch) -> dict[str, Tensor]:
        """`tokens`: targets in the batch."""
        return {"tokens": mask_counts(batch.mask_BT)["tokens"]}

    def terms(self, out: TokenOutputs, batch: Batch, counts: Counts) -> tuple[Tensor, Metrics]:
        """See `contract.Loss.terms`; nan in loss and gradient when a target's log-probability is not finite."""
        logp_N = take(out.logp_BT, live_index(batch.mask_BT))
        total = -logp_N.sum()
        loss = poison(total / counts["tokens"].clamp(min=1).to(total.dtype), logp_N, logp_N)
        return loss, {"loss": (total.detach().double(), mask_counts(batch.mask_BT)["tokens"])}
