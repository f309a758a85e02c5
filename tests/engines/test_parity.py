"""Loss, gradients and log-probs of every layout against Transformers in fp32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.engine import Layout, assert_same_numbers, gradients_on_rank, hf_reference, random_batch
from tests.helpers.models import FAMILIES, make_model, save_model
from tests.helpers.ranks import rank_pool

LAYOUTS = [
    Layout("tp1_whole", micro_batch=8),
    Layout("tp1_split2", micro_batch=4),
    Layout("tp1_split4", micro_batch=2),
    Layout("tp1_uneven", micro_batch=3),
    Layout("tp1_fused", options={"bias_activation_fusion": True}),
    Layout("tp1_recompute", options={"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}),
    Layout("tp1_packed", packing=True, micro_batch=3),
    Layout("tp1_packed_tokens", packing=True, max_tokens=20),
    Layout("tp1_padded_tokens", max_tokens=24),
    Layout("tp2_sp_packed", tp=2, sp=True, packing=True, max_tokens=20),
    Layout("pp2_packed", pp=2, packing=True, max_tokens=20),
    Layout("dp2_packed", dp=2, packing=True, max_tokens=20),
    Layout("dp2_padded_tokens", dp=2, max_tokens=20),
    Layout("cp2_packed", cp=2, packing=True, micro_batch=4),
    Layout("cp2_a2a_packed", cp=2, packing=True, max_tokens=24, options={"cp_comm_type": "a2a"}),
    Layout("tp2_sp_cp2_packed", tp=2, cp=2, sp=True, packing=True, max_tokens=30),
    Layout("pp2_cp2_packed", pp=2, cp=2, packing=True, max_tokens=30),
    Layout("tp2", tp=2),
    Layout("tp2_sp", tp=2, sp=True),
    Layout("tp2_sp_recompute", tp=2, sp=True, options={"recompute_granularity": "selective"}),
    Layout("pp2", pp=2),
    Layout("pp2_one_microbatch", pp=2, micro_batch=8),
    Layout("dp2", dp=2),
    Layout("dp2_overlap", dp=2, data_parallel={"overlap_grad_reduce": True, "overlap_param_gather": True}),
    Layout("dp2_replicated_optimizer", dp=2, data_parallel={"use_distributed_optimizer": False}),
    Layout("cp2", cp=2),
    Layout("cp2_a2a", cp=2, options={"cp_comm_type": "a2a"}),
    Layout("cp2_recompute", cp=2, options={"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}),
    Layout("tp2_sp_cp2", tp=2, cp=2, sp=True),
    Layout("pp2_cp2", pp=2, cp=2),
    Layout("cp2_dp2", cp=2, dp=2, micro_batch=1),
    Layout("cp4", cp=4),
    Layout("cp4_a2a", cp=4, options={"cp_comm_type": "a2a"}),
    Layout("tp2_pp2", tp=2, pp=2),
    Layout("tp2_sp_pp2", tp=2, sp=True, pp=2),
    Layout("tp2_dp2", tp=2, dp=2, micro_batch=1),
    Layout("pp2_dp2", pp=2, dp=2, micro_batch=1),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: save_model(name, tmp_path_factory.mktemp(name)) for name in FAMILIES}


@pytest.fixture(scope="module")
def references() -> dict[tuple[str, int], dict[str, Any]]:
    return {(name, rows): hf_reference(make_model(name), random_batch(rows=rows)) for name in FAMILIES for rows in (8, 7)}


SIMPLE = (
    "tp1_whole", "tp1_split2", "tp1_uneven", "tp1_fused", "tp1_recompute", "tp2", "tp2_sp", "pp2", "dp2", "tp1_packed", "tp2_sp_packed",
)  # fmt: skip
"""Layouts that one family runs in."""
OF_ALL = ("tp1_uneven", "tp2_sp", "pp2", "tp2_sp_packed")
"""Those of every family; `tests/invariance` has the others in float64."""
FURTHER = ("tp1_packed_tokens", "tp1_padded_tokens", "dp2_padded_tokens", "dp2_packed", "dp2_overlap", "cp2", "cp2_a2a_packed", "cp4")
"""Those that one family runs in besides; the others are left to the whole sweep and to `tests/invariance`."""


WINDOWED = ("tp1_split2", "tp2_sp", "pp2", "tp1_packed", "tp2_sp_packed", "cp2", "cp2_packed", "cp2_a2a_packed")
"""Those of mistral, whose tokens see a few others alone."""


def in_ci(layout: Layout, family: str) -> bool:
    if family == "mistral":
        return layout.name in WINDOWED
    return layout.name in OF_ALL or (family == "qwen3_tied" and layout.name in (*SIMPLE, *FURTHER))


CASES = [
    pytest.param(layout, family, id=f"{layout.name}-{family}", marks=[] if in_ci(layout, family) else pytest.mark.whole)
    for layout in LAYOUTS
    for family in FAMILIES
]


@pytest.mark.cases(8)
@pytest.mark.serial
@pytest.mark.parametrize(("layout", "family"), CASES)
def test_loss_gradients_and_log_probs_equal_transformers(
    layout: Layout, family: str, models: dict[str, Path], references: dict[tuple[str, int], dict[str, Any]]
) -> None:
    rows = 7 if layout.dp > 1 else 8  # unequal shares: one rank has a row less
    ours = rank_pool(layout.world).run(gradients_on_rank, models[family], layout, random_batch(rows=rows))[0]
    theirs = references[family, rows]
    assert_same_numbers(ours, theirs)
    for name, expected in theirs["gradients"].items():
        assert expected.abs().max() > 1e-4, f"{name}: a gradient of zero would prove nothing"
