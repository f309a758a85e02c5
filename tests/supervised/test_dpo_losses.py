"""Losses of pairs on both engines: value, gradients and metrics against formulas written out on a Transformers model in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.core_model_loading import revert_weight_conversion

from rlmca.algorithms.losses import PreferenceLoss, PreferenceOptions
from tests.helpers.engine import Layout
from tests.helpers.huggingface import make_hf_engine
from tests.helpers.models import make_model, save_model
from tests.helpers.preferences import KINDS, loss_gradients_metrics, plain_preference, preferences_on_rank, random_pairs, with_reference
from tests.helpers.ranks import rank_pool

FAMILY = "qwen3_tied"
CASES: dict[str, dict[str, Any]] = {
    **{kind: {"kind": kind, "beta": 0.3} for kind in KINDS},
    "smoothed": {"kind": "sigmoid", "beta": 0.3, "label_smoothing": 0.2},
    "with_sft": {"kind": "sigmoid", "beta": 0.3, "ftx": 0.5},
    "simpo_margin": {"kind": "simpo", "beta": 2.0, "simpo_gamma": 1.5, "ftx": 0.1},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(FAMILY, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def batch() -> Any:
    return with_reference(random_pairs(), make_model(FAMILY, seed=1).double())


@pytest.fixture(scope="module")
def expected(batch: Any) -> dict[str, tuple[float, dict[str, torch.Tensor], dict[str, float]]]:
    """Of each case, by Transformers in float64, row by row without padding."""
    model, reference = make_model(FAMILY).double(), make_model(FAMILY, seed=1).double()
    found = {}
    for name, own in CASES.items():
        model.zero_grad()
        written = {"smoothing": own.get("label_smoothing", 0.0), "ftx": own.get("ftx", 0.0), "gamma": own.get("simpo_gamma", 0.5)}
        loss, metrics = plain_preference(model, reference, batch, own["kind"], beta=own["beta"], **written)
        loss.backward()
        gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        found[name] = (loss.item(), dict(revert_weight_conversion(model, gradients)), metrics)
    return found


def check(mine: Any, theirs: Any) -> None:
    assert abs(mine[0] - theirs[0]) < 1e-5 * max(1.0, abs(theirs[0]))
    scale = max(1.0, *(float(g.abs().max()) for g in theirs[1].values()))
    assert set(mine[1]) == set(theirs[1])
    for name, gradient in theirs[1].items():
        torch.testing.assert_close(mine[1][name].double(), gradient, rtol=0, atol=1e-5 * scale, msg=lambda m, n=name: f"{n}: {m}")
    for name, value in theirs[2].items():
        assert abs(mine[2][name] - value) < 1e-5 * max(1.0, abs(value)), name


@pytest.mark.parametrize("case", list(CASES))
def test_the_hugging_face_engine_equals_the_formula(case: str, folder: Path, batch: Any, expected: Any) -> None:
    """Whatever the micro-batches, padded or packed."""
    loss = PreferenceLoss(PreferenceOptions(**CASES[case]))
    for split in ({"micro_batch": 5}, {"micro_batch": 2}, {"micro_batch": 1, "packing": True, "max_tokens_per_microbatch": 40}):
        check(loss_gradients_metrics(make_hf_engine(folder, **split), batch, loss), expected[case])


def test_the_megatron_engine_equals_the_formula(folder: Path, batch: Any, expected: Any) -> None:
    found = preferences_on_rank(folder, Layout("tp1", micro_batch=2), batch, list(CASES.values()))
    for mine, theirs in zip(found, expected.values(), strict=True):
        check(mine, theirs)


LAYOUTS = [
    Layout("dp2", dp=2, micro_batch=1),
    Layout("tp2_sp", tp=2, sp=True, micro_batch=2),
    pytest.param(Layout("pp2", pp=2, micro_batch=2), marks=pytest.mark.whole),
    pytest.param(Layout("cp2", cp=2, micro_batch=2), marks=pytest.mark.whole),
    pytest.param(Layout("dp2_packed", dp=2, packing=True, max_tokens=40), marks=pytest.mark.whole),
]


@pytest.mark.serial
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_pairs_stay_together_on_every_layout(layout: Layout, folder: Path, batch: Any, expected: Any) -> None:
    """Five pairs on two ranks: one of them is filled up with what is no pair."""
    found = rank_pool(layout.world).run(preferences_on_rank, folder, layout, batch, [CASES["with_sft"], CASES["ipo"]])[0]
    for mine, case in zip(found, ("with_sft", "ipo"), strict=True):
        check(mine, expected[case])


def test_what_stands_at_masked_places_and_how_wide_a_batch_is_changes_nothing(folder: Path, batch: Any, expected: Any) -> None:
    B, T = batch.ids_BT.shape
    wide = batch.pad_to(B, T + 7)
    dirty = wide.replace(ref_logp_BT=torch.where(wide.mask_BT, wide.ref_logp_BT, float("nan")))
    loss = PreferenceLoss(PreferenceOptions(**CASES["sigmoid"]))
    check(loss_gradients_metrics(make_hf_engine(folder, micro_batch=2), dirty, loss), expected["sigmoid"])
