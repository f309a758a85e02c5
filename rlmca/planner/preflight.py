"""What would stop a run, found before a process is started or a weight is read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rlmca.config import ConfigError, RunConfig, batch_plan, keys, layout_errors
from rlmca.config.expert_checks import EXPERT_KEYS
from rlmca.data import DataError, check_sources, template_errors
from rlmca.engines.huggingface_setup import setup_errors
from rlmca.engines.megatron_setup import run_topology
from rlmca.layouts import LayoutError, ModelLayout, Topology
from rlmca.observe.trackers import check_report_to
from rlmca.parallel.platform import quiet_megatron
from rlmca.planner.finetuning import finetuning_errors
from rlmca.planner.parameters import read_hf_config
from rlmca.planner.rows import count_rows, training_rows
from rlmca.rewards import build_rewards
from rlmca.rollout.sglang.attention import attention_error
from rlmca.rollout.sglang.environment import resolve_engine
from rlmca.rollout.sglang.mixtures import mixture_error
from rlmca.run.lr import LearningRate
from rlmca.transfer.hf_folder import tensor_names
from rlmca.transfer.source import resolve_model


def preflight_errors(cfg: RunConfig, world_size: int, *, here: bool = True) -> list[str]:
    """Problems of the layout, the model's config.json, the data sources and the number of rows, all of them.

    With `here=False` the run is meant for other machines: what this one lacks is no problem then.
    """
    errors = layout_errors(cfg, world_size)
    fits = not errors
    try:
        hf_config = read_hf_config(cfg.model)
        if cfg.engine == "huggingface":
            errors += setup_errors(cfg, hf_config)
        elif hf_config is not None:
            errors += _split_errors(cfg, ModelLayout(hf_config))
        if hf_config is not None:
            errors += _export_errors(cfg)
            errors += _server_errors(cfg, hf_config)
        errors += finetuning_errors(cfg, hf_config)
    except ConfigError as error:
        errors += error.errors
    except ValueError as error:
        errors.append(f"model_name_or_path: {error}")
    if here and cfg.engine == "megatron":
        errors += _kernel_errors(cfg)
    errors += template_errors(cfg.model.template)
    errors += _schedule_errors(cfg)
    errors += check_report_to(cfg.train.report_to)
    if _writes_replies(cfg):
        errors += _reward_errors(cfg)
        errors += _rollout_errors(cfg)
    sources = check_sources(cfg.data)
    errors += sources
    if not sources and fits:
        errors += _row_errors(cfg, world_size)
    return errors


def _writes_replies(cfg: RunConfig) -> bool:
    return cfg.stage == "grpo" or bool(cfg.rewards.rewards and cfg.data.eval_dataset)


def _by_servers(cfg: RunConfig) -> bool:
    try:
        return resolve_engine(cfg) == "sglang"
    except ConfigError:  # said by `_rollout_errors`
        return True


def _split_errors(cfg: RunConfig, layout: ModelLayout) -> list[str]:
    """Why the model does not split as the configuration says, and what is wrong with its further Megatron fields."""
    megatron, errors = cfg.megatron, []
    try:
        topology = run_topology(cfg, layout.num_layers)
        topology.chunk_layers(layout.num_layers)
    except LayoutError as error:  # without it only the heads can be looked at
        topology = Topology(tp=megatron.tensor_model_parallel_size)
        errors.append(str(error))
    checks: list[Callable[[], None]] = [
        lambda: layout.check_width(topology),
        lambda: layout.check_experts(topology),
        lambda: _check_routing(cfg, layout),
        lambda: _check_angles(cfg, layout),
        lambda: layout.check_context(topology, megatron.context_parallel_size, megatron.cp_comm_type),
    ]
    if megatron.recompute_method and not errors:
        checks.append(lambda: layout.check_recompute(topology, str(megatron.recompute_method), megatron.recompute_num_layers or 1))
    for check in checks:
        try:
            check()
        except LayoutError as error:
            errors.append(str(error))
    return errors or _additional_errors(cfg, layout, topology)


def _check_routing(cfg: RunConfig, layout: ModelLayout) -> None:
    """Raises LayoutError for what experts need, or do not have here, besides sizes that come out even."""
    if not layout.megatron.num_experts:
        given = [name for name in EXPERT_KEYS if getattr(cfg.megatron, name) != keys()[name].default]
        if given:
            raise LayoutError(f"{', '.join(given)}: a {layout.family.model_type} model has no experts; leave it out")
        return
    if cfg.megatron.tensor_model_parallel_size > 1 and not cfg.megatron.sequence_parallel:
        raise LayoutError(
            f"tensor_model_parallel_size is {cfg.megatron.tensor_model_parallel_size} and the model has experts: "
            "every rank would route all tokens; write sequence_parallel: true"
        )
    if _writes_replies(cfg) and layout.megatron.latent:
        raise LayoutError(f"stage {cfg.stage} of {layout.family.model_type}: replies of such models are not in this version")
    if _writes_replies(cfg) and _by_servers(cfg):
        tensors = tensor_names(resolve_model(cfg.model.model_name_or_path, cfg.model))
        if error := mixture_error(layout.hf_config, tensors):
            raise LayoutError(error)
        if layout.megatron.config.get("moe_shared_expert_gate"):
            raise LayoutError(
                f"rollout_engine: sglang of {layout.family.model_type}: a shared expert by SGLang's servers is not in this version; "
                "write rollout_engine: local"
            )
    number, factor = layout.megatron.num_experts, cfg.megatron.moe_expert_capacity_factor
    chosen = layout.megatron.config["moe_router_topk"]
    if cfg.megatron.moe_pad_expert_input_to_capacity and factor and factor * chosen > number:
        raise LayoutError(
            f"moe_expert_capacity_factor is {factor:g} and {chosen} of {number} experts are chosen: there are not enough tokens to pad "
            f"an expert to its capacity; write at most {number * 100 // chosen / 100:g}, or moe_pad_expert_input_to_capacity: false"
        )


def _check_angles(cfg: RunConfig, layout: ModelLayout) -> None:
    """Raises LayoutError for a kernel that leaves out what the model's angles need, or that was not compared with them."""
    if (factor := layout.megatron.rope.get("attention_factor", 1.0)) != 1.0 and cfg.megatron.apply_rope_fusion:
        raise LayoutError(
            f"apply_rope_fusion: the fused kernel leaves out the attention factor of the model's YaRN ({factor:.4g}); "
            "write apply_rope_fusion: false"
        )
    if layout.megatron.latent and cfg.megatron.apply_rope_fusion:
        raise LayoutError(
            f"apply_rope_fusion: not in this version with the latent attention of {layout.family.model_type}; "
            "write apply_rope_fusion: false, the result is the same"
        )


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


def _additional_errors(cfg: RunConfig, layout: ModelLayout, topology: Topology) -> list[str]:
    if not cfg.megatron.additional_configs:
        return []
    quiet_megatron()
    # Imported here because megatron takes seconds and most runs have no such fields.
    from rlmca.engines.megatron_setup import engine_options
    from rlmca.models.build import transformer_config

    try:
        transformer_config(layout, dataclasses.replace(engine_options(cfg).build, apply_rope_fusion=False), topology)
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


def _server_errors(cfg: RunConfig, hf_config: Mapping[str, Any]) -> list[str]:
    error = attention_error(hf_config, cfg.generation) if _writes_replies(cfg) and _by_servers(cfg) else None
    return [] if error is None else [error]


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
