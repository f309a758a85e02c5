"""Keys of the rollout engine."""

from __future__ import annotations

from dataclasses import dataclass

from rlmca.config.fields import option
from rlmca.config.sglang import SglangOptions, SyncOptions


@dataclass(frozen=True)
class RolloutConfig:
    """Which engine writes replies, and how it is reached."""

    rollout_engine: str = option(
        "auto",
        "Engine that writes replies: local (torch is another name), sglang, or auto: sglang with a CUDA device and an "
        "environment that has it, else local.",
        choices=("auto", "local", "sglang"),
    )
    rollout_batch: int | None = option(
        None, "Replies written at the same time; when not set: all of a rollout in engine local, 256 in engine sglang.", at_least=1
    )
    sglang: SglangOptions = option(SglangOptions(), "SGLang servers that the run starts: python, num_engines, tp and so on.")
    sglang_base_urls: list[str] = option([], "SGLang servers that run already, as http://host:port; a list or a,b.")
    sync: SyncOptions = option(SyncOptions(), "How weights reach SGLang servers: method, bucket_mb, dir.")
