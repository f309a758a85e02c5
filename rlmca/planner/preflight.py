"""What would stop a run, found before a process is started or a weight is read."""

from __future__ import annotations

from rlmca.config import ConfigError, RunConfig, batch_plan, layout_errors
from rlmca.data import DataError, check_sources
from rlmca.layouts import ModelLayout, Topology
from rlmca.observe.trackers import check_report_to
from rlmca.planner.parameters import read_hf_config
from rlmca.planner.rows import count_rows, training_rows
from rlmca.rewards import build_rewards


def preflight_errors(cfg: RunConfig, world_size: int) -> list[str]:
    """Problems of the layout, the model's config.json, the data sources and the number of rows, all of them."""
    errors = layout_errors(cfg, world_size)
    fits = not errors
    try:
        hf_config = read_hf_config(cfg.model)
        if hf_config is not None:
            ModelLayout(hf_config).check(Topology(tp=cfg.megatron.tensor_model_parallel_size, pp=cfg.megatron.pipeline_model_parallel_size))
    except ConfigError as error:
        errors += error.errors
    except ValueError as error:
        errors.append(f"model_name_or_path: {error}")
    errors += check_report_to(cfg.train.report_to)
    if cfg.stage == "grpo":
        errors += _reward_errors(cfg)
    sources = check_sources(cfg.data)
    errors += sources
    if not sources and fits:
        errors += _row_errors(cfg, world_size)
    return errors


def _reward_errors(cfg: RunConfig) -> list[str]:
    try:
        build_rewards(cfg.rewards.rewards, cfg.rewards.reward_workers, cfg.rewards.reward_timeout).close()
    except ValueError as error:
        return [f"rewards: {error}"]
    return []


def _row_errors(cfg: RunConfig, world_size: int) -> list[str]:
    try:
        rows = training_rows(cfg, count_rows(cfg))
        if rows is not None:
            batch_plan(cfg, world_size, rows)
    except ConfigError as error:
        return error.errors
    except DataError as error:
        return str(error).splitlines()
    return []
