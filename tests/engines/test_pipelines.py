"""Pipelines of several chunks a stage and of unequal stages against Transformers: loss, gradients, log-probs, resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.engine import Layout, assert_same_numbers, gradients_on_rank, hf_reference, random_batch
from tests.helpers.models import make_model, save_model
from tests.helpers.ranks import rank_pool
from tests.helpers.training import resume_on_rank

pytestmark = pytest.mark.serial
LAYERS = 4
LAYOUTS = [
    Layout("pp2_vpp2", pp=2, vpp=2),
    Layout("pp2_vpp2_one_microbatch", pp=2, vpp=2, micro_batch=8),
    Layout("pp2_vpp2_uneven_microbatches", pp=2, vpp=2, micro_batch=3),
    Layout("pp2_vpp2_cp2", pp=2, vpp=2, cp=2),
    Layout("pp2_vpp2_tp2_sp", pp=2, vpp=2, tp=2, sp=True),
    Layout("pp2_vpp2_dp2", pp=2, vpp=2, dp=2, micro_batch=1),
    Layout(
        "pp2_vpp2_dp2_overlap", pp=2, vpp=2, dp=2, micro_batch=1, data_parallel={"overlap_grad_reduce": True, "overlap_param_gather": True}
    ),
    Layout("pp2_uneven", pp=2, pipeline={"layout": "Ettt|tL"}),
    Layout("pp2_head_alone", pp=2, pipeline={"layout": "Et*4|L"}),
    Layout("pp2_vpp2_uneven", pp=2, vpp=2, pipeline={"layout": "E|tt|t|tL"}),
    Layout("pp3_accounts", pp=3, pipeline={"embedding_counts": True, "loss_counts": True}),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    names = ("qwen3_tied", "qwen2")
    return {name: save_model(name, tmp_path_factory.mktemp(name), num_hidden_layers=LAYERS) for name in names}


@pytest.fixture(scope="module")
def references() -> dict[tuple[str, int], dict[str, Any]]:
    found = {}
    for name in ("qwen3_tied", "qwen2"):
        for rows in (8, 7):
            found[name, rows] = hf_reference(make_model(name, num_hidden_layers=LAYERS), random_batch(rows=rows))
    return found


IN_CI = ("pp2_vpp2", "pp2_vpp2_one_microbatch", "pp2_head_alone", "pp3_accounts")
"""The others are in the table of `tests/invariance` too."""
CASES = [
    pytest.param(
        layout, family, id=f"{layout.name}-{family}", marks=[] if family == "qwen3_tied" and layout.name in IN_CI else pytest.mark.whole
    )
    for layout in LAYOUTS
    for family in ("qwen3_tied", "qwen2")
]


@pytest.mark.parametrize(("layout", "family"), CASES)
def test_chunks_change_no_number(
    layout: Layout, family: str, models: dict[str, Path], references: dict[tuple[str, int], dict[str, Any]]
) -> None:
    rows = 7 if layout.dp > 1 else 8
    ours = rank_pool(layout.world).run(gradients_on_rank, models[family], layout, random_batch(rows=rows))[0]
    theirs = references[family, rows]
    assert_same_numbers(ours, theirs)


@pytest.mark.cases(2)
@pytest.mark.parametrize("layout", [LAYOUTS[0], LAYOUTS[9], Layout("cp2", cp=2)], ids=lambda layout: layout.name)
def test_resume_is_the_run_without_a_break(layout: Layout, models: dict[str, Path], tmp_path: Path) -> None:
    found = rank_pool(layout.world).run(resume_on_rank, models["qwen3_tied"], layout, tmp_path / "checkpoint")
    for rank in found:
        assert rank["resumed"] == rank["whole"] and rank["same_weights"]
