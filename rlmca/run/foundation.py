"""What a run trains and what that stands on: said once when the run starts, kept in its checkpoints, the same when it resumes.

The adapters that a run starts from are read here and when its ranks are built, and never again: they may be moved meanwhile.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from rlmca.config import RunConfig
from rlmca.engines.finetuning_setup import lora_options
from rlmca.layouts import ModelLayout
from rlmca.layouts.adapters import AdapterLayout
from rlmca.models.options import LoraOptions
from rlmca.transfer.hf_folder import HFFolder, open_hf_folder, read_config
from rlmca.transfer.peft import AdapterFolder
from rlmca.transfer.peft_limits import peft_limit
from rlmca.transfer.source import resolve_model

_SAMPLED_TENSORS, _SAMPLED_VALUES = 1000, 512
"""How much of a model is read to tell it from another one: the beginnings of so many tensors."""


@dataclass(frozen=True)
class Foundation:
    """`trained` in words; `stands_on` {what: digest} of the weights that an adapter says nothing without; `notes` for its user."""

    trained: str
    stands_on: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def changed(self, before: Mapping[str, Any]) -> list[str]:
        """What differs from the `stands_on` of a checkpoint; nothing where that says nothing."""
        return [name for name in {**before, **self.stands_on} if before.get(name) != self.stands_on.get(name)] if before else []


def foundation(cfg: RunConfig) -> Foundation:
    """What the configuration trains. Raises HFFolderError for a model or an adapter that cannot be read."""
    own = cfg.finetuning
    if (lora := lora_options(cfg)) is not None:
        scale = "sqrt(rank)" if lora.rslora else "rank"
        words = f"an adapter of rank {lora.rank}, alpha {lora.alpha:g} / {scale}, beside {', '.join(lora.targets)}"
        folder = resolve_model(cfg.model.model_name_or_path, cfg.model)
        return Foundation(words, _stands_on(folder, lora), tuple(_notes(cfg, folder, lora)))
    if own.finetuning_type == "freeze":
        extra = f" and {', '.join(own.freeze_extra_modules)}" if own.freeze_extra_modules else ""
        return Foundation(f"{', '.join(own.freeze_trainable_modules)} of {own.freeze_trainable_layers} layers{extra}")
    return Foundation("all weights")


def weights_digest(folder: Path, adapters: Sequence[Path] = ()) -> str:
    """Tells the model in a folder, with the adapters that are added to it, from others."""
    return " ".join([_sampled(folder), *map(_digest, adapters)])


def _stands_on(folder: Path, lora: LoraOptions) -> dict[str, str]:
    found = {"the model of model_name_or_path": _sampled(folder)}
    if lora.merged:
        found["the merged adapters of adapter_name_or_path"] = " ".join(map(_digest, lora.merged))
    if lora.keep_start and lora.start is not None:
        found["the last adapter of adapter_name_or_path, which is the KL's reference"] = _digest(lora.start)
    return found


def _notes(cfg: RunConfig, folder: Path, lora: LoraOptions) -> list[str]:
    notes = []
    if lora.merged:
        notes.append(
            f"the adapter stands on {cfg.model.model_name_or_path} with other adapters merged into it and is wrong without them: "
            f"use it with adapter_name_or_path: [{', '.join(map(str, lora.merged))}, this folder]"
        )
    try:
        limit = peft_limit(AdapterLayout(ModelLayout(read_config(folder)), lora.targets, lora.rank))
    except ValueError:  # a family that only Transformers knows, or targets that the engine refuses when it is built
        limit = None
    if limit is not None:
        notes.append(f"{limit}; adapter_name_or_path and output_dir/hf have all of it")
    return notes


def _digest(path: Path) -> str:
    """Of all that an adapter says."""
    found = hashlib.sha256()
    with AdapterFolder(path) as adapter:
        found.update(repr((adapter.adapter.rank, adapter.adapter.scaling)).encode())
        for name in sorted(adapter.shapes):
            _add(found, adapter, name, sampled=False)
    return found.hexdigest()


def _sampled(path: Path) -> str:
    """Of names, shapes, types and some of the values of a model."""
    found = hashlib.sha256()
    with open_hf_folder(path) as model:
        names = sorted(model.shapes)
        found.update(repr([(name, model.shapes[name], str(model.dtypes[name])) for name in names]).encode())
        for name in names[:: -(-len(names) // _SAMPLED_TENSORS)]:
            _add(found, model, name, sampled=True)
    return found.hexdigest()


def _add(digest: Any, folder: HFFolder, name: str, *, sampled: bool) -> None:
    shape = folder.shapes[name]
    box = (*((0, 1) for _ in shape[:-1]), *((0, min(n, _SAMPLED_VALUES)) for n in shape[-1:])) if sampled and shape else None
    value = folder.read(name, box).contiguous()
    digest.update(repr((name, shape, str(folder.dtypes[name]))).encode())
    digest.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
