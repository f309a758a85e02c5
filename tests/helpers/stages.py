"""Whole stages in this process, on the engine that the environment would choose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlmca.types import Sample

PLAIN = {"USE_MCA": "0"}
"""Environment of the command line without Megatron."""


def run_stage(values: dict[str, Any], use_mca: bool) -> dict[str, float]:
    """Results of stage pt, sft or grpo; for a rank pool of one process, so that no process group is left in the caller."""
    from rlmca.config import Environment, make_config
    from rlmca.rl import grpo
    from rlmca.supervised import pt, sft

    cfg = make_config(values, env=Environment(use_mca=use_mca))
    return {"grpo": grpo, "pt": pt, "sft": sft}[cfg.stage].run(cfg)


def recorded_samples(path: Path) -> list[Sample]:
    """The samples of a rollout file, as they were when it was written."""
    from rlmca.run.rollouts import read_rollout

    names = ("prompt_ids", "reply_ids", "versions", "finish", "reply", "group", "k", "reward", "reward_parts", "advantage")
    return [Sample(reply_logp=row["logp"], **{name: row[name] for name in names}) for row in read_rollout(path)]
