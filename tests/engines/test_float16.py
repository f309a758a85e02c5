"""float16 with a scaled loss, on both engines: numbers, overflows, one decision on all ranks, resume."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from rlmca.algorithms.contract import TokenOutputs
from rlmca.algorithms.losses import SftLoss
from rlmca.types import Batch
from tests.helpers.engine import Layout, gradients_on_rank, hf_reference, make_engine, random_batch
from tests.helpers.huggingface import make_hf_engine
from tests.helpers.models import make_model, save_model
from tests.helpers.ranks import rank_pool
from tests.helpers.training import train_on_rank

pytestmark = pytest.mark.serial
LAYERS = 4
HALF: dict[str, Any] = {"dtype": torch.float16}
HASTY: dict[str, Any] = {"initial": 2.0**27, "hysteresis": 1, "window": 3}
"""Starts with a factor under which every gradient overflows, and doubles it again soon."""
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
HF = "huggingface"


def half(name: str, **settings: Any) -> Layout:
    return Layout(name, **{**settings, "options": {**HALF, **settings.get("options", {})}})


LAYOUTS = [
    half("tp1"),
    half("tp1_fp16_buffers", data_parallel={"accumulate_allreduce_grads_in_fp32": False}),
    half("tp1_logits", options={"cross_entropy_loss_fusion": False, "masked_softmax_fusion": False}),
    half("tp1_fusions", options={"bias_activation_fusion": True, "bias_dropout_fusion": True}),
    half("tp2_sp", tp=2, sp=True),
    half("pp2", pp=2),
    half("pp2_vpp2", pp=2, vpp=2),
    half("cp2", cp=2),
    half("dp2", dp=2),
    half("dp2_overlap", dp=2, data_parallel=OVERLAP),
    half("dp2_replicated_optimizer", dp=2, data_parallel={"use_distributed_optimizer": False}),
    half("dp2_fp16_buffers", dp=2, data_parallel={"accumulate_allreduce_grads_in_fp32": False}),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("qwen3_tied", tmp_path_factory.mktemp("model"), num_hidden_layers=LAYERS)


def engine_on_rank(folder: Path, layout: Layout | dict[str, Any]) -> Any:
    """A Megatron engine, or (settings instead of a layout) one of Hugging Face."""
    if isinstance(layout, Layout):
        return make_engine(folder, layout)
    from rlmca.engines.options import LossScaleOptions

    return make_hf_engine(folder, dp=layout["dp"], loss_scale=LossScaleOptions(**layout["loss_scale"]))


def parameters(engine: Any) -> list[torch.Tensor]:
    if hasattr(engine, "named_parameters"):
        return [p.detach().clone() for p in engine.weights().params.values()]
    return [p.detach().clone() for p in engine.module.parameters()]


# ---- numbers


IN_CI = ("tp1_logits", "tp2_sp", "pp2_vpp2", "cp2", "dp2_overlap", "dp2_fp16_buffers")


@pytest.mark.parametrize(
    "layout", [pytest.param(layout, id=layout.name, marks=[] if layout.name in IN_CI else pytest.mark.whole) for layout in LAYOUTS]
)
def test_loss_gradients_and_log_probs_are_those_of_float32_within_float16(layout: Layout, folder: Path) -> None:
    rows = 7 if layout.dp > 1 else 8
    ours = rank_pool(layout.world).run(gradients_on_rank, folder, layout, random_batch(rows=rows))[0]
    theirs = hf_reference(make_model("qwen3_tied", num_hidden_layers=LAYERS), random_batch(rows=rows))
    assert abs(ours["loss"] - theirs["loss"]) < 2e-3, "the loss that is logged is not the scaled one"
    torch.testing.assert_close(ours["logp_BT"], theirs["logp_BT"], rtol=0, atol=2e-2)
    scale, norm = 65536.0, 0.0
    for name, expected in theirs["gradients"].items():
        found = ours["gradients"][name].float() / scale
        norm += float((found - expected).square().sum())
        torch.testing.assert_close(found, expected, rtol=0, atol=0.02 * float(expected.abs().max()), msg=lambda m, n=name: f"{n}: {m}")
    whole = math.sqrt(sum(float(g.square().sum()) for g in theirs["gradients"].values()))
    assert math.sqrt(norm) < 5e-3 * whole


def test_twenty_steps_follow_float32(folder: Path) -> None:
    rough, exact = (rank_pool(1).run(train_on_rank, folder, layout, 8)[0] for layout in (half("tp1"), Layout("tp1")))
    engine = engine_on_rank(folder, {"dp": 1, "loss_scale": {}})
    from tests.helpers.training import batches, learning_rate

    hugging = [engine.train_batch(batch, SftLoss(), learning_rate(step)) for step, batch in enumerate(batches(8))]
    for step, (mine, other, expected) in enumerate(zip(rough, hugging, exact, strict=True)):
        for found in (mine, other):
            assert abs(found["loss"] - expected["loss"]) < 5e-3, f"step {step}"
            assert abs(found["grad_norm"] - expected["grad_norm"]) < 5e-3 * expected["grad_norm"], f"step {step}"
            assert (found["skipped"], found["overflow"], found["loss_scale"]) == (0.0, 0.0, 65536.0)
    assert "loss_scale" not in exact[0]


# ---- overflows


def hasty_on_rank(folder: Path, layout: Layout | dict[str, Any], steps: int) -> dict[str, Any]:
    """Metrics of a run that starts with too large a factor; whether each step moved this rank's weights."""
    from rlmca.workers import SpmdGroup

    engine = engine_on_rank(folder, layout)
    group, moved, metrics = SpmdGroup(engine, engine.parallel), [], []
    for step in range(steps):
        before = parameters(engine)
        metrics.append(group.train_batch(random_batch(rows=7, seed=step), SftLoss(), 1e-3))
        moved.append(not all(torch.equal(a, b) for a, b in zip(before, parameters(engine), strict=True)))
    return {"metrics": metrics, "moved": moved}


