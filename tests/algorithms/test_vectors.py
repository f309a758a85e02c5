"""The algorithms against independently computed float64 reference values and gradients."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlmca.algorithms import group_advantages, kl, policy_loss

VECTORS: dict[str, Any] = json.loads((Path(__file__).parents[1] / "fixtures" / "rl_arithmetic.json").read_text())
TOKEN: dict[str, Any] = {"advantages": "adv_token", "clip_low": 0.2, "clip_high": 0.2, "kind": "ppo"}
SEQUENCE: dict[str, Any] = {"advantages": "adv_sequence", "clip_low": 0.2, "clip_high": 0.2}

POLICY: dict[str, dict[str, Any]] = {
    "ppo clip 0.2/0.2, token advantages, token_mean": {**TOKEN, "loss_agg": "token_mean"},
    "ppo clip 0.2/0.2, token advantages, seq_mean_token_mean": {**TOKEN, "loss_agg": "seq_mean_token_mean"},
    "ppo clip 0.2/0.2, token advantages, seq_mean_token_sum": {**TOKEN, "loss_agg": "seq_mean_token_sum"},
    "ppo clip 0.2/0.2, token advantages, seq_mean_token_sum_norm const 7": {
        **TOKEN,
        "loss_agg": "seq_mean_token_sum_norm",
        "loss_agg_constant": 7,
    },
    "grpo clip 0.2/0.2, sequence advantages, seq_mean_token_mean": {**SEQUENCE, "loss_agg": "seq_mean_token_mean"},
    "dapo clip 0.2/0.28, sequence advantages, token_mean": {**SEQUENCE, "clip_high": 0.28, "loss_agg": "token_mean"},
    "dual clip c=3, sequence advantages, token_mean": {**SEQUENCE, "dual_clip": 3.0, "loss_agg": "token_mean"},
    "dr_grpo clip 0.2/0.2, sum over tokens / (B * 7)": {**SEQUENCE, "loss_agg": "seq_mean_token_sum_norm", "loss_agg_constant": 7},
    "grpo + 0.1*k3, seq_mean_token_mean": {**SEQUENCE, "loss_agg": "seq_mean_token_mean", "kl_coef": 0.1, "kl_kind": "k3"},
}
KL = {f"kl {kind}(new || ref), token_mean": kind for kind in ("k1", "abs", "k2", "k3")}
PRECISIONS = [(torch.float64, 1e-10), (torch.float32, 1e-5)]


def given(name: str, dtype: torch.dtype) -> Tensor:
    return torch.tensor(VECTORS["inputs"][name], dtype=dtype)


def check(loss: Tensor, leaf: Tensor, want: dict[str, Any], dtype: torch.dtype, tolerance: float) -> None:
    loss.backward()
    assert leaf.grad is not None and loss.dtype == dtype
    torch.testing.assert_close(loss.detach(), torch.tensor(want["loss"], dtype=dtype), rtol=0, atol=tolerance)
    torch.testing.assert_close(leaf.grad, torch.tensor(want["grad"], dtype=dtype), rtol=0, atol=tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS)
@pytest.mark.parametrize("name", POLICY)
def test_policy_loss(name: str, dtype: torch.dtype, tolerance: float) -> None:
    options = dict(POLICY[name])
    logp = given("new_logp", dtype).requires_grad_()
    if "kl_coef" in options:
        options["ref_logp"] = given("ref_logp", dtype)
    options["advantages"] = given(options["advantages"], dtype)
    loss, _ = policy_loss(logp, given("old_logp", dtype), mask=given("mask", dtype), **options)
    check(loss, logp, VECTORS["policy_losses"][name], dtype, tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS)
@pytest.mark.parametrize("name", KL)
def test_kl(name: str, dtype: torch.dtype, tolerance: float) -> None:
    logp = given("new_logp", dtype).requires_grad_()
    mask = given("mask", dtype)
    loss = (kl(logp, given("ref_logp", dtype), kind=KL[name]) * mask).sum() / mask.sum()  # type: ignore[arg-type]
    check(loss, logp, VECTORS["policy_losses"][name], dtype, tolerance)


@pytest.mark.parametrize("std", ["population", "sample", "none"])
def test_group_advantages(std: Any) -> None:
    v = VECTORS["group_advantages"]
    for dtype, tolerance in PRECISIONS:
        got = group_advantages(torch.tensor(v["rewards"], dtype=dtype), torch.tensor(v["group_ids"]), std=std, eps=v["eps"])
        assert got.dtype == dtype
        torch.testing.assert_close(got, torch.tensor(v[std], dtype=dtype), rtol=0, atol=tolerance)


def test_every_entry_of_this_version_is_checked() -> None:
    """What the file holds beyond these belongs to losses that this version does not have."""
    later = ("cispo", "gspo", "reinforce (")
    assert set(POLICY) | set(KL) == {name for name in VECTORS["policy_losses"] if not name.startswith(later)}
