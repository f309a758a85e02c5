"""How many tokens a micro-batch may have."""

from __future__ import annotations

from rlmca.config import RunConfig
from rlmca.config.schema import ROW_STAGES


def micro_batch_tokens(cfg: RunConfig) -> int | None:
    """Most tokens of a micro-batch; None: its rows are counted instead.

    Stages pt and sft count packs of `cutoff_len` tokens in per_device_train_batch_size; packs may be taken apart again, since
    their rows do not see each other, so only their tokens matter to an engine.
    """
    given = cfg.train.max_tokens_per_microbatch
    if given is None and cfg.data.packs and cfg.stage in ROW_STAGES:
        return cfg.train.per_device_train_batch_size * cfg.data.cutoff_len
    return given
