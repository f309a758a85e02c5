"""The configuration of a run: schema, reading, checks and arithmetic, without torch."""

from __future__ import annotations

from rlmca.config.arithmetic import BatchPlan, batch_plan, layout_chunks, layout_errors, model_parallel_size, virtual_stages
from rlmca.config.data import DataConfig
from rlmca.config.describe import describe
from rlmca.config.dump import to_yaml
from rlmca.config.environment import Environment
from rlmca.config.errors import ConfigError, LateError
from rlmca.config.export import ExportConfig
from rlmca.config.foreign import ALIASES, FOREIGN, Foreign
from rlmca.config.generation import GenerationConfig
from rlmca.config.huggingface import HuggingFaceConfig
from rlmca.config.load import load_config, make_config
from rlmca.config.megatron import MegatronConfig
from rlmca.config.model import ModelConfig
from rlmca.config.preference import PreferenceConfig
from rlmca.config.rewards import RewardsConfig, RewardSpec
from rlmca.config.rl import RLConfig
from rlmca.config.rollout import RolloutConfig
from rlmca.config.schema import Key, RunConfig, keys
from rlmca.config.train import TrainConfig

__all__ = [
    "ALIASES",
    "FOREIGN",
    "BatchPlan",
    "ConfigError",
    "DataConfig",
    "Environment",
    "ExportConfig",
    "Foreign",
    "GenerationConfig",
    "HuggingFaceConfig",
    "Key",
    "LateError",
    "MegatronConfig",
    "ModelConfig",
    "PreferenceConfig",
    "RLConfig",
    "RewardSpec",
    "RewardsConfig",
    "RolloutConfig",
    "RunConfig",
    "TrainConfig",
    "batch_plan",
    "describe",
    "keys",
    "layout_chunks",
    "layout_errors",
    "load_config",
    "make_config",
    "model_parallel_size",
    "to_yaml",
    "virtual_stages",
]
