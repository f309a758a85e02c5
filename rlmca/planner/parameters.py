"""Parameters of each rank, from the model's config.json and the layout alone."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlmca.config import ConfigError, ModelConfig
from rlmca.layouts import Coord, ModelLayout, Topology
from rlmca.transfer.source import ModelNotFound, find_config


@dataclass(frozen=True)
class RankParameters:
    """Elements that one coordinate of the layout holds."""

    coord: Coord
    parameters: int


def read_hf_config(model: ModelConfig) -> dict[str, Any] | None:
    """The model's config.json, fetched alone from the hub; None where that cannot be reached. ConfigError when it is not readable."""
    name = model.model_name_or_path
    try:
        file = find_config(name, model)
        if file is None:
            return None
        config = json.loads(file.read_text(encoding="utf-8"))
    except ModelNotFound as error:
        raise ConfigError(str(error)) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"model_name_or_path: {name} has no readable config.json ({error})") from None
    if not isinstance(config, dict):
        raise ConfigError(f"model_name_or_path: {file} is not a Hugging Face configuration")
    return config


def rank_parameters(hf_config: Mapping[str, Any], topology: Topology) -> tuple[int, list[RankParameters]]:
    """(elements of the model, elements of each coordinate). ValueError when the family or the layout does not fit."""
    layout = ModelLayout(hf_config)
    layout.check(topology)
    buffers = layout.hf_buffers()
    total = sum(math.prod(shape) for name, shape in layout.hf_tensors().items() if name not in buffers)
    ranks = [
        RankParameters(coord, sum(math.prod(plan.shape) for plan in layout.rank_plan(topology, coord).values() if not plan.buffer))
        for coord in topology.coords()
    ]
    return total, ranks
