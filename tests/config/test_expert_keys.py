"""Keys of mixtures of experts: what contradicts what, and what a model needs."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlmca.config import ConfigError, Environment, make_config
from rlmca.config.expert_checks import EXPERT_KEYS

SFT: dict[str, Any] = {"model_name_or_path": "m", "dataset": "d", "output_dir": "o"}
MCA = Environment(use_mca=True)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"moe_aux_loss_coeff": 0.01}, "0.01 weighs a loss that moe_router_load_balancing_type: none switches off; write moe_router_"),
        ({"moe_router_load_balancing_type": "seq_aux_loss"}, "seq_aux_loss needs a weight: write moe_aux_loss_coeff"),
        ({"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": -0.1}, "moe_aux_loss_coeff: -0.1 is too small"),
        ({"moe_z_loss_coeff": -1}, "moe_z_loss_coeff: -1.0 is too small"),
        ({"moe_router_load_balancing_type": "sinkhorn"}, "sinkhorn: not in this version; write seq_aux_loss, aux_loss or none"),
        ({"moe_router_dtype": "bf16"}, "moe_router_dtype: 'bf16' is not one of fp32, fp64"),
        ({"moe_expert_capacity_factor": 0}, "moe_expert_capacity_factor: 0.0 is too small"),
        ({"moe_expert_capacity_factor": -1.0}, "moe_expert_capacity_factor: -1.0 is too small"),
        ({"moe_token_drop_policy": "random"}, "moe_token_drop_policy: 'random' is not one of probs, position"),
        (
            {"moe_pad_expert_input_to_capacity": True, "moe_token_drop_policy": "position"},
            "moe_pad_expert_input_to_capacity, moe_token_drop_policy: without moe_expert_capacity_factor",
        ),
        (
            {"moe_pad_expert_input_to_capacity": True, "moe_expert_capacity_factor": 1.5},
            "true is for exchanges of a fixed size: write moe_token_dispatcher_type: alltoall",
        ),
    ],
)
def test_contradictions_are_one_error(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_config({**SFT, **values}, env=MCA)
    assert len(caught.value.errors) == 1 and words in caught.value.errors[0], caught.value.errors


@pytest.mark.parametrize(
    "values",
    [
        {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.001},
        {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 1},
        {"moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0},
        {"moe_z_loss_coeff": 0.001},
        {"moe_router_dtype": "fp64"},
        {"moe_expert_capacity_factor": 1.25, "moe_token_drop_policy": "position"},
        {"moe_expert_capacity_factor": 1.25, "moe_pad_expert_input_to_capacity": True, "moe_token_dispatcher_type": "alltoall"},
    ],
)
def test_what_goes_together_reaches_the_model(values: dict[str, Any]) -> None:
    from rlmca.engines.megatron_setup import engine_options

    build = engine_options(make_config({**SFT, **values}, env=MCA)).build
    assert {name: getattr(build, name) for name in values} == values


def test_every_key_of_experts_is_refused_on_a_dense_model(tmp_path: Path) -> None:
    from rlmca.config import keys
    from rlmca.layouts import LayoutError, ModelLayout
    from rlmca.planner.model import _check_routing
    from tests.helpers.models import make_model

    layout = ModelLayout(make_model("qwen2").config.to_dict())
    for name in EXPERT_KEYS:
        megatron = SimpleNamespace(**{key: keys()[key].default for key in EXPERT_KEYS} | {name: "something else"})
        with pytest.raises(LayoutError, match=f"^{name}: a qwen2 model has no experts; leave it out$"):
            _check_routing(SimpleNamespace(megatron=megatron), layout, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(("values", "times"), [({"moe_grouped_gemm": True}, 1), ({}, 0), ({"moe_grouped_gemm": False}, 0)])
def test_one_kernel_for_all_experts_that_is_missing_is_said_once(
    values: dict[str, Any], times: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Only where it was asked for: the default takes what there is. The reference model of a run says nothing more."""
    from rlmca.engines.setup import build_engine, end_parallel, start_parallel
    from tests.helpers.models import save_model

    folder = save_model("qwen3_moe", tmp_path)
    cfg = make_config({**SFT, "model_name_or_path": str(folder), "transformer_impl": "local", **values}, env=MCA)
    parallel = start_parallel(cfg, rank=0, world_size=1, local_rank=0)
    try:
        with caplog.at_level(logging.WARNING, logger="rlmca"):
            for trainable in (True, False):
                build_engine(cfg, folder, parallel, trainable=trainable)
    finally:
        end_parallel(cfg)
    assert sum("moe_grouped_gemm" in record.getMessage() for record in caplog.records) == times
