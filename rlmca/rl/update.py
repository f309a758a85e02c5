"""From samples with advantages to optimizer steps: the second half of a step."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from rlmca.algorithms import PolicyLoss, PolicyOptions, RolloutCorrection
from rlmca.config import RunConfig
from rlmca.rl.baselines import Reference, with_baselines
from rlmca.rl.experience import uniform_groups
from rlmca.run.session import average
from rlmca.types import Sample, batch_of_samples
from rlmca.workers import WorkerGroup


def policy_options(cfg: RunConfig, kl_coef: float | None = None) -> PolicyOptions:
    """The loss that the YAML describes; log-probs are taken at the sampling temperature.

    `kl_coef`: in place of the YAML's, where it is adaptive. A KL that is in the reward is none of the loss.
    """
    rl = cfg.rl
    cispo, coef = rl.policy_loss == "cispo", rl.kl_coef if kl_coef is None else kl_coef
    return PolicyOptions(
        kind=rl.policy_loss,  # type: ignore[arg-type]
        clip_low=None if cispo else rl.clip_ratio_low,
        clip_high=rl.clip_ratio_high,
        dual_clip=rl.dual_clip,
        cispo_cap=rl.cispo_cap,
        cispo_floor=1 - rl.clip_ratio_low if cispo and rl.clip_ratio_low is not None else None,
        correction=_correction(cfg),
        loss_agg=rl.loss_agg,  # type: ignore[arg-type]
        loss_agg_constant=(rl.loss_agg_constant or cfg.generation.max_new_tokens) if rl.loss_agg == "seq_mean_token_sum_norm" else None,
        kl_coef=coef if rl.kl_in == "loss" else 0.0,
        kl_kind=rl.kl_estimator if rl.kl_in == "loss" else "k3",  # type: ignore[arg-type]
        entropy_coef=rl.entropy_coef,
        old_logp=rl.old_logp,  # type: ignore[arg-type]
        temperature=cfg.generation.temperature,
    )


def _correction(cfg: RunConfig) -> RolloutCorrection | None:
    rl = cfg.rl
    if rl.rollout_correction == "none":
        return None
    bounds: dict[str, Any] = {}
    if rl.rollout_correction_cap is not None:
        bounds["cap"] = rl.rollout_correction_cap
    if rl.rollout_correction_range:
        bounds["range"] = tuple(rl.rollout_correction_range)
    return RolloutCorrection(rl.rollout_correction, **bounds)  # type: ignore[arg-type]


def trainable_samples(samples: Sequence[Sample], cfg: RunConfig) -> list[Sample]:
    """The samples an update learns from: valid, with at least one reply token, and by request only those with a signal."""
    silent = uniform_groups(samples) if cfg.rl.drop_zero_std_groups else set()
    return [
        s for s in samples if s.reward is not None and s.reply_ids and s.group not in silent and not (cfg.rl.mask_truncated and s.truncated)
    ]


def mini_batches(samples: Sequence[Sample], number: int, seed: str) -> list[list[Sample]]:
    """Whole groups dealt over `number` optimizer steps in seeded random order, sizes as equal as groups allow.

    Fewer groups than steps give fewer, never empty, mini-batches.
    """
    groups: dict[int, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.group, []).append(sample)
    order = sorted(groups)
    random.Random(seed).shuffle(order)
    dealt = [order[i::number] for i in range(number)]
    return [[sample for group in part for sample in groups[group]] for part in dealt if part]


def update_policy(
    policy: WorkerGroup,
    reference: Reference | None,
    samples: Sequence[Sample],
    cfg: RunConfig,
    *,
    step: int,
    learning_rate: float,
    kl_coef: float | None = None,
) -> dict[str, float]:
    """All optimizer steps of one rollout; returns metrics averaged over them. `kl_coef`: see `policy_options`.

    With `early_stop_kl` the first step whose approximate KL is beyond it is not taken, and none after it. Baseline of the
    ratio: with `old_logp: trainer` the log-probs of the policy before its first update. The first mini-batch needs no
    forward for it, its own update's forward is that policy (the loss detaches it); the others do.
    """
    rl = cfg.rl
    loss = PolicyLoss(policy_options(cfg, kl_coef))
    chosen = trainable_samples(samples, cfg)
    number = cfg.rl.rollout_batch_size // (rl.mini_batch_size or cfg.rl.rollout_batch_size)
    batches = [batch_of_samples(part) for part in mini_batches(chosen, number, f"{cfg.train.seed}/{step}")]
    batches = [with_baselines(b, i, policy, reference, cfg) for i, b in enumerate(batches)]
    collected: list[Mapping[str, float]] = []
    limits = None if rl.early_stop_kl is None else {"approx_kl": rl.early_stop_kl}
    for batch in batches * rl.updates_per_rollout:
        collected.append(policy.train_batch(batch, loss, learning_rate, limits))
        if collected[-1].get("stopped"):
            break
    metrics = average(collected) if collected else {"loss": 0.0, "grad_norm": 0.0}
    if collected and rl.old_logp == "rollout":
        # only the first optimizer step still sees the policy that the rollout engine sampled from
        metrics |= {name: value for name, value in collected[0].items() if name.startswith("logp_gap")}
    stopped = metrics.pop("stopped", None)
    if stopped is not None:
        metrics["early_stopped"] = float(stopped > 0)
    metrics["updates"] = float(sum(m["skipped"] == 0.0 for m in collected))
    metrics["skipped"] = float(sum(m["skipped"] for m in collected if not m.get("stopped"))) if collected else 1.0
    metrics["used_samples"] = len(chosen) / len(samples)
    return metrics
