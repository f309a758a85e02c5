"""Losses of this package on the counts/terms contract: supervised cross-entropy and the clipped policy loss.

Shape legend: B rows, T token positions, N live tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rlmca.algorithms.aggregate import LossAgg, mask_counts, token_weights
from rlmca.algorithms.contract import Counts, Metrics, TokenOutputs
from rlmca.algorithms.kl import KlKind, kl
from rlmca.algorithms.numeric import clamp_log_ratio, live_index, poison, take
from rlmca.types import Batch

PolicyKind = Literal["ppo", "grpo"]

_KINDS = ("ppo", "grpo")
_AGGREGATIONS = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm")


class SftLoss:
    """Token-weighted cross-entropy: -sum(logp over targets) / number of targets. Metric: `loss`."""

    temperature = 1.0
    needs_entropy = False

    def counts(self, batch: Batch) -> dict[str, Tensor]:
        """`tokens`: targets in the batch."""
        return {"tokens": mask_counts(batch.mask_BT)["tokens"]}

    def terms(self, out: TokenOutputs, batch: Batch, counts: Counts) -> tuple[Tensor, Metrics]:
        """See `contract.Loss.terms`; nan in loss and gradient when a target's log-probability is not finite."""
        logp_N = take(out.logp_BT, live_index(batch.mask_BT))
        total = -logp_N.sum()
        loss = poison(total / counts["tokens"].clamp(min=1).to(total.dtype), logp_N, logp_N)
        return loss, {"loss": (total.detach().double(), mask_counts(batch.mask_BT)["tokens"])}


@dataclass(frozen=True)
class PolicyOptions:
    """Options of the policy loss; contradictory ones raise ValueError here.

    kind: `ppo` and `grpo` are one formula, -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A) (PPO, arXiv
    1707.06347, eq. 7); they differ in what presets choose for the aggregation.
    """

    kind: PolicyKind = "grpo"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    """c > 1: for A < 0 the loss is at most -c A (Dual-clip PPO, arXiv 1912.09729, eq. 5)."""
    loss_agg: LossAgg = "seq_mean_token_mean"
    loss_agg_constant: float | None = None
    """Divisor in place of the length; for `seq_mean_token_sum_norm` only, and needed there."""
    kl_coef: float = 0.0
    kl_kind: KlKind = "k3"
    entropy_coef: float = 0.0
    log_entropy: bool = True
    """Ask the engine for the entropy as a metric also when it is no part of the loss."""
    old_logp: Literal["trainer", "rollout"] = "trainer"
    """Baseline of the ratio: `Batch.old_logp_BT` (absent: the current policy, ratio 1) or `Batch.rollout_logp_BT`."""
    temperature: float = 1.0

    def __post_init__(self) -> None:
        wrong: list[str] = []
        if self.kind not in _KINDS:
            wrong.append(f"policy loss {self.kind!r} is unknown; write one of {', '.join(_KINDS)}")
        if not 0 <= self.clip_low <= 1:
            wrong.append(f"clip_low {self.clip_low} must lie in [0, 1]: the ratio is bounded below by 1 - clip_low")
        if not self.clip_high >= 0:
            wrong.append(f"clip_high {self.clip_high} must not be negative: the ratio is bounded above by 1 + clip_high")
        if self.dual_clip is not None and not self.dual_clip > 1:
            wrong.append(f"dual_clip {self.dual_clip} must exceed 1, or be left out")
        if self.loss_agg not in _AGGREGATIONS:
            wrong.append(f"loss_agg {self.loss_agg!r} is unknown; write one of {', '.join(_AGGREGATIONS)}")
        normed = self.loss_agg == "seq_mean_token_sum_norm"
        if normed and not (self.loss_agg_constant is not None and self.loss_agg_constant > 0):
            wrong.append("loss_agg seq_mean_token_sum_norm needs a positive loss_agg_constant, for example max_new_tokens")
        if not normed and self.loss_agg_constant is not None:
            wrong.append(f"loss_agg_constant has no meaning with loss_agg {self.loss_agg}; leave it out or use seq_mean_token_sum_norm")
        if self.kl_kind not in ("k2", "k3"):
            wrong.append(f"KL estimator {self.kl_kind!r} in the loss is refused: its gradient is not that of the KL; write k2 or k3")
        if not self.kl_coef >= 0:
            wrong.append(f"kl_coef {self.kl_coef} must not be negative: the policy would be driven away from the reference")
        if self.old_logp not in ("trainer", "rollout"):
            wrong.append(f"old_logp {self.old_logp!r} is unknown; write trainer or rollout")
        if not self.temperature > 0:
            wrong.append(f"temperature {self.temperature} must be positive: log-probabilities are taken at it")
        if wrong:
            raise ValueError("; ".join(wrong))


