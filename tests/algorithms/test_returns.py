"""Returns, GAE, REINFORCE++, values; the adaptive KL coefficient, running moments and the vector reward, by hand."""

from __future__ import annotations

import math
import random
import statistics

import pytest
import torch

from rlmca.algorithms import (
    AdaptiveKl,
    RunningMoments,
    adapted_kl_coef,
    assign_advantages,
    discounted_returns,
    explained_variance,
    gae,
    leave_one_out,
    reinforce_plus_plus,
    value_loss,
    vector_mse,
    vector_rewards,
    whiten,
)
from rlmca.types import Sample


def test_gae_worked_example() -> None:
    rewards, values = torch.tensor([[0.0, 0.5, 2.0]]), torch.tensor([[1.0, 1.5, 1.2]])
    advantages, returns = gae(rewards, values, torch.ones(1, 3), gamma=1.0, lam=0.95)
    assert advantages.tolist() == [pytest.approx([1.412, 0.96, 0.8])] and returns.tolist() == [pytest.approx([2.412, 2.46, 2.0])]
    # a masked slot between the second and the third token, and one behind: nothing is bootstrapped from them
    spread = torch.tensor([[0, 1, 9, 2, 9]])
    r, v = (torch.cat([x, torch.full((1, 1), math.inf)], 1)[:, [0, 1, 3, 2, 3]] for x in (rewards, values))
    got, _ = gae(r, v, spread != 9, gamma=1.0, lam=0.95)
    assert got.tolist() == [pytest.approx([1.412, 0.96, 0.0, 0.8, 0.0])]


def test_discounted_returns() -> None:
    rewards, mask = torch.tensor([[1.0, 5.0, 2.0, 4.0]]), torch.tensor([[1, 0, 1, 1]])
    assert discounted_returns(rewards, mask, gamma=0.5).tolist() == [[3.0, 0.0, 4.0, 4.0]]
    assert discounted_returns(rewards.bfloat16(), mask, gamma=0.5).dtype == torch.float32


def test_reinforce_plus_plus_baseline_and_invalid_rows() -> None:
    mask = torch.tensor([[1, 1], [1, 0], [1, 1], [1, 1]])
    returns, advantages = reinforce_plus_plus([1.0, 3.0, 5.0, None], mask, group_ids=[0, 0, 1, 0])
    assert returns.tolist() == [[-1, -1], [1, 0], [0, 0], [0, 0]]
    live = torch.tensor([[1, 1], [1, 0], [1, 1], [0, 0]])
    torch.testing.assert_close(advantages, whiten(returns, live))
    with pytest.raises(ValueError, match="kl_coef is 0.1 but no kl"):
        reinforce_plus_plus([1.0], torch.ones(1, 1), kl_coef=0.1)
    with pytest.raises(ValueError, match="reward 0 is infinite"):
        reinforce_plus_plus([math.inf], torch.ones(1, 1))


def test_leave_one_out_is_the_reward_less_the_mean_of_the_others() -> None:
    rewards = [1.0, 0.0, 4.0, None, 2.0, 0.7, 0.7, 0.1 + 0.6]
    got = leave_one_out(rewards, [0, 0, 0, 0, 1, 2, 2, 2]).tolist()
    assert got == pytest.approx([1 - 2, 0 - 2.5, 4 - 0.5, 0, 0, 0, 0, 0])


def test_assign_by_kind() -> None:
    def samples() -> list[Sample]:
        return [Sample([1], [3], [0.0], [0], "stop", reward=r) for r in (0.0, 1.0, 5.0)]

    for kind, want in {"rloo": [-3.0, -1.5, 4.5], "dr_grpo": [-2.0, -1.0, 3.0]}.items():
        made = samples()
        assign_advantages(made, kind=kind, std="sample")  # type: ignore[arg-type]
        assert [s.advantage for s in made] == pytest.approx(want)
    with pytest.raises(ValueError, match="write grpo, rloo or dr_grpo"):
        assign_advantages(samples(), kind="gae")  # type: ignore[arg-type]


def test_value_loss_counts_the_comparison() -> None:
    """Clipped error larger (counted), clipped but smaller, not clipped, masked."""
    values, old, returns = torch.tensor([[1.0, 1.0, 0.1, 7.0]]), torch.zeros(1, 4), torch.tensor([[2.0, 0.0, 0.0, 0.0]])
    loss, metrics = value_loss(values, old, returns, torch.tensor([[1, 1, 1, 0]]), clip=0.2)
    assert loss.item() == pytest.approx((1.8**2 + 1.0 + 0.01) / 6) and float(metrics["value_clip_fraction"]) == pytest.approx(1 / 3)
    loss, metrics = value_loss(values, None, returns, torch.tensor([[1, 1, 1, 0]]), clip=None)
    assert loss.item() == pytest.approx(2.01 / 6) and float(metrics["value_error"]) == pytest.approx(0.7)
    with pytest.raises(ValueError, match="old values are missing"):
        value_loss(values, None, returns, torch.ones(1, 4), clip=0.2)
    with pytest.raises(ValueError, match="value_clip 0.0 must be positive"):
        value_loss(values, old, returns, torch.ones(1, 4), clip=0.0)


