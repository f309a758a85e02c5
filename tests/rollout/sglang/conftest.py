"""One real SGLang server a session, with a tiny model in float32; every test finds it with the start weights, version 0."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from rlmca.config import Environment, RunConfig, make_config
from rlmca.config.sglang import SyncOptions
from rlmca.rollout.sglang.engine import SglangEngine
from rlmca.rollout.sglang.setup import sglang_engine
from tests.helpers.models import make_model


def run_config(**changes: object) -> RunConfig:
    values = {"model_name_or_path": "m", "dataset": "d", "output_dir": "o", "stage": "grpo", "rewards": "exact"}
    return make_config({**values, "rollout_engine": "sglang", "use_cpu": True, **changes}, env=Environment(use_mca=True))


def named_weights(model: PreTrainedModel) -> list[tuple[str, torch.Tensor]]:
    """Every parameter once: a tied head is not named."""
    return [(name, parameter.detach()) for name, parameter in model.named_parameters()]


@pytest.fixture(scope="session")
def start_model() -> PreTrainedModel:
    return make_model("qwen3_tied")


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory, start_model: PreTrainedModel) -> Path:
    folder = tmp_path_factory.mktemp("sglang") / "model"
    start_model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def running(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangEngine]:
    """Fails, and says `make venv`, where SGLang's environment is missing."""
    with sglang_engine(run_config(), model_folder, dtype=torch.float32, log_dir=tmp_path_factory.mktemp("logs")) as engine:
        assert engine.version == 0
        yield engine


@pytest.fixture
def engine(running: SglangEngine, start_model: PreTrainedModel) -> Iterator[SglangEngine]:
    running.sync, running.in_flight, running.timeout = SyncOptions(), 256, 120.0
    if running.version != 0:
        running.update_weights(named_weights(start_model), 0)
    yield running
    assert running.servers[0].alive, "the test ended the server of all tests"
