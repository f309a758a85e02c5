"""From samples with advantages to optimizer steps: the second half of a step."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from rlmca.algorithms.contract import TokenOutputs
from rlmca.algorithms.losses import PolicyLoss, PolicyOptions
from rlmca.config import RunConfig
from rlmca.rl.experience import uniform_groups
from rlmca.run.session import average
from rlmca.types import Batch, Sample, batch_of_samples
from rlmca.workers import WorkerGroup


class Reference(Protocol):
    """What the KL is measured against."""

    def log_probs(self, batch: Batch, *, temperature: float = 1.0) -> TokenOutputs:
        """See `WorkerGroup.log_probs`."""
        ...


@dataclass(frozen=True)
class AtItsStart:
    """The policy as it was when the run started, with the adapter of then or without one: a reference that needs no second
    copy of the weights that the adapter stands beside."""

    policy: WorkerGroup

    def log_probs(self, batch: Batch, *, temperature: float = 1.0) -> TokenOutputs:
        """See `Reference`."""
        return self.policy.log_probs(batch, temperature=temperature, adapter="start")


def policy_options(cfg: RunConfig) -> PolicyOptions:
    """The loss that the YAML describes; log-probs are taken at the sampling temperature."""
    rl = cfg.rl
    return PolicyOptions(
        kind=rl.policy_loss,  # type: ignore[arg-type]
        clip_low=rl.clip_ratio_low,
        clip_high=rl.clip_ratio_high,
        dual_clip=rl.dual_clip,
        loss_agg=rl.loss_agg,  # type: ignore[arg-type]
        loss_agg_constant=(rl.loss_agg_constant or cfg.generation.max_new_tokens) if rl.loss_agg == "seq_mean_token_sum_norm" else None,
        kl_coef=rl.kl_coef,
        kl_kind=rl.kl_estimator,  # type: ignore[arg-type]
        entropy_coef=rl.entropy_coef,
        old_logp=rl.old_logp,  # type: ignore[arg-type]
        temperature=cfg.generation.temperature,
    )


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
) -> dict[str, float]:
    """All optimizer steps of one rollout; returns metrics averaged over them.

    Baseline of the ratio: with `old_logp: trainer` the log-probs of the policy before its first update. The first
    mini-batch needs no forward for it, its own update's forward is that policy (the loss detaches it); the others do.
    """
    rl = cfg.rl
    loss = PolicyLoss(policy_options(cfg))
    chosen = trainable_samples(samples, cfg)
    number = cfg.rl.rollout_batch_size // (rl.mini_batch_size or cfg.rl.rollout_batch_size)
    batches = [batch_of_samples(part) for part in mini_batches(chosen, number, f"{cfg.train.seed}/{step}")]
    batches = [_with_baselines(b, i, policy, reference, cfg) for i, b in enumerate(batches)]
    collected: list[Mapping[str, float]] = []
    for _ in range(rl.updates_per_rollout):
        for batch in batches:
            collected.append(policy.train_batch(batch, loss, learning_rate))
    metrics = average(collected) if collected else {"loss": 0.0, "grad_norm": 0.0}
    if collected and rl.old_logp == "rollout":
        # only the first optimizer step still sees the policy that the rollout engine sampled from
        metrics |= {name: value for name, value in collected[0].items() if name.startswith("logp_gap")}
    metrics["updates"] = float(sum(m["skipped"] == 0.0 for m in collected))
    metrics["skipped"] = float(sum(m["skipped"] for m in collected)) if collected else 1.0
    metrics["used_samples"] = len(chosen) / len(samples)
    return metrics


def _with_baselines(batch: Batch, index: int, policy: WorkerGroup, reference: Reference | None, cfg: RunConfig) -> Batch:
    temperature = cfg.generation.temperature
    if cfg.rl.old_logp == "trainer" and (index > 0 or cfg.rl.updates_per_rollout > 1):
        batch = batch.replace(old_logp_BT=policy.log_probs(batch, temperature=temperature).logp_BT.float().cpu())
    if reference is not None:
        batch = batch.replace(ref_logp_BT=reference.log_probs(batch, temperature=temperature).logp_BT.float().cpu())
    return batch
