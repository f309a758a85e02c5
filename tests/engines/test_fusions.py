"""Fused and unfused kernels and every kind of recompute: the same loss, gradients and log-probs as Transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.engine import Layout, assert_same_numbers, gradients_on_rank, hf_reference, random_batch
from tests.helpers.models import make_model, save_model
from tests.helpers.ranks import rank_pool

pytestmark = pytest.mark.serial
LAYERS = 4
TIED, UNTIED = "qwen3_tied", "qwen2"


def full(method: str, number: int) -> dict[str, Any]:
    return {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": number}


def selective(*modules: str) -> dict[str, Any]:
    return {"recompute_granularity": "selective", "recompute_modules": list(modules)}


BIASES = {"bias_dropout_fusion": True, "bias_activation_fusion": True}
SCORES = {"masked_softmax_fusion": False}
LOGITS = {"cross_entropy_loss_fusion": False}
EVERY_PART = selective("core_attn", "layernorm", "mlp")
LAYOUTS = [
    Layout("bias_dropout", options={"bias_dropout_fusion": True}),
    Layout("tp2_sp_biases", tp=2, sp=True, options=BIASES),
    Layout("scores", options=SCORES),
    Layout("cp2_scores", cp=2, options=SCORES),
    Layout("cp2_a2a_scores", cp=2, options={**SCORES, "cp_comm_type": "a2a"}),
    Layout("logits", options=LOGITS),
    Layout("tp2_logits", tp=2, options=LOGITS),
    Layout("tp2_sp_logits", tp=2, sp=True, options=LOGITS),
    Layout("pp2_logits", pp=2, options=LOGITS),
    Layout("dp2_logits_overlap", dp=2, options=LOGITS, data_parallel={"overlap_grad_reduce": True, "overlap_param_gather": True}),
    Layout("tp2_pp2_logits", tp=2, pp=2, options=LOGITS),
    Layout("uniform2", options=full("uniform", 2)),
    Layout("uniform4", options=full("uniform", 4)),
    Layout("block1", options=full("block", 1)),
    Layout("block4", options=full("block", 4)),
    Layout("core_attention", options=selective("core_attn")),
    Layout("norms", options=selective("layernorm")),
    Layout("mlp", options=selective("mlp")),
    Layout("tp2_sp_every_part", tp=2, sp=True, options=EVERY_PART),
    Layout("tp2_sp_uniform2", tp=2, sp=True, options=full("uniform", 2)),
    Layout("tp2_sp_block3", tp=2, sp=True, options=full("block", 3)),
    Layout("pp2_uniform2", pp=2, options=full("uniform", 2)),
    Layout("pp2_block1", pp=2, options=full("block", 1)),
    Layout("pp2_uneven_block3", pp=2, options=full("block", 3), pipeline={"layout": "Ettt|tL"}),
    Layout("pp2_head_alone_uniform2", pp=2, options=full("uniform", 2), pipeline={"layout": "Et*4|L"}),
    Layout("pp2_vpp2_uniform1", pp=2, vpp=2, options=full("uniform", 1)),
    Layout("pp2_vpp2_every_part", pp=2, vpp=2, options=EVERY_PART),
    Layout("pp2_vpp2_uneven_block1", pp=2, vpp=2, options=full("block", 1), pipeline={"layout": "E|tt|t|tL"}),
    Layout("everything", options={**BIASES, **SCORES, **LOGITS, **EVERY_PART}),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: save_model(name, tmp_path_factory.mktemp(name), num_hidden_layers=LAYERS) for name in (TIED, UNTIED)}


@pytest.fixture(scope="module")
def references() -> dict[tuple[str, int], dict[str, Any]]:
    return {
        (name, rows): hf_reference(make_model(name, num_hidden_layers=LAYERS), random_batch(rows=rows))
        for name in (TIED, UNTIED)
        for rows in (8, 7)
    }


IN_CI = {
    TIED: ("bias_dropout", "tp2_sp_biases", "scores", "cp2_a2a_scores", "tp2_logits", "dp2_logits_overlap", "uniform2", "block1",
           "tp2_sp_every_part", "pp2_uneven_block3", "pp2_vpp2_every_part", "everything"),
    UNTIED: ("logits", "tp2_logits"),
}  # fmt: skip
CASES = [
    pytest.param(layout, family, id=f"{layout.name}-{family}", marks=[] if layout.name in IN_CI[family] else pytest.mark.whole)
    for layout in LAYOUTS
    for family in (TIED, UNTIED)
]


@pytest.mark.parametrize(("layout", "family"), CASES)
def test_kernels_and_recompute_change_no_number(
    layout: Layout, family: str, models: dict[str, Path], references: dict[tuple[str, int], dict[str, Any]]
) -> None:
    rows = 7 if layout.dp > 1 else 8
    ours = rank_pool(layout.world).run(gradients_on_rank, models[family], layout, random_batch(rows=rows))[0]
    theirs = references[family, rows]
    assert_same_numbers(ours, theirs)
