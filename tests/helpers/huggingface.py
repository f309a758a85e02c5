"""The Hugging Face engine on the ranks of a pool."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from rlmca.types import Batch


def make_hf_engine(
    folder: Path, *, dp: int = 1, micro_batch: int = 2, fresh: bool = False, trainable: bool = True, seed: int = 7, **options: Any
) -> Any:
    """A `HuggingFaceEngine` of this rank among `dp` data-parallel ones, with the weights of `folder` or (`fresh`) newly drawn ones."""
    from rlmca.engines.huggingface import HuggingFaceEngine
    from rlmca.engines.options import HuggingFaceOptions
    from rlmca.parallel import groups

    rank = int(os.environ.get("RANK", 0)) if dp > 1 else 0
    parallel = groups.start(rank=rank, world_size=dp, seed=seed)
    chosen = HuggingFaceOptions(**{"micro_batch_size": micro_batch, "eval_batch_size": 3, **options})
    return HuggingFaceEngine(folder, parallel, chosen, fresh=fresh, trainable=trainable)


def hf_gradients_on_rank(folder: Path, settings: dict[str, Any], batch: Batch) -> dict[str, Any]:
    """Loss, gradients and log-probs (temperature 1) of the whole batch."""
    from rlmca.algorithms.losses import SftLoss
    from rlmca.engines.microbatch import micro_batches
    from rlmca.engines.step import global_counts, reduce_metrics
    from rlmca.workers import SpmdGroup

    engine = make_hf_engine(folder, **settings)
    parallel = engine.parallel
    out = SpmdGroup(engine, parallel).log_probs(batch, entropy=True)
    own = batch.rows(engine.shares(batch)[parallel.dp_rank])
    pieces = micro_batches(own, engine.cutting(engine.options.micro_batch_size), parallel)
    loss = SftLoss()
    value = reduce_metrics(engine.compute_gradients(pieces, loss, global_counts(own, loss, parallel)), parallel)["loss"]
    gradients = {name: p.grad.clone() for name, p in engine.module.named_parameters()}
    return {"loss": value, "gradients": gradients, "logp_BT": out.logp_BT, "entropy_BT": out.entropy_BT}
