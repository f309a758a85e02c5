"""Keys of the rollout engine."""

from __future__ import annotations

from dataclasses import dataclass

from rlmca.config.fields import option


@dataclass(frozen=True)
class RolloutConfig:
    """Which engine writes replies."""

    rollout_engine: str = option(
        "auto",
        "Engine that writes replies; torch is another name of local.",
        choices=("auto", "local"),
        refused={"sglang": "sglang: not in this version; write auto or local"},
    )
    rollout_batch: int | None = option(None, "Replies written at the same time; all of a rollout when not set.", at_least=1)