HASTY_LAYOUTS: list[Any] = [
    half("tp1", loss_scale=HASTY),
    half("tp2_sp", tp=2, sp=True, loss_scale=HASTY),
    half("pp2", pp=2, loss_scale=HASTY),
    half("pp2_replicated_optimizer", pp=2, data_parallel={"use_distributed_optimizer": False}, loss_scale=HASTY),
    half("dp2", dp=2, loss_scale=HASTY),
    half("dp2_overlap", dp=2, data_parallel=OVERLAP, loss_scale=HASTY),
    half("dp2_replicated_optimizer", dp=2, data_parallel={"use_distributed_optimizer": False}, loss_scale=HASTY),
    half("dp2_fp16_buffers", dp=2, data_parallel={"accumulate_allreduce_grads_in_fp32": False}, loss_scale=HASTY),
    {"dp": 1, "loss_scale": HASTY},
    {"dp": 2, "loss_scale": HASTY},
]


def name_of(layout: Any) -> str:
    return layout.name if isinstance(layout, Layout) else f"{HF}_dp{layout['dp']}"


SAMPLE = ("tp1", "tp2_sp", "dp2", f"{HF}_dp2")


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    "layout",
    [pytest.param(layout, id=name_of(layout), marks=[] if name_of(layout) in SAMPLE else pytest.mark.whole) for layout in HASTY_LAYOUTS],
)
def test_an_overflow_skips_the_step_and_halves_the_factor(layout: Any, folder: Path) -> None:
    steps = 30
    ranks = rank_pool(layout.world if isinstance(layout, Layout) else layout["dp"]).run(hasty_on_rank, folder, layout, steps)
    first = ranks[0]["metrics"]
    scale, clean = HASTY["initial"], 0
    for step in range(steps):
        found = first[step]
        assert found["loss_scale"] == scale, f"step {step}"
        assert all(rank["metrics"][step]["overflow"] == found["overflow"] for rank in ranks), "ranks must decide alike"
        assert all(rank["metrics"][step]["loss_scale"] == scale for rank in ranks)
        assert all(rank["moved"][step] == (not found["skipped"]) for rank in ranks), f"step {step}"
        assert math.isfinite(found["loss"]) and found["skipped"] == found["overflow"]
        assert found["overflow"] or math.isfinite(found["grad_norm"])
        clean = 0 if found["overflow"] else clean + 1
        if found["overflow"]:
            scale /= 2
        elif clean == HASTY["window"]:
            scale, clean = scale * 2, 0
    assert first[0]["overflow"] == 1.0 and sum(m["overflow"] for m in first) < 0.6 * steps
    assert any(b["loss_scale"] > a["loss_scale"] for a, b in zip(first, first[1:], strict=False)), "it must double again"
    seen = [step for step in range(steps) if not first[step]["skipped"]]
    exact = make_engine(folder, Layout("tp1"))
    for step in seen:  # a run in float32 that never saw the skipped batches
        assert abs(exact.train_batch(random_batch(rows=7, seed=step), SftLoss(), 1e-3)["loss"] - first[step]["loss"]) < 2e-2


