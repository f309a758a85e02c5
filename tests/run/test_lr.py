"""Learning rates: those that AdamW really runs with under Transformers' scheduler."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import SchedulerType, get_scheduler

from rlmca.config import TrainConfig
from rlmca.run.lr import LearningRate, scheduler_names, warmup_steps

STEPS, WARMUP, BASE = 23, 5, 3e-4
KWARGS = {
    "cosine_with_min_lr": {"min_lr_rate": 0.1},
    "cosine_warmup_with_min_lr": {"min_lr": 1e-5, "warmup_lr_rate": 0.2},
    "warmup_stable_decay": {"num_decay_steps": 7, "min_lr_ratio": 0.05},
    "cosine_with_restarts": {"num_cycles": 2},
    "polynomial": {"power": 2.0, "lr_end": 1e-6},
}


def options(name: str, **changes: object) -> TrainConfig:
    kept = {"learning_rate": BASE, "lr_scheduler_type": name, "lr_scheduler_kwargs": KWARGS.get(name, {}), "warmup_steps": WARMUP}
    return replace(TrainConfig(), **{**kept, **changes})


def rates_of_a_real_loop(name: str, kwargs: dict) -> list[float]:
    """What Transformers' trainer does: optimizer step, then scheduler step; the rate read when AdamW steps."""
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([param], lr=BASE)
    scheduler = get_scheduler(name, optimizer, WARMUP, STEPS, scheduler_specific_kwargs=kwargs)
    used = []
    for _ in range(STEPS):
        param.sum().backward()
        used.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return used


@pytest.mark.parametrize("name", scheduler_names())
def test_every_scheduler_gives_the_rates_of_a_real_loop(name: str) -> None:
    rate = LearningRate(options(name), STEPS)
    assert [rate(step) for step in range(1, STEPS + 1)] == rates_of_a_real_loop(name, KWARGS.get(name, {}))


def test_every_name_of_transformers_works_or_is_refused_by_name() -> None:
    for kind in SchedulerType:
        if kind.value in scheduler_names():
            LearningRate(options(kind.value), STEPS)
        else:
            with pytest.raises(ValueError, match=f"{kind.value}: not in this version"):
                LearningRate(options(kind.value), STEPS)
    with pytest.raises(ValueError, match="cosin is not known"):
        LearningRate(options("cosin"), STEPS)


def test_a_rate_depends_on_its_step_alone() -> None:
    rate = LearningRate(options("cosine"), STEPS)
    forwards = [rate(step) for step in range(1, STEPS + 1)]
    assert [rate(step) for step in range(STEPS, 0, -1)] == forwards[::-1]
    with pytest.raises(ValueError, match="count from 1"):
        rate(0)


@pytest.mark.parametrize(
    ("name", "kwargs"),
    (("cosine", {}), ("linear", {}), ("cosine_with_min_lr", {}), ("polynomial", {}), ("warmup_stable_decay", {"num_decay_steps": 7})),
)
def test_min_lr_is_where_the_decay_ends(name: str, kwargs: dict) -> None:
    rate = LearningRate(options(name, min_lr=2e-5, lr_scheduler_kwargs=kwargs), STEPS)
    assert rate(STEPS + 1) == pytest.approx(2e-5)
    assert max(rate(step) for step in range(1, STEPS + 1)) == pytest.approx(BASE)
    assert all(rate(step) >= 2e-5 - 1e-12 for step in range(WARMUP + 1, STEPS + 2))


def test_linear_and_cosine_with_min_lr_follow_megatrons_formula() -> None:
    """Megatron-LM, OptimizerParamScheduler.get_lr: min_lr + coefficient * (max_lr - min_lr)."""
    import math

    low = 2e-5
    for name, coefficient in (("linear", lambda x: 1 - x), ("cosine", lambda x: 0.5 * (math.cos(math.pi * x) + 1))):
        rate = LearningRate(options(name, min_lr=low), STEPS)
        for step in range(WARMUP, STEPS):
            assert rate(step + 1) == pytest.approx(low + coefficient((step - WARMUP) / (STEPS - WARMUP)) * (BASE - low), rel=1e-12)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"lr_scheduler_type": "constant", "min_lr": 1e-5}, "no meaning with lr_scheduler_type constant"),
        ({"lr_scheduler_type": "inverse_sqrt", "min_lr": 1e-5}, "no meaning"),
        ({"min_lr": 1.0}, "must be below learning_rate"),
        ({"lr_scheduler_type": "cosine_with_min_lr", "min_lr": 1e-5, "lr_scheduler_kwargs": {"min_lr_rate": 0.1}}, "the same twice"),
        ({"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {}}, "min_lr"),
        ({"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": {}}, "num_decay_steps"),
        ({"lr_scheduler_type": "linear", "lr_scheduler_kwargs": {"power": 2}}, "power"),
    ],
)
def test_contradictions_are_refused(changes: dict, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        LearningRate(
            options(
                **{"name": "cosine", **({"name": changes["lr_scheduler_type"]} if "lr_scheduler_type" in changes else {})},
                **{k: v for k, v in changes.items() if k != "lr_scheduler_type"},
            ),
            STEPS,
        )


def test_warmup_counts_as_transformers_counts_it() -> None:
    assert warmup_steps(options("linear", warmup_steps=7, warmup_ratio=0.5), 100) == 7
    assert warmup_steps(options("linear", warmup_steps=0, warmup_ratio=0.1), 101) == 11
    assert warmup_steps(options("linear", warmup_steps=0.05), 100) == 5
    assert warmup_steps(options("linear", warmup_steps=0), 100) == 0
