"""Draws: their distribution, their independence, the filters."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import TopKLogitsWarper, TopPLogitsWarper

from rlmca.rollout.base import SamplingParams
from rlmca.rollout.sampling import choose, invert, keep_likely
from rlmca.rollout.seeds import reply_seed, uniform_B


def chi_square_is_plausible(observed: Tensor, expected: Tensor) -> bool:
    """Within 5 standard deviations of chi-square's mean, cells of expectation below 5 pooled."""
    small = expected < 5
    cells = [(o, e) for o, e, s in zip(observed.tolist(), expected.tolist(), small.tolist(), strict=True) if not s]
    if small.any() and float(expected[small].sum()) >= 5:
        cells.append((float(observed[small].sum()), float(expected[small].sum())))
    statistic, freedom = sum((o - e) ** 2 / e for o, e in cells), len(cells) - 1
    return abs(statistic - freedom) < 5 * math.sqrt(2 * freedom)


def seeds(count: int, step: int = 0) -> Tensor:
    return torch.tensor([reply_seed(11, step, p, 0) for p in range(count)])


def draw(logits_V: Tensor, params: SamplingParams, count: int = 40000) -> tuple[Tensor, Tensor]:
    return choose(logits_V.expand(count, -1).clone(), params, seeds(count), position=3)


@pytest.mark.parametrize("temperature", (1.0, 0.5, 2.0))
def test_drawn_tokens_follow_the_softmax(temperature: float) -> None:
    logits_V = torch.randn(37, generator=torch.Generator().manual_seed(0)) * 2
    token_B, logp_B = draw(logits_V, SamplingParams(temperature=temperature))
    expected = torch.softmax(logits_V.double() / temperature, -1)
    assert chi_square_is_plausible(torch.bincount(token_B, minlength=37), expected * len(token_B))
    assert not chi_square_is_plausible(torch.bincount(token_B, minlength=37), expected.flip(0) * len(token_B))
    assert torch.allclose(logp_B.double(), expected.log()[token_B], atol=1e-6)


@pytest.mark.parametrize(("top_k", "top_p"), ((5, 1.0), (-1, 0.7), (6, 0.8), (1, 1.0), (500, 0.3)))
def test_filters_keep_what_transformers_keeps(top_k: int, top_p: float) -> None:
    logits_V = torch.randn(40, generator=torch.Generator().manual_seed(2)) * 2
    scores = logits_V[None].clone()
    if top_k > 0:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    want = torch.softmax(scores, -1)[0]
    got = keep_likely(torch.softmax(logits_V, -1)[None], top_k, top_p)[0]
    assert torch.allclose(got / got.sum(), want, atol=1e-6)
    token_B, logp_B = draw(logits_V, SamplingParams(top_k=top_k, top_p=top_p), 5000)
    assert want[token_B].min() > 0
    assert torch.allclose(logp_B, torch.log_softmax(logits_V, -1)[token_B], atol=1e-6)  # reported before the filters


def test_greedy_takes_the_best_token_at_temperature_one() -> None:
    logits_BV = torch.randn(50, 33, generator=torch.Generator().manual_seed(3))
    token_B, logp_B = choose(logits_BV.clone(), SamplingParams(temperature=0), seeds(50), 0)
    assert torch.equal(token_B, logits_BV.argmax(-1))
    assert torch.allclose(logp_B, torch.log_softmax(logits_BV, -1).max(-1).values, atol=1e-6)


def test_a_token_without_probability_is_never_drawn() -> None:
    prob_BV = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0, 0.0]]).repeat(4, 1)
    assert invert(prob_BV, torch.tensor([0.0, 0.5, 1 - 2**-53, 0.49999], dtype=torch.float64)).tolist() == [1, 3, 3, 1]


def test_splitmix64_is_the_published_generator() -> None:
    """First outputs of Vigna's splitmix64.c for seed 1234567 (the values that Rosetta Code's page of that name lists)."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    got = [float(uniform_B(torch.tensor([1234567]), i)) for i in range(5)]
    assert got == [(word >> 11) * 2.0**-53 for word in published]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**63), st.integers(-1, 10**6), st.integers(0, 10**7), st.integers(0, 1000))
def test_seeds_are_int64_and_tell_steps_prompts_and_replies_apart(seed: int, step: int, prompt: int, k: int) -> None:
    base = reply_seed(seed, step, prompt, k)
    assert -(2**63) <= base < 2**63
    others = [
        (seed + 1, step, prompt, k),
        (seed, step + 1, prompt, k),
        (seed, step, prompt + 1, k),
        (seed, step, prompt, k + 1),
        (seed, prompt, step, k),
    ]
    assert all(reply_seed(*other) != base for other in others if other != (seed, step, prompt, k))


def test_uniforms_of_neighbouring_seeds_and_positions_are_uncorrelated() -> None:
    u_TB = torch.stack([uniform_B(seeds(2000), t) for t in range(20)])
    flat = u_TB.flatten()
    assert float(flat.min()) >= 0 and float(flat.max()) < 1
    assert chi_square_is_plausible(torch.histc(flat, 50, 0, 1), torch.full((50,), len(flat) / 50))
    centred = u_TB - 0.5
    for other in (centred.roll(1, 0), centred.roll(1, 1)):
        assert abs(float((centred * other).mean()) * 12) < 5 / math.sqrt(flat.numel())
    assert len(flat.unique()) == len(flat)


@pytest.mark.parametrize(
    ("options", "match"), (({"temperature": -1}, "temperature"), ({"top_p": 0}, "top_p"), ({"max_new_tokens": 0}, "max_new_tokens"))
)
def test_parameters_without_meaning_are_refused(options: dict, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        SamplingParams(**options)
