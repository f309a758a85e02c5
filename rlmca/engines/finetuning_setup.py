"""From a run's configuration to what is trained: adapters, some of the layers, or (None) all weights."""

from __future__ import annotations

from pathlib import Path

from rlmca.config import RunConfig
from rlmca.models.options import FreezeOptions, LoraOptions
from rlmca.transfer.peft import read_adapter_config


def lora_options(cfg: RunConfig) -> LoraOptions | None:
    """The adapters that a run trains; an adapter that is trained further says its own rank, alpha and layers.

    Raises HFFolderError when a folder of adapter_name_or_path is no adapter.
    """
    own = cfg.finetuning
    if not own.lora:
        return None
    folders = adapter_folders(cfg)
    if folders and not own.create_new_adapter:
        start = read_adapter_config(folders[-1])
        return LoraOptions(
            rank=start.rank,
            alpha=start.alpha,
            dropout=own.lora_dropout,
            targets=start.targets,
            rslora=start.rslora,
            seed=cfg.train.seed,
            start=folders[-1],
            keep_start=cfg.stage == "grpo" and cfg.rl.kl_coef > 0 and cfg.model.ref_model is None,
            merged=tuple(folders[:-1]),
        )
    return LoraOptions(
        rank=own.lora_rank,
        alpha=float(2 * own.lora_rank if own.lora_alpha is None else own.lora_alpha),
        dropout=own.lora_dropout,
        targets=tuple(own.lora_target),
        rslora=own.use_rslora,
        seed=cfg.train.seed,
        merged=tuple(folders),
    )


def freeze_options(cfg: RunConfig) -> FreezeOptions | None:
    """Which layers a run trains, when not all of them."""
    own = cfg.finetuning
    if own.finetuning_type != "freeze":
        return None
    return FreezeOptions(own.freeze_trainable_layers, tuple(own.freeze_trainable_modules), tuple(own.freeze_extra_modules))


def adapter_folders(cfg: RunConfig) -> list[Path]:
    """The folders of adapter_name_or_path, whole: ranks need not work in the folder of this process."""
    return [Path(name).expanduser().resolve() for name in cfg.finetuning.adapter_name_or_path]