class PolicyLoss:
    """Clipped policy loss + kl_coef * KL(pi || pi_ref) - entropy_coef * entropy, all under one aggregation.

    Reads `advantage_BT`, `old_logp_BT` or `rollout_logp_BT` (`options.old_logp`), `ref_logp_BT` (needed when
    `kl_coef` > 0, otherwise a metric only). Metrics, over live tokens: `loss`, `policy_loss` (aggregated as
    the loss is), `kl` (k3), `kl_k1`, `entropy`, `ratio`, `ratio_max`, `clip_fraction` = `clip_fraction_low`
    (ratio under 1 - clip_low, A < 0) + `clip_fraction_high` (ratio over 1 + clip_high, A > 0), `approx_kl` (half the
    mean square of log ratio), `logp_gap` and `logp_gap_max` (trainer against rollout log-probabilities, absolute; the
    trainer's are the old ones, or the current ones where the old are the rollout's or absent), `nonfinite`.
    """

    def __init__(self, options: PolicyOptions) -> None:
        self.options = options
        self.temperature = options.temperature
        self.needs_entropy = options.log_entropy or options.entropy_coef != 0

    def counts(self, batch: Batch) -> dict[str, Tensor]:
        """`tokens` and `sequences` with at least one live token."""
        return mask_counts(batch.mask_BT)

    def terms(self, out: TokenOutputs, batch: Batch, counts: Counts) -> tuple[Tensor, Metrics]:
        """See `contract.Loss.terms`. Raises ValueError when the batch lacks what the options need."""
        o, index_N = self.options, live_index(batch.mask_BT)
        logp_N = take(out.logp_BT, index_N)

        def needed(name: str, value_BT: Tensor | None, why: str) -> Tensor:
            if value_BT is None:
                raise ValueError(f"{name} is missing: {why}")
            return take(value_BT, index_N)

        def optional(value_BT: Tensor | None) -> Tensor | None:
            return None if value_BT is None else take(value_BT, index_N)

        advantage_N = needed("Batch.advantage_BT", batch.advantage_BT, "every policy loss needs advantages")
        rollout_N = optional(batch.rollout_logp_BT)
        if o.old_logp == "rollout":
            old_N = needed("Batch.rollout_logp_BT", batch.rollout_logp_BT, "old_logp: rollout takes the ratio's baseline from it")
            trainer_N = logp_N.detach()
        else:
            # without old log-probabilities this is the first update: the current policy is the old one
            trainer_N = old_N = logp_N.detach() if batch.old_logp_BT is None else take(batch.old_logp_BT, index_N)
        ref_N = optional(batch.ref_logp_BT)
        if o.kl_coef:
            ref_N = needed("Batch.ref_logp_BT", batch.ref_logp_BT, f"kl_coef is {o.kl_coef}")
        entropy_N = optional(out.entropy_BT)
        if o.entropy_coef:
            entropy_N = needed("TokenOutputs.entropy_BT", out.entropy_BT, f"entropy_coef is {o.entropy_coef}")

        raw_N = logp_N - old_N
        log_ratio_N = clamp_log_ratio(raw_N)
        ratio_N = log_ratio_N.exp()
        policy_N = _clipped(ratio_N, advantage_N, o)
        weight_N = token_weights(batch.mask_BT, index_N, counts, o.loss_agg, o.loss_agg_constant, like=logp_N)

        policy_term = (weight_N * policy_N).sum()
        loss, watched = policy_term, [raw_N, advantage_N]
        if o.kl_coef and ref_N is not None:
            loss = loss + o.kl_coef * (weight_N * kl(logp_N, ref_N, kind=o.kl_kind)).sum()
            watched.append(ref_N)
        if o.entropy_coef and entropy_N is not None:
            loss = loss - o.entropy_coef * (weight_N * entropy_N).sum()
            watched.append(entropy_N)
        loss = poison(loss, logp_N, *watched)

        with torch.no_grad():
            tokens = torch.tensor(float(index_N.shape[0]), dtype=torch.float64, device=logp_N.device)
            # (term * all tokens, tokens here) adds up to the aggregate, whatever its own denominator is
            share = counts["tokens"]
            metrics: Metrics = {"loss": (loss.double() * share, tokens), "policy_loss": (policy_term.double() * share, tokens)}
            sums = _ratio_sums(log_ratio_N, ratio_N, advantage_N, o)
            sums["nonfinite"] = (~torch.stack(watched).isfinite()).any(0)
            if ref_N is not None:
                sums["kl"], sums["kl_k1"] = kl(logp_N, ref_N, kind="k3"), kl(logp_N, ref_N, kind="k1")
            if entropy_N is not None:
                sums["entropy"] = entropy_N
            largest = {"ratio_max": ratio_N}
            if rollout_N is not None:
                largest["logp_gap_max"] = sums["logp_gap"] = (trainer_N - rollout_N).abs()
            metrics.update({name: (value_N.sum(dtype=torch.float64), tokens) for name, value_N in sums.items()})
            metrics.update({name: (_max(value_N), tokens) for name, value_N in largest.items()})
        return loss, metrics


