"""What would stop a run, found before a process is started or a weight is read."""

from __future__ import annotations

from pathlib import Path

from rlmca.config import ConfigError, RunConfig, batch_plan, layout_errors
from rlmca.data import DataError, check_sources, template_errors
from rlmca.engines.huggingface_setup import setup_errors
from rlmca.engines.megatron_setup import run_topology
from rlmca.layouts import ModelLayout, Topology
from rlmca.observe.trackers import check_report_to
from rlmca.planner.parameters import read_hf_config
from rlmca.planner.rows import count_rows, training_rows
from rlmca.rewards import build_rewards
from rlmca.rollout.sglang.environment import resolve_engine
from rlmca.run.lr import LearningRate
from rlmca.transfer.source import resolve_model


def preflight_errors(cfg: RunConfig, world_size: int) -> list[str]:
    """Problems of the layout, the model's config.json, the data sources and the number of rows, all of them."""
    errors = layout_errors(cfg, world_size)
    fits = not errors
    try:
        hf_config = read_hf_config(cfg.model)
        if cfg.engine == "huggingface":
            errors += setup_errors(cfg, hf_config)
        elif hf_config is not None:
            layout = ModelLayout(hf_config)
            topology = run_topology(cfg, layout.num_layers)
            layout.check(topology)
            layout.check_context(topology, cfg.megatron.context_parallel_size, cfg.megatron.cp_comm_type)
            errors += _additional_errors(cfg, layout, topology)
        if hf_config is not None:
            errors += _export_errors(cfg)
    except ConfigError as error:
        errors += error.errors
    except ValueError as error:
        errors.append(f"model_name_or_path: {error}")
    errors += template_errors(cfg.model.template)
    errors += _schedule_errors(cfg)
    errors += check_report_to(cfg.train.report_to)
    if cfg.stage == "grpo" or (cfg.rewards.rewards and cfg.data.eval_dataset):
        errors += _reward_errors(cfg)
        errors += _rollout_errors(cfg)
    sources = check_sources(cfg.data)
    errors += sources
    if not sources and fits:
        errors += _row_errors(cfg, world_size)
    return errors


def _additional_errors(cfg: RunConfig, layout: ModelLayout, topology: Topology) -> list[str]:
    if not cfg.megatron.additional_configs:
        return []
    # Imported here because megatron takes seconds and most runs have no such fields.
    from rlmca.engines.megatron_setup import engine_options
    from rlmca.models.build import transformer_config

    try:
        transformer_config(layout, engine_options(cfg).build, topology)
    except (ValueError, TypeError, AssertionError) as error:
        text = str(error) or type(error).__name__
        return [text if text.startswith("additional_configs") else f"additional_configs: {text}"]
    return []


def _export_errors(cfg: RunConfig) -> list[str]:
    """The folder at the end of the run must not replace the one it starts from."""
    target, source = (Path(cfg.train.output_dir) / "hf").resolve(), resolve_model(cfg.model.model_name_or_path, cfg.model).resolve()
    if cfg.train.save_hf_model and target in (source, *source.parents):
        return [
            f"output_dir: {cfg.train.output_dir} holds the model that the run starts from ({source}), which save_hf_model would replace; "
            "name another folder"
        ]
    return []


def _schedule_errors(cfg: RunConfig) -> list[str]:
    try:
        LearningRate(cfg.train, max(1, cfg.train.max_steps))
    except ValueError as error:
        return [str(error)]
    return []


def _reward_errors(cfg: RunConfig) -> list[str]:
    try:
        build_rewards(cfg.rewards.rewards, cfg.rewards.reward_workers, cfg.rewards.reward_timeout).close()
    except ValueError as error:
        return [f"rewards: {error}"]
    return []


def _rollout_errors(cfg: RunConfig) -> list[str]:
    try:
        resolve_engine(cfg)
    except ConfigError as error:
        return error.errors
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
