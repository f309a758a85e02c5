"""What a run trains, from config.json and the adapters' own files: whether it fits the model, and how much it is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rlmca.config import RunConfig
from rlmca.engines.finetuning_setup import adapter_folders, freeze_options, lora_options
from rlmca.engines.freeze import trained_of
from rlmca.layouts import ModelLayout
from rlmca.layouts.adapters import AdapterLayout, UnknownTarget
from rlmca.transfer.hf_folder import HFFolderError
from rlmca.transfer.peft import AdapterFolder


def finetuning_errors(cfg: RunConfig, hf_config: Mapping[str, Any] | None) -> list[str]:
    """Adapters that cannot be read or do not fit, and names in lora_target and freeze_… that the model does not have.

    A model that only Transformers knows is looked at when it is built.
    """
    errors: list[str] = []
    for folder in adapter_folders(cfg):
        try:
            with AdapterFolder(folder) as adapter:
                if (layout := _layout(hf_config)) is not None:
                    adapter.check(AdapterLayout(layout, adapter.adapter.targets, adapter.adapter.rank))
        except UnknownTarget as error:
            errors.append(f"adapter_name_or_path: {folder} has another model's layers; {error}")
        except HFFolderError as error:
            errors.append(str(error))
    if not errors and (layout := _layout(hf_config)) is not None:
        try:
            trained_elements(cfg, layout)
        except ValueError as error:
            errors.append(str(error))
    return errors


def trained_elements(cfg: RunConfig, layout: ModelLayout) -> int:
    """Numbers that the run trains. ValueError for names that the model does not have."""
    shapes = layout.hf_tensors()
    if (lora := lora_options(cfg)) is not None:
        shapes = AdapterLayout(layout, lora.targets, lora.rank).hf_tensors()
    elif (part := freeze_options(cfg)) is not None:
        names = trained_of(layout, part)
        shapes = {name: shape for name, shape in shapes.items() if name in names}
    return sum(math.prod(shape) for shape in shapes.values())


def _layout(hf_config: Mapping[str, Any] | None) -> ModelLayout | None:
    """None where the family, or a field of its configuration, is not one of those here."""
    try:
        return None if hf_config is None else ModelLayout(hf_config)
    except ValueError:
        return None
