"""Auxiliary losses of routers, against Transformers' router logits: one weight however a batch is split."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.engine import Layout, loss_and_gradients, make_engine, random_batch
from tests.helpers.models import make_model, save_model
from tests.helpers.ranks import rank_pool
from tests.helpers.router_losses import reference

pytestmark = pytest.mark.serial
WEIGHT, Z_WEIGHT = 0.5, 0.1
SEQ: dict[str, Any] = {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": WEIGHT}
Z: dict[str, Any] = {"moe_z_loss_coeff": Z_WEIGHT}
BOTH = SEQ | Z
BATCH: dict[str, Any] = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": WEIGHT}
ALLTOALL = {"moe_token_dispatcher_type": "alltoall"}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
BLOCK = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}
PARTS = {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "layernorm", "mlp"]}
LAYOUTS = [
    Layout("one", micro_batch=8, options=BOTH),
    Layout("rows_of_three", micro_batch=3, options=BOTH | FULL),
    Layout("block", micro_batch=3, options=BOTH | BLOCK),
    Layout("packed", packing=True, max_tokens=20, options=BOTH | PARTS),
    Layout("dp2_ep2", dp=2, ep=2, options=BOTH | ALLTOALL),
    Layout("tp2_sp_etp1_packed", tp=2, sp=True, etp=1, packing=True, max_tokens=20, options=BOTH | FULL),
    Layout("cp2_packed", cp=2, packing=True, max_tokens=20, options=BOTH),
    Layout("cp2_a2a_ep2", cp=2, ep=2, options=BOTH | {"cp_comm_type": "a2a"}),
    Layout("pp2_vpp2_full", pp=2, vpp=2, micro_batch=1, options=BOTH | FULL),
    Layout("pp2_vpp2_parts", pp=2, vpp=2, options=SEQ | PARTS),
    Layout("tp2_sp_pp2_ep2_packed", tp=2, sp=True, pp=2, ep=2, etp=1, packing=True, max_tokens=20, options=BOTH | ALLTOALL | FULL),
    Layout("tp2_sp_cp2_dp2", tp=2, sp=True, cp=2, dp=2, ep=2, options=BOTH),
    Layout("dp4_ep4", dp=4, ep=4, micro_batch=1, options=SEQ | ALLTOALL),
]
IN_CI = ("rows_of_three", "block", "dp2_ep2", "cp2_packed", "tp2_sp_pp2_ep2_packed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("qwen3_moe", tmp_path_factory.mktemp("qwen3_moe"))


def numbers_on_rank(folder: Path, layout: Layout, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Loss, routers' losses, gradients under HF names, log-probs; and which rows made each micro-batch here."""
    from rlmca.algorithms.losses import SftLoss
    from rlmca.engines.microbatch import micro_batches
    from rlmca.workers import SpmdGroup

    batch = random_batch()
    engine = make_engine(folder, layout)
    value, gradients = loss_and_gradients(engine, batch, SftLoss())
    metrics = engine.router_losses.metrics()
    own = engine.shares(batch)[engine.parallel.dp_rank]
    pieces = micro_batches(batch.rows(own), engine.cutting(layout.micro_batch), engine.parallel)
    group = SpmdGroup(engine, engine.parallel)
    logp_BT = group.log_probs(batch).logp_BT
    assert engine.router_losses.metrics() == metrics, "log-probs are no step"
    again = group.train_batch(batch, SftLoss(), 0.0)
    return {
        "loss": value,
        "metrics": metrics,
        "of train_batch": {name: again.get(name) for name in metrics},
        "main": again["loss"],
        "gradients": gradients if engine.parallel.rank == 0 else {},
        "logp_BT": logp_BT,
        "groups": [[own[row] for row in piece.numbers] for piece in pieces if piece.numbers],
    }


