"""Stage pt: training on every token of plain texts, as in pre-training."""

from __future__ import annotations

from rlmca.config import RunConfig
from rlmca.data.texts import TextEncoder
from rlmca.supervised.rows import run_rows


def run(cfg: RunConfig) -> dict[str, float]:
    """Train on texts, as `rows.run_rows` says."""
    return run_rows(cfg, lambda cfg, source: TextEncoder(cfg.data, source.tokenizer, cfg.model.template))
