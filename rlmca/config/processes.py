"""Keys of the processes that hold the models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlmca.config.fields import option


@dataclass(frozen=True)
class ProcessesConfig:
    """Ray: models on actors, wherever its cluster has room. Without it every process of torchrun is a rank."""

    use_ray: bool | None = option(
        None, "Models on Ray actors; when not set, stage grpo takes Ray as soon as there are several ranks, other stages torchrun."
    )
    ray_address: str | None = option(
        None, "Address of a running Ray cluster (auto: the one of this machine); when not set a local one is started."
    )
    ray_num_workers: int | None = option(None, "Ranks on Ray; NPROC_PER_NODE, else one a device, when not set.", at_least=1)
    ray_init_kwargs: dict[str, Any] = option({}, "Further arguments of ray.init, under Ray's names.")
