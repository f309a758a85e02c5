"""From rewards to advantages: those of a reply, or of each of its tokens, with the KL in the reward where it belongs there.

Shape legend: B replies, T reply tokens, N reply tokens of all replies in a row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from rlmca.algorithms import group_advantages, kl, leave_one_out, reinforce_plus_plus
from rlmca.config import RunConfig
from rlmca.rl.baselines import Reference
from rlmca.types import Sample, batch_of_samples, pad_rows
from rlmca.workers import WorkerGroup


def make_advantages(
    samples: Sequence[Sample], policy: WorkerGroup, reference: Reference | None, cfg: RunConfig, *, kl_coef: float
) -> dict[str, float]:
    """Sets `advantage` (token-level algorithms: `advantages` too) of every sample from its reward; returns metrics.

    Samples without a valid reward or without a token stay out of all statistics and get 0. With `kl_in: reward` a token's
    reward is -kl_coef times its KL, the reply's reward comes with the last one, and groups compare the sums; this needs a
    forward of the policy (unless `old_logp: rollout`) and of the reference, kept in the samples for the update.
    """
    rl = cfg.rl
    metrics: dict[str, float] = {}
    for sample in samples:
        sample.advantage, sample.advantages = 0.0, None
    counted = [s for s in samples if s.reward is not None and s.reply_ids]
    if not counted:
        return metrics
    penalties: list[list[float]] | None = None
    if rl.kl_rewarded:
        if reference is None:
            raise ValueError("kl_in: reward needs a reference")
        add_log_probs(counted, policy, reference, cfg)
        penalties = token_kl(counted, cfg)
        metrics["reward_kl"] = kl_coef * sum(map(sum, penalties)) / len(counted)
    if rl.token_level:
        _of_tokens(counted, penalties, cfg, kl_coef)
    else:
        _of_replies(counted, penalties, cfg, kl_coef)
    return metrics | statistics(counted)


def add_log_probs(samples: Sequence[Sample], policy: WorkerGroup, reference: Reference, cfg: RunConfig) -> None:
    """Sets `ref_logp` and, unless the baseline is the rollout's, `old_logp` of the samples, at the sampling temperature."""
    batch, temperature = batch_of_samples(samples), cfg.generation.temperature
    if cfg.rl.old_logp == "trainer":
        for sample, row in zip(samples, policy.log_probs(batch, temperature=temperature).logp_BT.float().cpu(), strict=True):
            sample.old_logp = row[len(sample.prompt_ids) : sample.length].tolist()
    for sample, row in zip(samples, reference.log_probs(batch, temperature=temperature).logp_BT.float().cpu(), strict=True):
        sample.ref_logp = row[len(sample.prompt_ids) : sample.length].tolist()


def token_kl(samples: Sequence[Sample], cfg: RunConfig) -> list[list[float]]:
    """The estimate of the KL at every reply token of the policy that the rollout came from."""
    old_N = _flat([s.reply_logp if s.old_logp is None else s.old_logp for s in samples])
    ref_N = _flat([s.ref_logp or [] for s in samples])
    kl_N = kl(old_N, ref_N, kind=cfg.rl.kl_estimator)  # type: ignore[arg-type]
    return [part.tolist() for part in kl_N.split([len(s.reply_ids) for s in samples])]


def _of_replies(samples: Sequence[Sample], penalties: list[list[float]] | None, cfg: RunConfig, kl_coef: float) -> None:
    rl, groups = cfg.rl, [s.group for s in samples]
    rewards: list[float | None] = [s.reward for s in samples]
    if penalties is not None:
        taken = [float(s.reward or 0.0) - kl_coef * sum(row) for s, row in zip(samples, penalties, strict=True)]
        rewards = [reward if math.isfinite(reward) else None for reward in taken]
    if rl.advantage == "rloo":
        advantage_B = leave_one_out(rewards, groups)
    else:
        std = rl.advantage_std if rl.advantage == "grpo" else "none"
        advantage_B = group_advantages(rewards, groups, std=std, eps=rl.advantage_eps)  # type: ignore[arg-type]
    for sample, advantage in zip(samples, _cut(advantage_B, rl.advantage_clip).tolist(), strict=True):
        sample.advantage = advantage


def _of_tokens(samples: Sequence[Sample], penalties: list[list[float]] | None, cfg: RunConfig, kl_coef: float) -> None:
    rl, lengths = cfg.rl, [len(s.reply_ids) for s in samples]
    T = max(lengths)
    # whitened over what is trained on, and nothing else
    live_B = torch.tensor([not (rl.mask_truncated and s.truncated) for s in samples])
    _, advantage_BT = reinforce_plus_plus(
        [s.reward for s in samples],
        (torch.arange(T) < torch.tensor(lengths)[:, None]) & live_B[:, None],
        kl=None if penalties is None else pad_rows(penalties, dtype=torch.float32, width=T),
        kl_coef=0.0 if penalties is None else kl_coef,
        gamma=rl.gamma,
        group_ids=[s.group for s in samples] if rl.advantage == "reinforce_plus_plus_baseline" else None,
    )
    for sample, row in zip(samples, _cut(advantage_BT, rl.advantage_clip).tolist(), strict=True):
        sample.advantages = row[: len(sample.reply_ids)]
        sample.advantage = sum(sample.advantages) / len(sample.advantages)


def statistics(samples: Sequence[Sample]) -> dict[str, float]:
    """Mean, spread and largest size of the advantages of all reply tokens."""
    rows = [[s.advantage] * len(s.reply_ids) if s.advantages is None else s.advantages for s in samples]
    advantage_N = _flat(rows)
    return {
        "advantage": float(advantage_N.mean()),
        "advantage_std": float(advantage_N.std(correction=0)),
        "advantage_abs_max": float(advantage_N.abs().max()),
    }


def _cut(advantages: Tensor, bound: float | None) -> Tensor:
    return advantages if bound is None else advantages.clamp(-bound, bound)


def _flat(rows: Sequence[Sequence[float]]) -> Tensor:
    return torch.tensor([value for row in rows for value in row], dtype=torch.float64)
