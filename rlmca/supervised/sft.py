"""Stage sft: supervised fine-tuning on conversations."""

from __future__ import annotations

from rlmca.config import RunConfig
from rlmca.data.encoders import ConversationEncoder
from rlmca.supervised.rows import run_rows


def run(cfg: RunConfig) -> dict[str, float]:
    """Train on the replies of conversations, as `rows.run_rows` says."""
    return run_rows(cfg, lambda cfg, source: ConversationEncoder(cfg.data, source.template))
