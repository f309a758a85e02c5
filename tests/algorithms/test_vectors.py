"""The algorithms against independently computed float64 reference values and gradients; every entry of the file is here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlmca.algorithms import (
    RolloutCorrection,
    bradley_terry,
    gae,
    group_advantages,
    kl,
    leave_one_out,
    policy_loss,
    preference_loss,
    reinforce_plus_plus,
    value_loss,
    vector_mse,
    vector_rewards,
    whiten,
)
from rlmca.algorithms.correction import correction_ratio, correction_weights
from rlmca.algorithms.numeric import live_index
from rlmca.models.logprobs import token_log_probs

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
    "cispo ratio capped at 1+0.28 only (no lower bound), token_mean": {
        **SEQUENCE,
        "kind": "cispo",
        "clip_high": 0.28,
        "loss_agg": "token_mean",
    },
    "cispo absolute cap 5.0 (MiniMind), seq_mean_token_mean": {
        **SEQUENCE,
        "kind": "cispo",
        "cispo_cap": 5.0,
        "loss_agg": "seq_mean_token_mean",
    },
    "gspo clip 3e-4/4e-4, seq_mean_token_mean": {"advantages": "adv_sequence", "kind": "gspo", "clip_low": 3e-4, "clip_high": 4e-4},
    "gspo clip 0.2/0.2, seq_mean_token_mean": {**SEQUENCE, "kind": "gspo", "loss_agg": "seq_mean_token_mean"},
    "gspo_token clip 0.2/0.2, token advantages, seq_mean_token_mean": {
        **TOKEN,
        "kind": "gspo_token",
        "loss_agg": "seq_mean_token_mean",
    },
    "reinforce (on-policy, Nemotron-Cascade form), sequence advantages, token_mean": {
        **SEQUENCE,
        "kind": "reinforce",
        "loss_agg": "token_mean",
    },
    "dr_grpo clip 0.2/0.2, sum over tokens / (B * 7)": {**SEQUENCE, "loss_agg": "seq_mean_token_sum_norm", "loss_agg_constant": 7},
    "grpo + 0.1*k3, seq_mean_token_mean": {**SEQUENCE, "loss_agg": "seq_mean_token_mean", "kl_coef": 0.1, "kl_kind": "k3"},
}
KL = {f"kl {kind}(new || ref), token_mean": kind for kind in ("k1", "abs", "k2", "k3")}
PREFERENCE: dict[str, dict[str, Any]] = {
    "dpo_sigmoid_beta0p1": {"kind": "sigmoid", "beta": 0.1},
    "dpo_label_smoothing_0p1": {"kind": "sigmoid", "beta": 0.1, "label_smoothing": 0.1},
    "ipo_beta0p1_mean_logps": {"kind": "ipo", "beta": 0.1},
    "simpo_beta2_gamma0p5": {"kind": "simpo", "beta": 2.0, "simpo_gamma": 0.5},
    "orpo_beta0p1": {"kind": "orpo", "beta": 0.1},
}
in_both = pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])


def tensor(value: Any, dtype: torch.dtype) -> Tensor:
    return torch.tensor(value, dtype=dtype)


def given(name: str, dtype: torch.dtype) -> Tensor:
    return tensor(VECTORS["inputs"][name], dtype)


def close(got: Tensor, want: Any, dtype: torch.dtype, tolerance: float) -> None:
    assert got.dtype == dtype
    torch.testing.assert_close(got.detach(), tensor(want, dtype), rtol=0, atol=tolerance)


def check(loss: Tensor, leaf: Tensor, want: dict[str, Any], dtype: torch.dtype, tolerance: float) -> None:
    loss.backward()
    assert leaf.grad is not None
    close(loss, want["loss"], dtype, tolerance)
    close(leaf.grad, want["grad"], dtype, tolerance)


@in_both
@pytest.mark.parametrize("name", POLICY)
def test_policy_loss(name: str, dtype: torch.dtype, tolerance: float) -> None:
    options = dict(POLICY[name])
    logp = given("new_logp", dtype).requires_grad_()
    if "kl_coef" in options:
        options["ref_logp"] = given("ref_logp", dtype)
    options["advantages"] = given(options["advantages"], dtype)
    loss, _ = policy_loss(logp, given("old_logp", dtype), mask=given("mask", dtype), **options)
    check(loss, logp, VECTORS["policy_losses"][name], dtype, tolerance)


@in_both
@pytest.mark.parametrize("name", KL)
def test_kl(name: str, dtype: torch.dtype, tolerance: float) -> None:
    logp = given("new_logp", dtype).requires_grad_()
    mask = given("mask", dtype)
    loss = (kl(logp, given("ref_logp", dtype), kind=KL[name]) * mask).sum() / mask.sum()  # type: ignore[arg-type]
    check(loss, logp, VECTORS["policy_losses"][name], dtype, tolerance)


@in_both
@pytest.mark.parametrize(("name", "kind"), [("tis_cap2", "tis"), ("icepop_mask_0p5_2", "icepop")])
def test_rollout_correction(name: str, kind: Any, dtype: torch.dtype, tolerance: float) -> None:
    v, mask = VECTORS["rollout_correction"], given("mask", dtype).bool()
    index = live_index(mask)
    old, rollout = given("old_logp", dtype).view(-1)[index], tensor(v["rollout_logp"], dtype).view(-1)[index]
    ratio = correction_ratio(old, rollout, mask, index, by_sequence=False)
    got = torch.zeros(mask.numel(), dtype=dtype).index_copy(0, index, correction_weights(ratio, RolloutCorrection(kind)))
    close(got.view(mask.shape), v[name], dtype, tolerance)


@in_both
def test_corrected_policy_loss(dtype: torch.dtype, tolerance: float) -> None:
    v, logp = VECTORS["rollout_correction"], given("new_logp", dtype).requires_grad_()
    loss, _ = policy_loss(
        logp, given("old_logp", dtype), given("adv_sequence", dtype), given("mask", dtype), kind="grpo", clip_low=0.2, clip_high=0.2,
        rollout_logp=tensor(v["rollout_logp"], dtype), correction=RolloutCorrection("tis", cap=2.0), loss_agg="token_mean",
    )  # fmt: skip
    check(loss, logp, v["grpo_tis_cap2_token_mean"], dtype, tolerance)


@in_both
@pytest.mark.parametrize("name", ["population", "sample", "none", "leave_one_out"])
def test_group_advantages(name: Any, dtype: torch.dtype, tolerance: float) -> None:
    v = VECTORS["group_advantages"]
    rewards, groups = tensor(v["rewards"], dtype), torch.tensor(v["group_ids"])
    got = leave_one_out(rewards, groups) if name == "leave_one_out" else group_advantages(rewards, groups, std=name, eps=v["eps"])
    close(got, v[name], dtype, tolerance)


@in_both
@pytest.mark.parametrize("number", range(len(VECTORS["gae"])))
def test_gae(number: int, dtype: torch.dtype, tolerance: float) -> None:
    v = VECTORS["gae"][number]
    mask = torch.tensor(v["mask"])
    junk = mask == 0
    rewards, values = (tensor(v[name], dtype).masked_fill(junk, float("nan")) for name in ("rewards", "values"))
    advantages, returns = gae(rewards, values, mask, gamma=v["gamma"], lam=v["lam"])
    close(advantages, v["advantages"], dtype, tolerance)
    close(returns, v["returns"], dtype, tolerance)


@in_both
@pytest.mark.parametrize("name", ["unbiased_eps1e8", "biased_eps1e8"])
def test_whiten(name: str, dtype: torch.dtype, tolerance: float) -> None:
    v = VECTORS["whiten"]
    close(whiten(tensor(v["values"], dtype), torch.tensor(v["mask"]), unbiased=name == "unbiased_eps1e8"), v[name], dtype, tolerance)


@in_both
def test_value_loss(dtype: torch.dtype, tolerance: float) -> None:
    v = VECTORS["value_loss"]
    values = tensor(v["values"], dtype).requires_grad_()
    loss, metrics = value_loss(values, tensor(v["old_values"], dtype), tensor(v["returns"], dtype), torch.tensor(v["mask"]), clip=v["clip"])
    check(loss, values, v, dtype, tolerance)
    assert float(metrics["value_clip_fraction"]) == pytest.approx(v["clip_fraction"], abs=1e-12)


@in_both
def test_reinforce_plus_plus(dtype: torch.dtype, tolerance: float) -> None:
    v = VECTORS["reinforce_plus_plus"]
    each = kl(given("old_logp", dtype), given("ref_logp", dtype), kind=v["kl"])
    rewards = tensor(v["outcome_rewards"], dtype)
    returns, advantages = reinforce_plus_plus(rewards, given("mask", dtype), kl=each, kl_coef=v["kl_coef"], gamma=v["gamma"])
    close(returns, v["returns"], dtype, tolerance)
    close(advantages, v["advantages_unbiased_eps1e8"], dtype, tolerance)


@in_both
@pytest.mark.parametrize("name", PREFERENCE)
def test_preference(name: str, dtype: torch.dtype, tolerance: float) -> None:
    v = {key: tensor(value, dtype) for key, value in VECTORS["preference"].items()}
    four = [v[key] for key in ("policy_chosen", "policy_rejected", "ref_chosen", "ref_rejected")]
    loss, _ = preference_loss(*four, chosen_len=v["chosen_len"], rejected_len=v["rejected_len"], **PREFERENCE[name])
    close(loss, VECTORS["preference"][name], dtype, tolerance)


@in_both
def test_bradley_terry(dtype: torch.dtype, tolerance: float) -> None:
    v = VECTORS["preference"]
    loss, accuracy = bradley_terry(tensor(v["scores_chosen"], dtype), tensor(v["scores_rejected"], dtype))
    close(loss, v["bradley_terry"], dtype, tolerance)
    close(accuracy, v["accuracy"], dtype, tolerance)


@in_both
def test_vector_mse(dtype: torch.dtype, tolerance: float) -> None:
    v = VECTORS["mse_nrm"]
    pair = tensor(v["predicted"], dtype), tensor(v["target"], dtype)
    close(vector_mse(*pair, scale=v["mse_scale"]), v["mse"], dtype, tolerance)
    close(vector_rewards(*pair)[0], v["reward"], dtype, tolerance)
    close(vector_rewards(*pair, log=True)[0], v["log_reward"], dtype, tolerance)


@in_both
@pytest.mark.parametrize("temperature", VECTORS["logprob_entropy"]["at_temperature"])
def test_logprob_and_entropy(temperature: str, dtype: torch.dtype, tolerance: float) -> None:
    v = VECTORS["logprob_entropy"]
    want = v["at_temperature"][temperature]
    logits = tensor(v["logits"], dtype)
    logp, entropy = token_log_probs(logits, torch.tensor(v["tokens"]), vocab_size=v["real_vocab"], temperature=float(temperature))
    close(logp, want["logp"], dtype, tolerance)
    close(entropy, want["entropy"], dtype, tolerance)


CHECKED: dict[str, set[str]] = {
    "inputs": {"old_logp", "new_logp", "ref_logp", "mask", "adv_sequence", "adv_token"},
    "policy_losses": {*POLICY, *KL},
    "rollout_correction": {"rollout_logp", "tis_cap2", "icepop_mask_0p5_2", "grpo_tis_cap2_token_mean"},
    "group_advantages": {"rewards", "group_ids", "eps", "population", "sample", "none", "leave_one_out"},
    "whiten": {"values", "mask", "unbiased_eps1e8", "biased_eps1e8"},
    "value_loss": {"values", "old_values", "returns", "mask", "clip", "loss", "grad", "clip_fraction"},
    "reinforce_plus_plus": {"outcome_rewards", "kl_coef", "kl", "gamma", "returns", "advantages_unbiased_eps1e8"},
    "preference": {
        "policy_chosen", "policy_rejected", "ref_chosen", "ref_rejected", "chosen_len", "rejected_len", "scores_chosen", "scores_rejected",
        "bradley_terry", "accuracy", *PREFERENCE,
    },
    "mse_nrm": {"predicted", "target", "mse_scale", "mse", "reward", "log_reward", "note"},
    "logprob_entropy": {"logits", "real_vocab", "tokens", "at_temperature"},
}  # fmt: skip


def test_every_entry_is_checked() -> None:
    assert {name: set(section) for name, section in VECTORS.items() if name != "gae"} == CHECKED
    assert all(set(case) == {"rewards", "values", "mask", "gamma", "lam", "advantages", "returns"} for case in VECTORS["gae"])
