"""The dry run: the plan of a run as a table, without loading weights or starting anything."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlmca.config import ConfigError, RunConfig, batch_plan, model_parallel_size
from rlmca.engines.budget import micro_batch_tokens
from rlmca.engines.megatron_setup import run_topology
from rlmca.layouts import Coord, ModelLayout
from rlmca.planner.finetuning import trained_elements
from rlmca.planner.parameters import rank_parameters, read_hf_config
from rlmca.planner.preflight import preflight_errors
from rlmca.planner.rows import count_rows, training_rows


def dry_run(cfg: RunConfig, world_size: int, console: Console | None = None, *, here: bool = True) -> None:
    """Print what a run on `world_size` processes, on this machine or (`here=False`) others, would do.

    ConfigError with every reason why it would not start.
    """
    errors = preflight_errors(cfg, world_size, here=here)
    if errors:
        raise ConfigError(errors)
    table = Table(title="plan", show_header=False, title_justify="left")
    for name, value in [*_layout_lines(cfg, world_size), *_data_lines(cfg, world_size), *_parameter_lines(cfg)]:
        table.add_row(Text(name), Text(value, overflow="fold"))
    console = console or Console()
    console.print(table)
    for note in cfg.notes:
        console.print(Text(f"note: {note}"), soft_wrap=True)
    console.print(Text("dry run: nothing was loaded or started"))


def _layout_lines(cfg: RunConfig, world_size: int) -> list[tuple[str, str]]:
    megatron = cfg.megatron
    context = f"context {megatron.context_parallel_size} x " if megatron.context_parallel_size > 1 else ""
    split = f"tensor {megatron.tensor_model_parallel_size} x {context}pipeline {megatron.pipeline_model_parallel_size} x "
    kind = "processes" if cfg.ray_ranks is None else "Ray actors"
    data = f"data {world_size // model_parallel_size(cfg)} = {world_size} {kind}"
    experts, etp = megatron.expert_model_parallel_size, megatron.expert_tensor_parallel_size
    if experts > 1 or etp is not None:
        data += f", expert {experts} x expert tensor {megatron.tensor_model_parallel_size if etp is None else etp}"
    layout = data if cfg.engine == "huggingface" else split + data
    half = "bfloat16" if cfg.train.bf16 else "float16"
    precision = f"{half} with float32 masters" if cfg.engine == "megatron" else f"float32 weights, {half} autocast"
    return [
        ("stage", cfg.stage),
        ("model", cfg.model.model_name_or_path),
        ("engine", f"{cfg.engine}, {precision if cfg.train.bf16 or cfg.train.fp16 else 'float32'}"),
        ("layout", layout + (", sequence parallel" if megatron.sequence_parallel else "")),
        ("output", cfg.train.output_dir),
    ]


def _data_lines(cfg: RunConfig, world_size: int) -> list[tuple[str, str]]:
    counts = count_rows(cfg, read_large=True)
    unit = {"pt": "texts", "dpo": "pairs"}.get(cfg.stage, "rows")
    unknown = "streamed" if cfg.data.streaming else "not counted (on the hub)"
    lines = [(f"data {name}", unknown if count is None else f"{count} {unit}") for name, count in counts.items()]
    rows = training_rows(cfg, counts)
    if rows is None:
        return [*lines, ("steps", str(cfg.train.max_steps) if cfg.train.max_steps > 0 else "known once the data is read")]
    plan = batch_plan(cfg, world_size, rows)
    budget = micro_batch_tokens(cfg)
    if cfg.stage == "grpo":
        mini = cfg.rl.mini_batch_size or cfg.rl.rollout_batch_size
        pieces = f"micro-batches of {budget} tokens" if budget else f"{plan.accumulation} micro-batches of {plan.micro_batch} a rank"
        lines += [
            ("rollout", f"{plan.global_batch} prompts x {cfg.rl.num_generations} replies = {plan.samples} samples"),
            (
                "update",
                f"{plan.optimizer_steps_per_step} optimiser steps of {mini} prompts, {pieces}",
            ),
        ]
    elif cfg.data.packs and cfg.stage == "sft":
        packs = f"{plan.global_batch} packs of {cfg.data.cutoff_len} tokens, micro-batches of {budget} tokens"
        return [*lines, ("batch", packs), ("steps", "known once the rows are packed")]
    else:
        lines.append(
            (
                "batch",
                f"micro-batch {plan.micro_batch} x accumulation {plan.accumulation} x data {plan.data_parallel} = "
                f"{plan.global_batch} {unit}" + ("" if budget is None else f", in micro-batches of {budget} tokens"),
            )
        )
    steps = f"{plan.total_steps} ({plan.steps_per_epoch} an epoch, {plan.epochs:.2f} epochs)"
    return [*lines, ("steps", steps + (f", {plan.total_optimizer_steps} optimiser steps" if cfg.stage == "grpo" else ""))]


def _parameter_lines(cfg: RunConfig) -> list[tuple[str, str]]:
    hf_config = read_hf_config(cfg.model)
    if hf_config is None:
        return [("parameters", "known once the model's config.json is fetched from the hub")]
    try:
        topology = run_topology(cfg, int(hf_config.get("num_hidden_layers", 0)))
        total, ranks = rank_parameters(hf_config, topology)
    except ValueError:
        if cfg.engine != "huggingface":
            raise
        return [("parameters", "known once the model is loaded")]  # Transformers has far more families than there are layouts here
    lines = [("parameters", f"{total:,}")]
    if cfg.finetuning.finetuning_type != "full":
        number = trained_elements(cfg, ModelLayout(hf_config))
        lines.append(("trained", f"{number:,} ({number / total:.2%} of the model's, {cfg.finetuning.finetuning_type})"))
    if len(ranks) > 1:
        lines += [(_place(rank.coord), f"{rank.parameters:,}") for rank in ranks]
    return lines


def _place(coord: Coord) -> str:
    group = f", group {coord.block}" if coord.block else ""
    return f"  tensor {coord.tp}{group}, pipeline {coord.pp}"
