"""What must hold between keys, stage by stage and command by command.

Each check yields `(keys it read, sentence)`; a check that read a key which is already in error is left out, so that one
mistake gives one error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from rlmca.config import (
    batch_checks,
    data_checks,
    engine_checks,
    expert_checks,
    finetuning_checks,
    preference_checks,
    rl_checks,
    rollout_checks,
)
from rlmca.config.arithmetic import layout_chunks, virtual_stages
from rlmca.config.foreign import ALIASES, FOREIGN
from rlmca.config.gathering_checks import gathering_findings, gathering_notes
from rlmca.config.process_checks import process_findings
from rlmca.config.schema import RunConfig, keys
from rlmca.config.tracking import SWANLAB_KEYS
from rlmca.config.train import MIN_LR_SCHEDULERS, TrainConfig

Finding = tuple[tuple[str, ...], str]

SFT_ONLY = ("gradient_accumulation_steps", "cutoff_len", "train_on_prompt", "mask_history", "val_size", *data_checks.KEYS)
GRPO_ONLY = (*(name for name, key in keys().items() if key.section in ("rl", "gathering")), "ref_model")
GENERATION_ONLY = tuple(name for name, key in keys().items() if key.section in ("generation", "rewards", "rollout"))
CHAT_LEAVES = ("dataset", "eval_dataset", "rewards", "num_generations")
EXPORT_ONLY = ("export_dir", "export_legacy_format")
GRPO_REFUSES = {
    "gradient_accumulation_steps": "stage grpo derives it from mini_batch_size and per_device_train_batch_size; leave it out",
    "val_size": "stage grpo holds nothing out of its prompts; write eval_dataset",
}


def findings(cfg: RunConfig, command: str) -> Iterator[Finding]:
    """Every contradiction of a configuration for a command."""
    yield from _needed(cfg, command)
    yield from engine_checks.findings(cfg, command)
    yield from finetuning_checks.findings(cfg, command)
    yield from _data(cfg)
    yield from data_checks.findings(cfg, command)
    yield from _training(cfg)
    if command == "train":
        yield from batch_checks.findings(cfg)
        yield from gathering_findings(cfg)
    if cfg.engine != "huggingface":  # there these keys are refused as a whole
        yield from _megatron(cfg)
        yield from expert_checks.findings(cfg)
        yield from _additional_configs(cfg)
    yield from process_findings(cfg)
    yield from rollout_checks.findings(cfg)
    if command == "train":
        yield from _evaluation(cfg)
        yield from preference_checks.findings(cfg)
        yield from _stage(cfg)


def notes(cfg: RunConfig, command: str) -> Iterator[str]:
    """One sentence for each honoured key that this command or stage does not use."""
    if command != "train":
        for name in ("use_ray", "ray_address", "ray_num_workers"):
            if getattr(cfg.processes, name):
                yield f"{name} has no effect: {command} works in one process"
        if command == "chat":
            for name in CHAT_LEAVES:
                if name in cfg.given:
                    yield f"{name} has no effect: chat reads what you write and writes one reply, which nobody scores"
        yield from rollout_checks.notes(cfg)
        return
    given = cfg.given

    def idle(names: tuple[str, ...], reason: str) -> Iterator[str]:
        for name in names:
            if name in given:
                yield f"{name} has no effect: {reason}"

    yield from data_checks.notes(cfg)
    if cfg.stage == "pt":
        yield from idle(GENERATION_ONLY, "stage pt writes no replies; eval and generate use it")
    elif cfg.stage == "dpo":
        yield from preference_checks.notes(cfg)
        yield from idle(GENERATION_ONLY, "stage dpo writes no replies")
    elif cfg.stage == "sft":
        if cfg.rewards.rewards and cfg.data.eval_dataset:
            yield from idle(("do_sample", "temperature", "top_p", "top_k"), "evaluations of stage sft score the most likely reply")
        else:
            yield from idle(GENERATION_ONLY, "stage sft writes no replies without rewards and eval_dataset; eval and generate use it")
    else:
        yield from idle(tuple(n for n in SFT_ONLY if n not in GRPO_REFUSES), "stage grpo trains on replies, not on rows")
        if cfg.rl.kl_coef == 0:
            yield from idle(("ref_model",), "kl_coef is 0")
        if not cfg.rl.debug_mode:
            yield from idle(("debug_interval",), "debug_mode is false")
        yield from rl_checks.notes(cfg)
    yield from rollout_checks.notes(cfg)
    yield from batch_checks.notes(cfg)
    yield from gathering_notes(cfg)
    if "swanlab" not in cfg.train.report_to:
        yield from idle(SWANLAB_KEYS, "report_to has no swanlab")
    if not cfg.train.report_to:
        yield from idle(("project", "run_name"), "report_to names no tracker")
    yield from idle(EXPORT_ONLY, "the command export uses it")
    if cfg.train.save_strategy != "steps":
        yield from idle(("save_steps",), f"save_strategy is {cfg.train.save_strategy}")
    if cfg.train.eval_strategy != "steps":
        yield from idle(("eval_steps",), f"eval_strategy is {cfg.train.eval_strategy}")
    if cfg.train.eval_strategy == "no" and not cfg.train.do_eval:
        yield from idle(("eval_dataset", "val_size", "per_device_eval_batch_size"), "eval_strategy is no and do_eval is false")
    if cfg.train.max_steps > 0:
        yield from idle(("num_train_epochs",), "max_steps decides")


def _needed(cfg: RunConfig, command: str) -> Iterator[Finding]:
    def need(key: str, value: object, why: str) -> Iterator[Finding]:
        if not value:
            yield (key,), f"{key} is missing: {why}"

    yield from need("model_name_or_path", cfg.model.model_name_or_path, "write the folder or the hub name of a Hugging Face model")
    if command == "train":
        yield from need("dataset", cfg.data.dataset, "write the names of the training sets")
        yield from need("output_dir", cfg.train.output_dir, "write the folder for logs, checkpoints and the model")
    if command == "generate":
        yield from need("output_dir", cfg.train.output_dir, "write the folder for the replies")
    if command in ("eval", "generate") and not (cfg.data.eval_dataset or cfg.data.dataset):
        yield ("eval_dataset", "dataset"), f"eval_dataset is missing: write the sets that {command} reads"
    if command == "eval" or (command == "train" and cfg.stage == "grpo"):
        yield from need("rewards", cfg.rewards.rewards, "write the functions that score replies, for example rewards: math")
    if command == "export":
        yield from need("export_dir", cfg.export.export_dir, "write the folder to export to")


def _data(cfg: RunConfig) -> Iterator[Finding]:
    data = cfg.data
    for key, names in (("dataset", data.dataset), ("eval_dataset", data.eval_dataset)):
        for name, count in Counter(names).items():
            if count > 1:
                yield (key,), f"{key}: {name} is named {count} times"
    if data.val_size and data.eval_dataset:
        yield ("val_size", "eval_dataset"), "val_size and eval_dataset are both given: evaluation has one source, leave one out"
    if data.val_size > 1 and data.val_size != int(data.val_size):
        yield ("val_size",), f"val_size: {data.val_size} is neither a share below 1 nor a whole number of rows"
    if data.train_on_prompt and data.mask_history:
        yield ("train_on_prompt", "mask_history"), "train_on_prompt and mask_history contradict each other: leave one out"
    if data.eval_on_each_dataset and not data.eval_dataset:
        yield ("eval_on_each_dataset", "eval_dataset"), "eval_on_each_dataset: true needs eval_dataset"


def _training(cfg: RunConfig) -> Iterator[Finding]:
    train = cfg.train
    if train.warmup_steps and train.warmup_ratio:
        yield ("warmup_steps", "warmup_ratio"), "warmup_steps and warmup_ratio are both given: leave one out"
    yield from _scheduler(train)
    if train.max_steps == 0:
        yield ("max_steps",), "max_steps: 0 makes no optimiser step; write a number of steps, or -1 for num_train_epochs"
    if train.resume_newest and train.overwrite_output_dir:
        yield (
            ("resume_from_checkpoint", "overwrite_output_dir"),
            "resume_from_checkpoint and overwrite_output_dir contradict each other: one continues the run, the other deletes it",
        )


def _scheduler(train: TrainConfig) -> Iterator[Finding]:
    kind, kwargs = train.lr_scheduler_type, train.lr_scheduler_kwargs
    if train.min_lr:
        if train.min_lr >= train.learning_rate:
            yield ("min_lr", "learning_rate"), f"min_lr: {train.min_lr} is not below learning_rate {train.learning_rate}"
        if kind not in MIN_LR_SCHEDULERS:
            yield (
                ("min_lr", "lr_scheduler_type"),
                f"min_lr has no meaning with lr_scheduler_type {kind}; it works with {', '.join(MIN_LR_SCHEDULERS)}",
            )
    elif kind.endswith("with_min_lr") and not {"min_lr", "min_lr_rate"} & kwargs.keys():
        yield ("min_lr", "lr_scheduler_type", "lr_scheduler_kwargs"), f"lr_scheduler_type {kind} needs min_lr"
    if kind == "warmup_stable_decay" and "num_decay_steps" not in kwargs:
        yield (
            ("lr_scheduler_type", "lr_scheduler_kwargs"),
            "lr_scheduler_type warmup_stable_decay needs lr_scheduler_kwargs: {num_decay_steps: ...}",
        )


def _evaluation(cfg: RunConfig) -> Iterator[Finding]:
    train, given = cfg.train, cfg.given
    sources = bool(cfg.data.eval_dataset or (cfg.data.val_size and cfg.stage != "grpo"))
    if (train.eval_strategy != "no" or train.do_eval) and not sources:
        key = "eval_strategy" if train.eval_strategy != "no" else "do_eval"
        yield (
            (key, "eval_dataset", "val_size"),
            f"{key} asks for evaluation, but there is no eval_dataset" + (" and no val_size" if cfg.stage != "grpo" else ""),
        )
    if "eval_steps" in given and "eval_strategy" not in given:
        yield ("eval_steps", "eval_strategy"), "eval_steps is given, but eval_strategy is no by default: write eval_strategy: steps"
    metric = "accuracy" if cfg.stage == "grpo" else "loss"
    if train.metric_for_best_model not in (None, metric, f"eval_{metric}"):
        yield (
            ("metric_for_best_model", "stage"),
            f"metric_for_best_model: {train.metric_for_best_model} is not in this version for stage {cfg.stage}; write {metric}",
        )
    if train.greater_is_better not in (None, metric == "accuracy"):
        best = "highest" if metric == "accuracy" else "lowest"
        yield ("greater_is_better", "stage"), f"greater_is_better: the best {metric} is the {best}; leave it out"
    if train.stop_value is not None and train.eval_strategy == "no":
        yield ("stop_value", "eval_strategy"), "stop_value needs evaluations during the run: write eval_strategy: steps"
    if train.stop_metric and train.stop_value is None:
        yield ("stop_metric", "stop_value"), f"stop_metric: {train.stop_metric} needs stop_value"
    if train.stop_metric and not train.stop_metric.startswith("eval_"):
        yield ("stop_metric",), f"stop_metric: {train.stop_metric} is no evaluation metric; write eval_{train.stop_metric}"
    if train.stop_metric == "eval_accuracy" and cfg.stage == "pt":
        yield ("stop_metric", "stage"), "stop_metric: eval_accuracy needs replies, and stage pt writes none; write eval_loss"
    elif train.stop_metric == "eval_accuracy" and cfg.stage == "dpo":
        yield ("stop_metric", "stage"), "stop_metric: eval_accuracy is of scored replies; stage dpo has eval_rewards/accuracies"
    elif train.stop_metric == "eval_accuracy" and not cfg.rewards.rewards:
        yield ("stop_metric", "rewards"), "stop_metric: eval_accuracy needs rewards to score replies with"
    if not train.do_train:
        yield ("do_train",), "do_train: false leaves nothing to do for train; use rlmca-cli eval"
    if train.load_best_model_at_end:
        every = train.eval_steps or train.logging_steps
        if train.eval_strategy == "no" or train.eval_strategy != train.save_strategy:
            yield (
                ("load_best_model_at_end", "eval_strategy", "save_strategy"),
                f"load_best_model_at_end: every evaluation needs its checkpoint, but eval_strategy is {train.eval_strategy} "
                f"and save_strategy is {train.save_strategy}: write the same for both",
            )
        elif train.eval_strategy == "steps" and train.save_steps % every:
            yield (
                ("load_best_model_at_end", "save_steps", "eval_steps", "logging_steps"),
                f"load_best_model_at_end: save_steps {train.save_steps} is not a multiple of eval_steps {every}",
            )


def _stage(cfg: RunConfig) -> Iterator[Finding]:
    given = cfg.given
    if cfg.stage != "grpo":
        for name in GRPO_ONLY:
            if name in given and not (name == "ref_model" and cfg.stage == "dpo"):
                yield ("stage", name), f"{name} belongs to stage grpo, and stage is {cfg.stage}: leave it out"
        return
    for name, reason in GRPO_REFUSES.items():
        if name in given:
            yield ("stage", name), f"{name}: {reason}"
    if not cfg.generation.do_sample:
        yield ("stage", "do_sample"), "do_sample: false gives every prompt equal replies; stage grpo samples: leave it out"
    yield from rl_checks.findings(cfg)


def _megatron(cfg: RunConfig) -> Iterator[Finding]:
    m = cfg.megatron
    if m.sequence_parallel and m.tensor_model_parallel_size == 1:
        yield (
            ("sequence_parallel", "tensor_model_parallel_size"),
            "sequence_parallel: true splits sequences over tensor ranks and needs tensor_model_parallel_size above 1",
        )
    layout, virtual = m.pipeline_model_parallel_layout, m.virtual_pipeline_model_parallel_size
    accounts = [k for k in ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split") if getattr(m, k)]
    if layout is not None and accounts:
        yield (
            ("pipeline_model_parallel_layout", *accounts),
            f"pipeline_model_parallel_layout says where everything is: leave out {accounts[0]}",
        )
    if layout is not None and len(layout_chunks(layout)) % m.pipeline_model_parallel_size:
        yield (
            ("pipeline_model_parallel_layout", "pipeline_model_parallel_size"),
            f"pipeline_model_parallel_layout has {len(layout_chunks(layout))} chunks, which is no multiple of "
            f"pipeline_model_parallel_size {m.pipeline_model_parallel_size}",
        )
    elif layout is not None and virtual is not None and virtual != virtual_stages(cfg):
        yield (
            ("pipeline_model_parallel_layout", "virtual_pipeline_model_parallel_size"),
            f"pipeline_model_parallel_layout has {virtual_stages(cfg)} chunks a stage, virtual_pipeline_model_parallel_size is {virtual}",
        )
    if (virtual or 1) > 1 and m.pipeline_model_parallel_size == 1:
        yield (
            ("virtual_pipeline_model_parallel_size", "pipeline_model_parallel_size"),
            "virtual_pipeline_model_parallel_size needs pipeline_model_parallel_size above 1",
        )
    if m.context_parallel_size == 1 and "cp_comm_type" in cfg.given and m.cp_comm_type != "all_gather":
        yield ("context_parallel_size", "cp_comm_type"), f"cp_comm_type: {m.cp_comm_type} needs context_parallel_size above 1"
    if m.overlap_param_gather and not (m.use_distributed_optimizer and m.overlap_grad_reduce):
        yield (
            ("overlap_param_gather", "use_distributed_optimizer", "overlap_grad_reduce"),
            "overlap_param_gather: true needs use_distributed_optimizer: true and overlap_grad_reduce: true",
        )
    if not m.masked_softmax_fusion and m.transformer_impl == "transformer_engine":
        yield (
            ("masked_softmax_fusion", "transformer_impl"),
            "masked_softmax_fusion: false is for torch's attention, and Transformer Engine's is always fused; "
            "write transformer_impl: local, or leave masked_softmax_fusion out",
        )
    how = ("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules")
    if m.recompute_granularity == "full":
        if m.recompute_method is None or m.recompute_num_layers is None:
            yield how, "recompute_granularity: full needs recompute_method (uniform or block) and recompute_num_layers"
        if m.recompute_modules is not None:
            yield how, "recompute_modules belongs to recompute_granularity: selective; full recomputes whole layers"
    elif m.recompute_granularity == "selective":
        if m.recompute_method is not None or m.recompute_num_layers is not None:
            yield how, "recompute_granularity: selective takes recompute_modules, not recompute_method or recompute_num_layers"
        if m.recompute_modules == []:
            yield how, "recompute_modules is empty, so nothing is recomputed; name a part, or leave it out for core_attn"
    else:
        named = [k for k in how[1:] if getattr(m, k) is not None]
        if named:
            yield how, f"{', '.join(named)} needs recompute_granularity: full or selective"


def _additional_configs(cfg: RunConfig) -> Iterator[Finding]:
    for name, value in cfg.megatron.additional_configs.items():
        foreign = FOREIGN.get(name)
        if name in keys() or name in ALIASES:
            yield ("additional_configs",), f"additional_configs.{name} is a key of its own: write {name} at the top level"
        elif foreign is not None and foreign.kind == "refused" and not foreign.elsewhere and not foreign.accepts(value):
            yield ("additional_configs",), f"additional_configs.{foreign.sentence(value)}"
