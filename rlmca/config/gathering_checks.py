"""What must hold between the keys that surround an update, and which of them are without effect; in the form of `checks`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rlmca.config.schema import RunConfig

Finding = tuple[tuple[str, ...], str]


def gathering_findings(cfg: RunConfig) -> Iterator[Finding]:
    """Every contradiction of a configuration of stage grpo."""
    if cfg.stage != "grpo":
        return
    g, longest = cfg.gathering, cfg.generation.max_new_tokens
    if g.overlong_buffer > longest:
        yield (
            ("overlong_buffer", "max_new_tokens"),
            f"overlong_buffer: {g.overlong_buffer} tokens are more than max_new_tokens {longest}; write less, a fifth of it for example",
        )
    if g.overlong_buffer and any(spec.name == "overlong" for spec in cfg.rewards.rewards):
        yield (
            ("overlong_buffer", "rewards"),
            "overlong_buffer and the reward overlong would both take off for length: leave one out",
        )
    if g.dynamic_sampling and cfg.rl.num_generations < 2 and cfg.rl.advantage == "reinforce_plus_plus":  # the others refuse it anyway
        yield (
            ("dynamic_sampling", "num_generations"),
            "dynamic_sampling: one reply to a prompt scores like itself, so that no group would be kept; write num_generations of at "
            "least 2, or dynamic_sampling: false",
        )
    if not g.curriculum_range:
        yield ("curriculum_range",), "curriculum_range: has no value: write [low, high], or leave it out"
    if g.prompt_filter is not None:
        yield from _filter(g.prompt_filter)


def _filter(name: str) -> Iterator[Finding]:
    where, colon, function = name.rpartition(":")
    if not (colon and where and function):
        yield ("prompt_filter",), f"prompt_filter: {name!r}: write path/file.py:function or package.module:function"
    elif where.endswith(".py") and not Path(where).expanduser().is_file():
        yield ("prompt_filter",), f"prompt_filter: there is no file {where}"


def gathering_notes(cfg: RunConfig) -> Iterator[str]:
    """One sentence for each key of stage grpo that another one leaves without effect."""
    if cfg.stage != "grpo":
        return
    g, rl, given = cfg.gathering, cfg.rl, cfg.given
    if not g.dynamic_sampling and "dynamic_sampling_max_batches" in given:
        yield "dynamic_sampling_max_batches has no effect: dynamic_sampling is false"
    if g.dynamic_sampling and rl.drop_zero_std_groups and not g.overlong_buffer:  # which can make scores alike that differed
        yield "drop_zero_std_groups has no effect: dynamic_sampling replaces such groups"
    if g.curriculum == "none" and "curriculum_range" in given:
        yield "curriculum_range has no effect: curriculum is none"
    if not g.overlong_buffer and "overlong_penalty" in given:
        yield "overlong_penalty has no effect: overlong_buffer is 0"
    if g.reward_normalize != "none" and rl.advantage == "grpo" and rl.advantage_std != "none":
        yield (
            f"reward_normalize: {g.reward_normalize} changes next to nothing: advantage grpo takes a group's mean off and divides by its "
            "spread; it matters with advantage_std: none"
        )
