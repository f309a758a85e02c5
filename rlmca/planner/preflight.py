"""What would stop a run, found before a process is started or a weight is read."""

from __future__ import annotations

from rlmca.config import ConfigError, RunConfig, batch_plan, layout_errors
from rlmca.data import DataError, check_sources, template_errors
from rlmca.observe.trackers import check_report_to
from rlmca.parallel.platform import quiet_megatron
from rlmca.planner.model import model_errors, writes_replies
from rlmca.planner.parameters import read_hf_config
from rlmca.planner.rows import count_rows, training_rows
from rlmca.rewards import rewards_of
from rlmca.rollout.sglang.environment import resolve_engine
from rlmca.run.lr import LearningRate
from rlmca.transfer.source import local_folder


def preflight_errors(cfg: RunConfig, world_size: int, *, here: bool = True) -> list[str]:
    """Problems of the layout, the model's config.json, the data sources and the number of rows, all of them.

    With `here=False` the run is meant for other machines: what this one lacks is no problem then.
    """
    errors = layout_errors(cfg, world_size)
    fits = not errors
    errors += _model_errors(cfg)
    if here and cfg.engine == "megatron":
        errors += _kernel_errors(cfg)
    errors += template_errors(cfg.model.template)
    errors += _schedule_errors(cfg)
    errors += check_report_to(cfg.train.report_to)
    if writes_replies(cfg):
        errors += _reward_errors(cfg)
        errors += _rollout_errors(cfg)
    sources = check_sources(cfg.data, ranking=cfg.stage == "dpo")
    errors += sources
    if not sources and fits:
        errors += _row_errors(cfg, world_size)
    return errors


def _model_errors(cfg: RunConfig) -> list[str]:
    try:
        return model_errors(cfg, read_hf_config(cfg.model), local_folder(cfg.model.model_name_or_path))
    except ConfigError as error:
        return error.errors


def _kernel_errors(cfg: RunConfig) -> list[str]:
    megatron = cfg.megatron
    split_packs = cfg.data.packs and megatron.context_parallel_size > 1
    unfused = not megatron.masked_softmax_fusion or not megatron.moe_grouped_gemm
    asks = megatron.apply_rope_fusion or unfused or megatron.transformer_impl == "transformer_engine"
    if not asks and not split_packs:
        return []
    quiet_megatron()
    # Imported here because megatron takes seconds and most runs ask for no special kernel.
    from rlmca.engines.megatron_setup import engine_options
    from rlmca.models.spec import kernel_errors

    return kernel_errors(engine_options(cfg).build, packing=cfg.data.packs)


def _schedule_errors(cfg: RunConfig) -> list[str]:
    try:
        LearningRate(cfg.train, max(1, cfg.train.max_steps))
    except ValueError as error:
        return [str(error)]
    return []


def _reward_errors(cfg: RunConfig) -> list[str]:
    try:
        rewards_of(cfg.rewards, cfg.generation.max_new_tokens).close()
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
