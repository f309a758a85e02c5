"""What a model's config.json, and its folder once there is one, say against a run; asked twice.

Before anything is started, where at most config.json is known of a model on the hub; and again by the loop that has fetched the folder,
so that a model which could not be looked at before meets the same checks before a weight is read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rlmca.config import ConfigError, RunConfig, keys
from rlmca.config.expert_checks import EXPERT_KEYS
from rlmca.engines.huggingface_setup import setup_errors
from rlmca.engines.megatron_setup import run_topology
from rlmca.layouts import LayoutError, ModelLayout, Topology
from rlmca.parallel.platform import quiet_megatron
from rlmca.planner.finetuning import finetuning_errors
from rlmca.rollout.sglang.attention import attention_error
from rlmca.rollout.sglang.environment import resolve_engine
from rlmca.rollout.sglang.mixtures import mixture_error
from rlmca.transfer.hf_folder import HFFolderError, read_config, tensor_names


def model_errors(cfg: RunConfig, hf_config: Mapping[str, Any] | None, folder: Path | None) -> list[str]:
    """Everything that does not fit; `hf_config` None: a model that nothing is known of, `folder` None: files that are not here yet."""
    errors: list[str] = []
    try:
        if cfg.engine == "huggingface":
            errors += setup_errors(cfg, hf_config)
        elif hf_config is not None:
            errors += _split_errors(cfg, ModelLayout(hf_config), folder)
        if folder is not None:
            errors += _export_errors(cfg, folder)
        if hf_config is not None:
            errors += _server_errors(cfg, hf_config)
        errors += finetuning_errors(cfg, hf_config)
    except ValueError as error:
        errors.append(f"model_name_or_path: {error}")
    return errors


def check_model(cfg: RunConfig, folder: Path) -> None:
    """Raises ConfigError with everything that does not fit the model in `folder`."""
    try:
        errors = model_errors(cfg, read_config(folder), folder)
    except HFFolderError as error:
        errors = [f"model_name_or_path: {error}"]
    if errors:
        raise ConfigError(errors)


def writes_replies(cfg: RunConfig) -> bool:
    """Whether a training run has a rollout engine."""
    return cfg.stage == "grpo" or bool(cfg.stage == "sft" and cfg.rewards.rewards and cfg.data.eval_dataset)


def _by_servers(cfg: RunConfig) -> bool:
    try:
        return resolve_engine(cfg) == "sglang"
    except ConfigError:  # said by `preflight_errors`
        return True


def _split_errors(cfg: RunConfig, layout: ModelLayout, folder: Path | None) -> list[str]:
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
        lambda: _check_routing(cfg, layout, folder),
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


def _check_routing(cfg: RunConfig, layout: ModelLayout, folder: Path | None) -> None:
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
    if writes_replies(cfg) and layout.megatron.latent:
        raise LayoutError(f"stage {cfg.stage} of {layout.family.model_type}: replies of such models are not in this version")
    if writes_replies(cfg) and _by_servers(cfg):
        if error := mixture_error(layout.hf_config, [] if folder is None else tensor_names(folder)):
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


def _export_errors(cfg: RunConfig, folder: Path) -> list[str]:
    """The folder at the end of the run must not replace the one it starts from."""
    output, source = Path(cfg.train.output_dir).resolve(), folder.resolve()
    target = (output / "hf").resolve()
    if cfg.train.save_hf_model and target in (source, *source.parents):
        return [
            f"output_dir: {cfg.train.output_dir} holds the model that the run starts from ({source}), which save_hf_model would replace; "
            "name another folder"
        ]
    if cfg.finetuning.lora and output == source:
        return [
            f"output_dir: {cfg.train.output_dir} is the model's own folder, and an adapter beside it would change it; name another folder"
        ]
    return []


def _server_errors(cfg: RunConfig, hf_config: Mapping[str, Any]) -> list[str]:
    error = attention_error(hf_config, cfg.generation) if writes_replies(cfg) and _by_servers(cfg) else None
    return [] if error is None else [error]