class _Poisoned(SftLoss):
    """A loss that is not finite."""

    def terms(self, out: TokenOutputs, batch: Batch, counts: Any) -> Any:
        loss, metrics = super().terms(out, batch, counts)
        return loss * float("inf"), metrics


@pytest.mark.parametrize("layout", [half("tp1", loss_scale={"hysteresis": 1}), {"dp": 1, "loss_scale": {"hysteresis": 1}}], ids=name_of)
def test_a_loss_that_is_not_finite_is_no_overflow(layout: Any, folder: Path) -> None:
    engine = engine_on_rank(folder, layout)
    engine.train_batch(random_batch(seed=1), SftLoss(), 1e-3)
    before = parameters(engine)
    found = engine.train_batch(random_batch(seed=2), _Poisoned(), 1e-3)
    assert not math.isfinite(found["loss"]) and (found["skipped"], found["overflow"]) == (1.0, 0.0)
    assert all(torch.equal(a, b) for a, b in zip(before, parameters(engine), strict=True))
    after = engine.train_batch(random_batch(seed=2), SftLoss(), 1e-3)
    assert (after["skipped"], after["loss_scale"]) == (0.0, 65536.0), "the data's fault says nothing about the factor"


@pytest.mark.parametrize("kind", ["megatron", HF])
def test_a_constant_factor_stays(kind: str, folder: Path) -> None:
    def losses(scale: float) -> list[dict[str, float]]:
        own = {"constant": scale, "window": 1, "hysteresis": 1}
        engine = engine_on_rank(folder, half("tp1", loss_scale=own) if kind == "megatron" else {"dp": 1, "loss_scale": own})
        return [engine.train_batch(random_batch(seed=s), SftLoss(), 1e-3) for s in range(3)]

    fits, large = losses(128.0), losses(2.0**40)
    assert [m["loss_scale"] for m in fits] == [128.0] * 3 and [m["loss_scale"] for m in large] == [2.0**40] * 3
    assert [m["skipped"] for m in fits] == [0.0] * 3 and [m["skipped"] for m in large] == [1.0] * 3


def test_one_rank_that_overflows_holds_all_back(folder: Path) -> None:
    """Only the row that makes the gradient overflow is on one of the ranks; weights and factor stay equal on both."""
    for kind in ("megatron", "replicated", HF):
        for rank in rank_pool(2).run(lopsided_on_rank, folder, kind):
            assert rank["skipped"] == rank["overflow"] == 1.0
            assert rank["next_scale"] == 512.0 and rank["same"] and rank["goes_on"]


class _Lopsided(SftLoss):
    """Finite, but its gradient is infinite, on the rank that holds the longest row."""

    def terms(self, out: TokenOutputs, batch: Batch, counts: Any) -> Any:
        loss, metrics = super().terms(out, batch, counts)
        if (batch.ids_BT == 66).any():
            loss = loss + (out.logp_BT.sum() * 0).sqrt() * 0  # the derivative of the root at zero
        return loss, metrics


