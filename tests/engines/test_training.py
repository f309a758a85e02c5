"""Steps, resume, export and random states of the Megatron engine, against a plain PyTorch loop."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlmca.algorithms.contract import TokenOutputs
from rlmca.algorithms.losses import SftLoss
from rlmca.types import Batch
from tests.helpers.engine import Layout, hf_reference, make_engine, random_batch
from tests.helpers.models import FAMILIES, make_model, save_model
from tests.helpers.ranks import rank_pool
from tests.helpers.training import (
    batches,
    dropout_losses_on_rank,
    export_on_rank,
    random_states_on_rank,
    resume_on_rank,
    train_on_rank,
    train_plainly,
)

ONE = Layout("tp1")
ALL = [
    ONE,
    Layout("tp2", tp=2),
    Layout("tp2_sp", tp=2, sp=True),
    Layout("pp2", pp=2),
    Layout("dp2", dp=2),
    Layout("dp2_overlap", dp=2, data_parallel={"overlap_grad_reduce": True, "overlap_param_gather": True}),
    Layout("tp2_pp2", tp=2, pp=2),
]
BUCKETS = Layout("dp2_many_buckets", dp=2, data_parallel={"overlap_grad_reduce": True, "ddp_bucket_size": 3001})
PLAIN_OPTIMIZER = Layout("dp2_replicated_optimizer", dp=2, data_parallel={"use_distributed_optimizer": False})
pytestmark = pytest.mark.serial


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("qwen3_tied", tmp_path_factory.mktemp("model"))


@pytest.mark.cases(2)
@pytest.mark.parametrize("layout", ALL, ids=lambda layout: layout.name)
def test_twenty_steps_equal_a_plain_loop(layout: Layout, folder: Path) -> None:
    rows = 7 if layout.dp > 1 else 8
    ours = rank_pool(layout.world).run(train_on_rank, folder, layout, rows)
    theirs = train_plainly(make_model("qwen3_tied").train(), rows)
    for rank in ours:  # every rank reports the same metrics
        for step, (mine, expected) in enumerate(zip(rank, theirs, strict=True)):
            assert abs(mine["loss"] - expected["loss"]) < 1e-5, f"step {step}"
            assert abs(mine["grad_norm"] - expected["grad_norm"]) < 1e-4 * max(1.0, expected["grad_norm"]), f"step {step}"
            assert mine["skipped"] == 0.0
    untrained = hf_reference(make_model("qwen3_tied"), batches(rows)[-1])["loss"]
    assert abs(untrained - theirs[-1]["loss"]) > 0.01, "the steps must matter for the comparison to mean anything"


@pytest.mark.parametrize(
    ("layout", "family"),
    [
        pytest.param(layout, family, id=f"{layout.name}-{family}", marks=[] if in_ci else pytest.mark.whole)
        for layout in ALL
        for family in FAMILIES
        for in_ci in [family == "qwen3_tied" or layout.name == "tp2_pp2"]
    ],
)
def test_load_and_export_are_bit_exact(layout: Layout, family: str, tmp_path: Path) -> None:
    source = save_model(family, tmp_path / "model")
    found = rank_pool(layout.world).run(export_on_rank, source, layout)[0]
    expected = load_file(source / "model.safetensors")
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("layout", [*ALL, BUCKETS, PLAIN_OPTIMIZER], ids=lambda layout: layout.name)
def test_resume_continues_exactly(layout: Layout, folder: Path, tmp_path: Path) -> None:
    for rank in rank_pool(layout.world).run(resume_on_rank, folder, layout, tmp_path / "checkpoint"):
        assert rank["resumed"] == rank["whole"]
        assert rank["same_weights"]


def test_resume_in_bf16_restores_the_fp32_masters(folder: Path, tmp_path: Path) -> None:
    layout = Layout("bf16", dp=2, options={"dtype": torch.bfloat16})
    for rank in rank_pool(2).run(resume_on_rank, folder, layout, tmp_path / "checkpoint"):
        assert rank["resumed"] == rank["whole"]
        assert rank["same_weights"]


def test_dropout_seeds_differ_where_the_numbers_must(folder: Path) -> None:
    """Copies over tensor ranks draw alike; parts of the model, stages and shares of the batch draw differently."""
    tensor = rank_pool(2).run(random_states_on_rank, folder, Layout("tp2", tp=2))
    assert tensor[0]["default"] == tensor[1]["default"] and tensor[0]["model_parallel"] != tensor[1]["model_parallel"]
    for layout in (Layout("dp2", dp=2), Layout("pp2", pp=2)):
        ranks = rank_pool(2).run(random_states_on_rank, folder, layout)
        assert ranks[0]["default"] != ranks[1]["default"] and ranks[0]["model_parallel"] != ranks[1]["model_parallel"]


def test_dropout_is_reproducible_and_acts(folder: Path) -> None:
    wet = Layout("dropout", options={"additional_configs": {"hidden_dropout": 0.2, "attention_dropout": 0.1}})
    first, second = (rank_pool(1).run(dropout_losses_on_rank, folder, wet, 3)[0] for _ in range(2))
    dry = rank_pool(1).run(dropout_losses_on_rank, folder, ONE, 3)[0]
    assert first == second
    assert all(abs(a - b) > 1e-4 for a, b in zip(first, dry, strict=True))


# ---- in this process


class _Poisoned(SftLoss):
    """A loss that is not finite."""

    def terms(self, out: TokenOutputs, batch: Batch, counts):  # type: ignore[no-untyped-def]
        loss, metrics = super().terms(out, batch, counts)
        return loss * float("inf"), metrics


def _state(engine) -> list[torch.Tensor]:  # type: ignore[no-untyped-def]
    moments = [value for state in engine.optimizer.optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    return [p.clone() for p in (p for _, p in engine.named_parameters())] + [m.clone() for m in moments]


@pytest.mark.parametrize("kind", ["not_finite", "no_target"])
def test_a_step_without_a_usable_gradient_changes_nothing(kind: str, folder: Path) -> None:
    engine = make_engine(folder, ONE)
    engine.train_batch(random_batch(seed=1), SftLoss(), 1e-2)
    before, steps = _state(engine), [g["step"] for g in engine.optimizer.param_groups]
    batch = random_batch(seed=2)
    if kind == "no_target":
        batch = batch.replace(mask_BT=torch.zeros_like(batch.mask_BT))
        metrics = engine.train_batch(batch, SftLoss(), 1e-2)
        assert metrics["loss"] == 0.0
    else:
        metrics = engine.train_batch(batch, _Poisoned(), 1e-2)
    assert metrics["skipped"] == 1.0
    assert all(torch.equal(a, b) for a, b in zip(before, _state(engine), strict=True))
    assert steps == [g["step"] for g in engine.optimizer.param_groups]
    assert engine.train_batch(random_batch(seed=2), SftLoss(), 1e-2)["skipped"] == 0.0


def test_bf16_keeps_small_updates_in_its_masters(folder: Path) -> None:
    """Steps too small for bf16 add up in fp32 until the weights move."""
    engine = make_engine(folder, Layout("bf16", options={"dtype": torch.bfloat16}))
    fp32 = make_engine(folder, ONE)
    batch = random_batch(seed=3)
    assert {p.dtype for p in (p for _, p in engine.named_parameters())} == {torch.bfloat16}
    assert abs(engine.train_batch(batch, SftLoss(), 1e-5)["loss"] - fp32.train_batch(batch, SftLoss(), 1e-5)["loss"]) < 0.05
    start = [p.detach().clone() for p in (p for _, p in engine.named_parameters())]
    masters = [p for group in engine.optimizer.param_groups for p in group["params"]]
    assert {p.dtype for p in masters} == {torch.float32}
    for _ in range(30):
        engine.train_batch(batch, SftLoss(), 1e-5)
    moved = sum((a != b).sum().item() for a, b in zip(start, (p for _, p in engine.named_parameters()), strict=True))
    assert moved > 0


def test_log_probs_do_not_depend_on_their_batch_and_leave_training_alone(folder: Path) -> None:
    engine = make_engine(folder, ONE)
    batch = random_batch(seed=5)
    whole = engine.log_probs(batch, temperature=0.7, entropy=True)
    rows = [engine.log_probs(batch.rows([i]), temperature=0.7, entropy=True) for i in range(len(batch))]
    torch.testing.assert_close(whole.logp_BT, torch.cat([r.logp_BT for r in rows]), rtol=0, atol=1e-5)
    assert whole.entropy_BT is not None and (whole.entropy_BT[batch.mask_BT] > 0).all()
    assert not whole.logp_BT[~batch.mask_BT].any() and not whole.entropy_BT[~batch.mask_BT].any()
    assert engine.log_probs(batch).entropy_BT is None
