"""An adapter that is trained further is measured against the adapter that it was when the run started."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlmca.algorithms.losses import SftLoss
from rlmca.workers import SpmdGroup
from tests.helpers.engine import Layout, make_engine, random_batch
from tests.helpers.huggingface import make_hf_engine
from tests.helpers.huggingface_lora import lora_options, start_folder
from tests.helpers.lora import ALL, ALPHA, RANK
from tests.helpers.models import save_model
from tests.helpers.ranks import rank_pool
from tests.helpers.training import batches, learning_rate

pytestmark = pytest.mark.serial
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
LAYOUTS = [Layout("one"), Layout("tp2_sp", tp=2, sp=True), Layout("dp2_overlap", dp=2, data_parallel=OVERLAP)]


def adapters(engine: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in engine.adapters.parameters.items()}


def reference_after_steps(engine: Any, start: Path) -> dict[str, Any]:
    """Log-probs of the policy at its start and of the reference after four steps; weights around the reference's forward."""
    group, batch = SpmdGroup(engine, engine.parallel), random_batch()
    shutil.rmtree(start, ignore_errors=True)  # read once
    first = group.log_probs(batch, adapter="start").logp_BT, group.log_probs(batch).logp_BT
    seen = []
    for step, training in enumerate(batches(8, 4)):
        group.train_batch(training, SftLoss(), learning_rate(step + 5))
        seen.append(group.log_probs(batch, adapter="start").logp_BT)
    engine.offload()
    engine.onload()
    before = adapters(engine)
    reference = group.log_probs(batch, adapter="start").logp_BT
    same = all(torch.equal(p, before[name]) for name, p in adapters(engine).items())
    now, base = group.log_probs(batch).logp_BT, group.log_probs(batch, adapter=False).logp_BT
    return {"first": first, "seen": [*seen, reference], "same": same, "now": now, "base": base}


def on_rank(model: Path, layout: Layout, start: Path) -> dict[str, Any]:
    engine = make_engine(model, layout)
    engine.parallel.barrier()
    return reference_after_steps(engine, start)


def on_rank_of_huggingface(model: Path, start: Path) -> dict[str, Any]:
    return reference_after_steps(make_hf_engine(model, lora=lora_options(start=start, keep_start=True)), start)


def check(found: dict[str, Any]) -> None:
    reference, policy = found["first"]
    assert torch.equal(reference, policy)
    assert all(torch.equal(later, reference) for later in found["seen"]) and found["same"]
    assert (found["now"] - reference).abs().max() > 1e-2 and (found["base"] - reference).abs().max() > 1e-2


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_the_start_stays_the_reference(layout: Layout, tmp_path: Path) -> None:
    model, start = save_model("qwen3_untied", tmp_path / "model"), start_folder(tmp_path / "adapter", "qwen3_untied")
    lora = {"rank": RANK, "alpha": ALPHA, "targets": ALL, "start": start, "keep_start": True}
    for found in rank_pool(layout.world).run(on_rank, model, replace(layout, lora=lora), start):
        check(found)


def test_the_start_stays_the_reference_of_the_hugging_face_engine(tmp_path: Path) -> None:
    model, start = save_model("qwen3_untied", tmp_path / "model"), start_folder(tmp_path / "adapter", "qwen3_untied")
    check(rank_pool(1).run(on_rank_of_huggingface, model, start)[0])


def without_start_on_rank(model: Path, start: Path | None) -> bool:
    lora = {"rank": RANK, "alpha": ALPHA, "targets": ALL, "start": start}
    engine = make_engine(model, Layout("one", lora=lora))
    return torch.equal(engine.log_probs(random_batch(), adapter="start").logp_BT, engine.log_probs(random_batch(), adapter=False).logp_BT)


def test_a_new_adapter_starts_as_its_base(tmp_path: Path) -> None:
    model, start = save_model("qwen3_untied", tmp_path / "model"), start_folder(tmp_path / "adapter", "qwen3_untied")
    assert rank_pool(1).run(without_start_on_rank, model, None) == [True]
    with pytest.raises(Exception, match="keep_start"):
        rank_pool(1).run(without_start_on_rank, model, start)
