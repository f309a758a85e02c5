"""Keys of the Hugging Face engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlmca.config.fields import option


@dataclass(frozen=True)
class HuggingFaceConfig:
    """Memory and data parallelism of the Hugging Face engine."""

    gradient_checkpointing: bool = option(False, "Recompute the activations inside a layer in the backward pass.")
    gradient_checkpointing_kwargs: dict[str, Any] = option(
        {}, "use_reentrant: which of torch's two implementations recomputes; false when not set."
    )
    ddp_find_unused_parameters: bool | None = option(
        None, "Data parallelism looks for parameters that a forward did not use; needed for models that leave some out."
    )
    ddp_bucket_cap_mb: int | None = option(None, "Most MiB of gradients in one reduction; torch's 25 when not set.", at_least=1)
