"""Loss and perplexity on held-out rows."""

from __future__ import annotations

import math
from collections.abc import Mapping

from rlmca.data import Dataset
from rlmca.types import batch_of_examples
from rlmca.workers import WorkerGroup


def evaluate(policy: WorkerGroup, sets: Mapping[str, Dataset], rows: int) -> dict[str, float]:
    """`loss` (nats per target, over all targets of all rows) and `perplexity`; with several sets also `<set>_loss` of each.

    Sets are read in pieces of `rows` rows, the last and shorter one included; sums are divided once at the end, so the
    result does not depend on `rows`, nor on the number of ranks.
    """
    total, targets = 0.0, 0
    result: dict[str, float] = {}
    for name, rows_of in sets.items():
        set_total, set_targets = 0.0, 0
        for start in range(0, len(rows_of), rows):
            examples = rows_of[start : start + rows]
            batch = batch_of_examples([e.ids for e in examples], [e.mask for e in examples])
            set_total -= float(policy.log_probs(batch).logp_BT.double().sum())
            set_targets += int(batch.mask_BT.sum())
        if len(sets) > 1:
            result[f"{name}_loss"] = set_total / set_targets
        total, targets = total + set_total, targets + set_targets
    loss = total / targets
    return {"loss": loss, "perplexity": math.exp(min(loss, 700.0)), **result}