def _clipped(ratio_N: Tensor, advantage_N: Tensor, o: PolicyOptions) -> Tensor:
    """Per-token loss: the pessimistic of plain and clipped objective, bounded for A < 0 when dual_clip is set."""
    gain_N = torch.minimum(ratio_N * advantage_N, ratio_N.clamp(1 - o.clip_low, 1 + o.clip_high) * advantage_N)
    if o.dual_clip is not None:
        gain_N = torch.where(advantage_N < 0, torch.maximum(gain_N, o.dual_clip * advantage_N), gain_N)
    return -gain_N


def _ratio_sums(log_ratio_N: Tensor, ratio_N: Tensor, advantage_N: Tensor, o: PolicyOptions) -> dict[str, Tensor]:
    low_N = (ratio_N < 1 - o.clip_low) & (advantage_N < 0)
    high_N = (ratio_N > 1 + o.clip_high) & (advantage_N > 0)
    return {
        "ratio": ratio_N,
        "clip_fraction": low_N | high_N,
        "clip_fraction_low": low_N,
        "clip_fraction_high": high_N,
        "approx_kl": log_ratio_N.square() / 2,
    }


def _max(value_N: Tensor) -> Tensor:
    """Largest value as float64; 0, the least a ratio or a gap can be, when nothing is live."""
    return (value_N.detach().amax() if value_N.shape[0] else value_N.new_zeros(())).double()


def policy_loss(
    logp: Tensor,
    old_logp: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    *,
    kind: PolicyKind = "grpo",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    rollout_logp: Tensor | None = None,
    loss_agg: LossAgg = "seq_mean_token_mean",
    loss_agg_constant: float | None = None,
    ref_logp: Tensor | None = None,
    kl_coef: float = 0.0,
    kl_kind: KlKind = "k3",
    entropy: Tensor | None = None,
    entropy_coef: float = 0.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """(loss, metrics) of one whole batch, as `PolicyLoss` computes it over pieces.

    logp, old_logp, rollout_logp, ref_logp, entropy: [B, T]; advantages [B, T], or [B] for one per sequence;
    mask [B, T], nonzero at live tokens. `old_logp` None: the current policy, ratio exactly 1.
    """
    options = PolicyOptions(
        kind=kind,
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
        loss_agg=loss_agg,
        loss_agg_constant=loss_agg_constant,
        kl_coef=kl_coef,
        kl_kind=kl_kind,
        entropy_coef=entropy_coef,
    )
    mask_BT = mask.bool()
    B, T = mask_BT.shape
    batch = Batch(
        ids_BT=torch.zeros(B, T, dtype=torch.int64, device=mask.device),
        length_B=torch.full((B,), T, dtype=torch.int64, device=mask.device),
        mask_BT=mask_BT,
        old_logp_BT=old_logp,
        ref_logp_BT=ref_logp,
        rollout_logp_BT=rollout_logp,
        advantage_BT=advantages[:, None].expand(B, T) if advantages.ndim == 1 else advantages,
    )
    pure = PolicyLoss(options)
    loss, metrics = pure.terms(TokenOutputs(logp, entropy), batch, pure.counts(batch))
    return loss, {name: top if name.endswith("_max") else top / bottom.clamp(min=1) for name, (top, bottom) in metrics.items()}
