"""The sections of a configuration and the index from a flat key to its section."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlmca.config.data import DataConfig
from rlmca.config.environment import Environment
from rlmca.config.export import ExportConfig
from rlmca.config.fields import Rule, option
from rlmca.config.finetuning import FinetuningConfig
from rlmca.config.gathering import GatheringConfig
from rlmca.config.generation import GenerationConfig
from rlmca.config.huggingface import HuggingFaceConfig
from rlmca.config.megatron import MegatronConfig
from rlmca.config.model import ModelConfig
from rlmca.config.preference import PreferenceConfig
from rlmca.config.processes import ProcessesConfig
from rlmca.config.rewards import RewardsConfig
from rlmca.config.rl import RLConfig
from rlmca.config.rollout import RolloutConfig
from rlmca.config.tracking import TrackingConfig
from rlmca.config.train import TrainConfig

ROW_STAGES = ("pt", "sft")
"""Stages that train on single rows of a data set."""
_STAGES_LATER = ("rm", "ppo", "kto")
_LOSSES = {name: f"stage {name}: write stage: dpo and pref_loss: {name}" for name in ("orpo", "simpo")}


@dataclass(frozen=True)
class StageConfig:
    """What kind of training it is."""

    stage: str = option(
        "sft",
        "Kind of training: pt (plain texts), sft (conversations), dpo (pairs of a better and a worse reply) or grpo "
        "(reinforcement learning).",
        choices=("pt", "sft", "dpo", "grpo"),
        refused={name: f"stage {name}: not in this version; write pt, sft, dpo or grpo" for name in _STAGES_LATER} | _LOSSES,
    )


@dataclass(frozen=True)
class RunConfig:
    """A checked configuration. A flat YAML key is a field of exactly one section.

    `engine` is megatron with USE_MCA=1, else huggingface for training; commands that need no training engine then have none.
    `ray_ranks` is the number of Ray actors that hold the models; None: the processes that execute the loop hold them.
    `given` holds the keys that the file and the overrides set, `notes` one sentence per key without effect.
    """

    stage: str = "sft"
    engine: str = "megatron"
    ray_ranks: int | None = field(default=None, compare=False)
    env: Environment = field(default_factory=Environment)
    model: ModelConfig = field(default_factory=ModelConfig)
    finetuning: FinetuningConfig = field(default_factory=FinetuningConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    megatron: MegatronConfig = field(default_factory=MegatronConfig)
    huggingface: HuggingFaceConfig = field(default_factory=HuggingFaceConfig)
    generation: GenerationConfig = field(default_factory=GenerationConfig)
    preference: PreferenceConfig = field(default_factory=PreferenceConfig)
    rl: RLConfig = field(default_factory=RLConfig)
    gathering: GatheringConfig = field(default_factory=GatheringConfig)
    rewards: RewardsConfig = field(default_factory=RewardsConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    processes: ProcessesConfig = field(default_factory=ProcessesConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    given: frozenset[str] = field(default=frozenset(), compare=False)
    notes: tuple[str, ...] = field(default=(), compare=False)


SECTIONS: Mapping[str, type] = {
    "model": ModelConfig,
    "finetuning": FinetuningConfig,
    "data": DataConfig,
    "train": TrainConfig,
    "megatron": MegatronConfig,
    "huggingface": HuggingFaceConfig,
    "generation": GenerationConfig,
    "preference": PreferenceConfig,
    "rl": RLConfig,
    "gathering": GatheringConfig,
    "rewards": RewardsConfig,
    "rollout": RolloutConfig,
    "tracking": TrackingConfig,
    "processes": ProcessesConfig,
    "export": ExportConfig,
}


@dataclass(frozen=True)
class Key:
    """One honoured key: its section, type, default and rule."""

    name: str
    section: str
    type: Any
    default: Any
    rule: Rule


@functools.cache
def keys() -> Mapping[str, Key]:
    """Every honoured key by name, in the order of the sections."""
    found: dict[str, Key] = {}
    for section, cls in {"stage": StageConfig, **SECTIONS}.items():
        hints = typing.get_type_hints(cls)
        fresh = cls()
        for f in dataclasses.fields(cls):
            default = getattr(fresh, f.name)
            assert f.name not in found, f"{f.name} is in two sections"
            found[f.name] = Key(f.name, section, hints[f.name], default, f.metadata["rule"])
    return found
