"""Keys of what surrounds an update (stage grpo): which prompts and groups make a rollout, and what is done to their rewards."""

from __future__ import annotations

from dataclasses import dataclass

from rlmca.config.fields import option


@dataclass(frozen=True)
class GatheringConfig:
    """The choice of prompts and groups, and the shaping of rewards before advantages."""

    prompt_filter: str | None = option(
        None, "Function of yours, path/file.py:function or package.module:function, from a row to true (keep) or false."
    )
    thinking_ratio: float | None = option(
        None,
        "Share of training prompts rendered with thinking on, drawn anew in every rollout; enable_thinking decides when not set.",
        at_least=0,
        at_most=1,
    )
    dynamic_sampling: bool = option(False, "Replace groups whose replies all score alike by groups of the next prompts.")
    dynamic_sampling_max_batches: int = option(10, "Times that one rollout may generate to get its groups together.", at_least=1)
    oversample: float = option(1.0, "Prompts generated for each one that is needed; the first whole groups are kept.", at_least=1)
    curriculum: str = option("none", "pass_rate: leave out prompts that turned out too easy or too hard.", choices=("none", "pass_rate"))
    curriculum_range: list[float] = option(
        [0.05, 0.95], "Lowest and highest pass rate of prompts that stay in use; new ones always do.", at_least=0, at_most=1
    )
    overlong_buffer: int = option(0, "The last tokens before max_new_tokens, in which length costs reward; 0: none.", at_least=0)
    overlong_penalty: float = option(1.0, "Taken off the reward of a reply of max_new_tokens tokens; less inside overlong_buffer.", above=0)
    reward_normalize: str = option(
        "none",
        "Rewards minus their mean over their spread: of the rollout (batch), or of all rollouts so far (running).",
        choices=("none", "batch", "running"),
    )