def lopsided_on_rank(folder: Path, kind: str) -> dict[str, Any]:
    import torch.distributed as dist

    from rlmca.workers import SpmdGroup

    own = {"initial": 1024.0, "hysteresis": 1}
    replicated = {"use_distributed_optimizer": kind != "replicated"}
    engine = engine_on_rank(
        folder, {"dp": 2, "loss_scale": own} if kind == HF else half("dp2", dp=2, loss_scale=own, data_parallel=replicated)
    )
    group = SpmdGroup(engine, engine.parallel)
    batch = random_batch(vocab=66, seed=3)
    ids_BT = batch.ids_BT.clone()
    ids_BT[0, 0] = 66
    before = parameters(engine)
    found = group.train_batch(batch.replace(ids_BT=ids_BT), _Lopsided(), 1e-3)
    same = all(torch.equal(a, b) for a, b in zip(before, parameters(engine), strict=True))
    after = group.train_batch(batch, SftLoss(), 1e-3)
    total = torch.stack([p.double().sum() for p in parameters(engine)]).sum().reshape(1)
    both = [torch.empty_like(total) for _ in range(2)]
    dist.all_gather(both, total)
    return {**found, "next_scale": after["loss_scale"], "same": same, "goes_on": after["skipped"] == 0.0 and torch.equal(*both)}


# ---- the factor's rule and its place in checkpoints


def test_the_factor_moves_as_megatrons_does() -> None:
    """On random sequences of overflows, with every part of the rule at work."""
    from rlmca.engines.loss_scale import LossScaler
    from rlmca.engines.options import LossScaleOptions
    from rlmca.parallel import megatron as _platform  # noqa: F401 - megatron-core names CUDA devices
    from megatron.core.optimizer.grad_scaler import DynamicGradScaler  # isort: skip

    draw = torch.Generator().manual_seed(0)
    for hysteresis in (1, 2, 3):
        options = LossScaleOptions(initial=64.0, minimum=4.0, window=3, hysteresis=hysteresis)
        theirs = DynamicGradScaler(options.initial, options.minimum, 2.0, 0.5, options.window, options.hysteresis)
        mine, weight = LossScaler(options, torch.device("cpu")), torch.nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([weight], lr=0.0)
        seen = set()
        for step in range(200):
            overflow = bool(torch.rand((), generator=draw) < (0.7 if step % 40 < 15 else 0.1))
            mine.scaled(weight.sum())
            weight.grad = torch.tensor([math.inf if overflow else 1.0])
            mine.unscale_(optimizer)
            mine.settle(learn=True)
            theirs.update(overflow)
            assert mine.scale == float(theirs.scale), f"step {step} of hysteresis {hysteresis}"
            seen.add(mine.scale)
            if step % 50 == 20:  # and goes on from what was saved
                state, mine = mine.state_dict(), LossScaler(options, torch.device("cpu"))
                mine.load_state_dict(state)
        assert len(seen) > 4 and min(seen) == 4.0


def resume_on_rank(folder: Path, layout: Layout | dict[str, Any], checkpoint: Path) -> dict[str, Any]:
    """As `tests.helpers.training.resume_on_rank`, in the middle of overflows and of a window, with all metrics."""
    from rlmca.workers import SpmdGroup

    def steps(group: Any, numbers: range) -> list[dict[str, float]]:
        found = [group.train_batch(random_batch(seed=s), SftLoss(), 1e-2) for s in numbers]
        return [{name: value for name, value in m.items() if math.isfinite(value)} for m in found]

    engine = engine_on_rank(folder, layout)
    group = SpmdGroup(engine, engine.parallel)
    steps(group, range(8))
    engine.save(checkpoint)
    whole, expected = steps(group, range(8, 20)), parameters(engine)
    again = engine_on_rank(folder, layout)
    again.load(checkpoint)
    resumed = steps(SpmdGroup(again, again.parallel), range(8, 20))
    same = all(torch.equal(a, b) for a, b in zip(parameters(again), expected, strict=True))
    return {"whole": whole, "resumed": resumed, "same": same}