def assert_close(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert set(ours) == set(theirs)
    for name, expected in theirs.items():
        allowed = 1e-5 * max(float(expected.abs().max()), 1.0)
        torch.testing.assert_close(ours[name], expected, rtol=0, atol=allowed, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(
    "layout", [pytest.param(layout, id=layout.name, marks=[] if layout.name in IN_CI else pytest.mark.whole) for layout in LAYOUTS]
)
def test_losses_of_rows_are_the_same_in_every_layout(layout: Layout, folder: Path) -> None:
    """The mean over the rows of the batch: packing, padding, micro-batches and ranks change neither value nor gradient."""
    ours = rank_pool(layout.world).run(numbers_on_rank, folder, layout)
    z_weight = layout.options.get("moe_z_loss_coeff", 0.0)
    theirs = reference(make_model("qwen3_moe"), random_batch(), weight=WEIGHT, z_weight=z_weight)
    for rank in ours:
        assert rank["loss"] == pytest.approx(theirs["loss"], abs=1e-5)
        expected = {"seq_aux_loss": theirs["balance"]} | ({"z_loss": theirs["z"]} if z_weight else {})
        assert rank["metrics"] == pytest.approx(expected, rel=1e-5)
        assert rank["of train_batch"] == rank["metrics"] and rank["main"] == rank["loss"]
    assert_close(ours[0]["gradients"], theirs["gradients"])
    without = reference(make_model("qwen3_moe"), random_batch())
    size = max(float((tensor - without["gradients"][name]).abs().max()) for name, tensor in theirs["gradients"].items())
    assert size > 1e-2, "a loss without a gradient would prove nothing"


@pytest.mark.parametrize(
    "layout",
    [
        Layout("micro_batches", micro_batch=3, options=BATCH | FULL),
        Layout("packed_dp2", dp=2, packing=True, max_tokens=20, options=BATCH),
        pytest.param(
            Layout("tp2_sp_pp2_ep2", tp=2, sp=True, pp=2, ep=2, etp=1, micro_batch=3, options=BATCH | ALLTOALL), marks=pytest.mark.whole
        ),
        pytest.param(Layout("cp2_dp2", cp=2, dp=2, micro_batch=3, options=BATCH), marks=pytest.mark.whole),
    ],
    ids=lambda layout: layout.name,
)
def test_the_loss_of_micro_batches_is_the_mean_over_them(layout: Layout, folder: Path) -> None:
    """Those of zero weight, which only make ranks and stages agree on a number, are not among them."""
    ours = rank_pool(layout.world).run(numbers_on_rank, folder, layout)
    groups = [list(group) for group in dict.fromkeys(tuple(group) for rank in ours for group in rank["groups"])]
    assert sorted(row for group in groups for row in group) == list(range(8)) and len(groups) > 1
    theirs = reference(make_model("qwen3_moe"), random_batch(), groups=groups, weight=WEIGHT)
    assert ours[0]["metrics"] == pytest.approx({"aux_loss": theirs["balance"]}, rel=1e-5)
    assert_close(ours[0]["gradients"], theirs["gradients"])


def test_log_probs_do_not_know_of_losses(folder: Path) -> None:
    plain, balanced = (rank_pool(1).run(numbers_on_rank, folder, Layout("one", options=options))[0] for options in ({}, BOTH))
    assert torch.equal(plain["logp_BT"], balanced["logp_BT"]) and plain["loss"] == balanced["loss"] and plain["metrics"] == {}


def test_a_scaled_loss_scales_them_too(folder: Path) -> None:
    """float16: the factor is part of what all gradients are divided by, so the norm is that of float32."""
    half = Layout("half", options=BOTH | {"dtype": torch.float16}, loss_scale={"constant": 64.0})
    ours, single = (rank_pool(1).run(norm_on_rank, folder, layout)[0] for layout in (half, Layout("one", options=BOTH)))
    plain = rank_pool(1).run(norm_on_rank, folder, Layout("one"))[0]
    assert ours["grad_norm"] == pytest.approx(single["grad_norm"], rel=0.02)
    assert abs(plain["grad_norm"] / single["grad_norm"] - 1) > 0.05
    assert ours["seq_aux_loss"] == pytest.approx(single["seq_aux_loss"], rel=0.02)


def norm_on_rank(folder: Path, layout: Layout) -> dict[str, float]:
    from rlmca.algorithms.losses import SftLoss

    return make_engine(folder, layout).train_batch(random_batch(), SftLoss(), 0.0)