def test_explained_variance() -> None:
    returns, mask = torch.tensor([[1.0, 2.0, 3.0, 99.0]]), torch.tensor([[1, 1, 1, 0]])
    assert explained_variance(returns + 5, returns, mask) == pytest.approx(1.0)  # a constant offset is no lack of variance
    assert explained_variance(torch.zeros(1, 4), returns, mask) == pytest.approx(0.0)
    assert explained_variance(returns, torch.ones(1, 4), mask) == 0.0 and explained_variance(returns, returns, mask[:, :0]) == 0.0


def test_adaptive_kl() -> None:
    assert adapted_kl_coef(0.2, 6.6, target=6.0) == pytest.approx(0.2 * 1.01)
    assert adapted_kl_coef(0.2, 600.0, target=6.0) == pytest.approx(0.2 * 1.02)  # the error is clipped at 0.2
    assert adapted_kl_coef(0.2, -600.0, target=6.0) == pytest.approx(0.2 * 0.98)
    assert adapted_kl_coef(0.2, 600.0, target=6.0, steps=256, horizon=10000) == pytest.approx(0.2 * (1 + 0.2 * 0.0256))
    assert adapted_kl_coef(0.2, math.nan, target=6.0) == 0.2
    control, again = AdaptiveKl(0.1, 2.0), AdaptiveKl(0.9, 2.0)
    for measured in (3.0, 1.0, 2.0):
        control.update(measured)
    again.load_state_dict(control.state_dict())
    assert again == control and control.coef == pytest.approx(0.1 * 1.02 * 0.98)
    for options, message in (((0.1, 0.0), "kl_target 0.0"), ((0.0, 1.0), "start above 0"), ((0.1, 1.0, 0.1), "horizon")):
        with pytest.raises(ValueError, match=message):
            AdaptiveKl(*options)


def test_running_moments_are_those_of_everything_seen() -> None:
    draw = random.Random(0)
    seen = [1e6 + draw.gauss(0, 2) for _ in range(300)]
    moments = RunningMoments()
    for start, stop in ((0, 1), (1, 1), (1, 7), (7, 300)):
        moments.update([*seen[start:stop], None, math.nan])
        copy = RunningMoments()
        copy.load_state_dict(moments.state_dict())
        assert copy == moments
        moments = copy
    assert moments.count == 300 and moments.mean == pytest.approx(statistics.fmean(seen), rel=1e-12)
    assert moments.std == pytest.approx(statistics.stdev(seen), rel=1e-9)
    assert moments.normalise(moments.mean + moments.std) == pytest.approx(1.0)
    one = RunningMoments()
    assert one.normalise(3.0) == 3.0
    one.update([2.0])
    assert one.std == 0.0 and one.normalise(3.0) == 1.0
    with pytest.raises(ValueError, match="infinite"):
        one.update([math.inf])


def test_vector_reward_by_direction_and_failures() -> None:
    target = torch.tensor([[1.0, 0.0, 0.0, 0.0]]).expand(6, 4)
    predicted = torch.tensor([[7.0, 0, 0, 0], [0, 3, 0, 0], [-2, 0, 0, 0], [0, 0, 0, 0], [math.nan, 0, 0, 0], [5, 0, 0, 0]])
    rewards, failed = vector_rewards(predicted, target, failed=torch.tensor([0, 0, 0, 0, 0, 1]))
    assert rewards.tolist() == pytest.approx([0, -2, -4, -2, -2, -2]) and failed.tolist() == [False] * 3 + [True] * 3
    logs, _ = vector_rewards(predicted, target, log=True)
    assert logs.tolist() == pytest.approx([-math.log(1e-8), -math.log(2), -math.log(4), -math.log(2), -math.log(2), -math.log(1e-8)])
    assert float(vector_mse(predicted[1], target[1], scale=1.0)) == pytest.approx(0.5)
    with pytest.raises(ValueError, match="target vector 1 is zero or not finite"):
        vector_rewards(predicted[:2], torch.tensor([[1.0, 0, 0, 0], [0, 0, 0, 0]]))
    huge = vector_rewards(torch.full((1, 4), 1e30).bfloat16(), torch.ones(1, 4).bfloat16())
    assert huge[0].dtype == torch.float32 and not math.isnan(float(huge[0]))