RESUMED = [*HASTY_LAYOUTS[:1], *HASTY_LAYOUTS[4:7], *HASTY_LAYOUTS[-2:]]


@pytest.mark.parametrize(
    "layout", [pytest.param(layout, id=name_of(layout), marks=pytest.mark.whole if 0 < at < 5 else []) for at, layout in enumerate(RESUMED)]
)
def test_a_resumed_run_goes_on_with_factor_and_count(layout: Any, folder: Path, tmp_path: Path) -> None:
    own = {"initial": 2.0**26, "hysteresis": 2, "window": 5}
    layout = dataclasses.replace(layout, loss_scale=own) if isinstance(layout, Layout) else {**layout, "loss_scale": own}
    world = layout.world if isinstance(layout, Layout) else layout["dp"]
    for rank in rank_pool(world).run(resume_on_rank, folder, layout, tmp_path / "checkpoint"):
        assert rank["whole"] == rank["resumed"] and rank["same"]
        scales = [m["loss_scale"] for m in rank["whole"]]
        assert len(set(scales)) > 1 and scales[0] < own["initial"], "a new factor would show"


def scale_after_resume(folder: Path, layout: Any, checkpoint: Path, first: dict[str, Any], then: dict[str, Any]) -> float:
    """The factor of the first step of a run with `then`, resumed from one with `first`."""

    def engine_with(own: dict[str, Any]) -> Any:
        scaled = dataclasses.replace(layout, loss_scale=own) if isinstance(layout, Layout) else {**layout, "loss_scale": own}
        return engine_on_rank(folder, scaled)

    engine = engine_with(first)
    engine.train_batch(random_batch(), SftLoss(), 1e-3)
    engine.save(checkpoint)
    again = engine_with(then)
    again.load(checkpoint)
    return float(again.train_batch(random_batch(), SftLoss(), 1e-3)["loss_scale"])


@pytest.mark.parametrize("layout", [half("one"), {"dp": 1}], ids=["megatron", "huggingface"])
@pytest.mark.parametrize(
    ("first", "then", "expected"),
    [
        ({"constant": 64.0}, {"initial": 4096.0}, 4096.0),
        ({"initial": 4096.0}, {"constant": 64.0}, 64.0),
        ({"initial": 512.0}, {"initial": 2048.0, "minimum": 1024.0}, 1024.0),
    ],
    ids=["constant_to_dynamic", "dynamic_to_constant", "below_the_minimum"],
)
def test_a_run_resumed_under_another_rule_follows_its_own(
    layout: Any, first: dict[str, Any], then: dict[str, Any], expected: float, folder: Path, tmp_path: Path
) -> None:
    assert scale_after_resume(folder, layout, tmp_path / "checkpoint", first, then) == expected


def test_weights_that_float16_cannot_hold_are_refused_by_name_everywhere(tmp_path: Path) -> None:
    """Cast without a look they would be inf, and an exported model would be broken without a word."""
    from rlmca.transfer.convert.base import ConvertError
    from rlmca.transfer.convert.rewrite import rewrite_hf
    from rlmca.transfer.hf_folder import HFFolderError

    model = make_model("qwen3_untied")
    with torch.no_grad():
        model.model.layers[0].input_layernorm.weight[3] = 1e5
    model.save_pretrained(tmp_path / "large")
    words = "model.layers.0.input_layernorm.weight holds 100000, more than float16 can"
    with pytest.raises(ConvertError, match=words):
        rewrite_hf(tmp_path / "large", tmp_path / "half", torch.float16)
    assert not (tmp_path / "half").exists()
    with pytest.raises(HFFolderError, match=words):
        engine_on_rank(tmp_path / "large", {"dp": 1, "loss_scale": {}})
    with pytest.raises(HFFolderError, match=words):
        make_engine(tmp_path / "large", half("one"))
    rewrite_hf(tmp_path / "large", tmp_path / "wide", torch.bfloat16)
