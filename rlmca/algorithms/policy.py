"""The policy loss on the counts/terms contract, and as a function of whole tensors.

Shape legend: B rows, T token positions, N live tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlmca.algorithms.aggregate import LossAgg, mask_counts, token_weights
from rlmca.algorithms.contract import Counts, Metrics, TokenOutputs
from rlmca.algorithms.correction import CorrectionKind, RolloutCorrection, correction_metrics, correction_ratio, correction_weights
from rlmca.algorithms.kl import KlKind, kl
from rlmca.algorithms.numeric import live_index, poison, take
from rlmca.algorithms.objectives import objective, ratio_metrics
from rlmca.algorithms.policy_options import CLIPPED, PolicyKind, PolicyOptions
from rlmca.types import Batch


@dataclass(frozen=True)
class _Live:
    """The live tokens of a micro-batch, [N] each; None: not given."""

    index_N: Tensor
    logp_N: Tensor
    old_N: Tensor
    """Baseline of the ratio."""
    trainer_N: Tensor
    """What the trainer says of the policy that sampled."""
    advantage_N: Tensor
    rollout_N: Tensor | None
    ref_N: Tensor | None
    entropy_N: Tensor | None


class PolicyLoss:
    """Policy loss of any kind + kl_coef * KL(pi || pi_ref) - entropy_coef * entropy, all under one aggregation.

    Reads `advantage_BT`, `old_logp_BT` or `rollout_logp_BT` (`options.old_logp`; with a rollout correction both, and it
    weighs the policy term alone), `ref_logp_BT` (needed when `kl_coef` > 0, otherwise a metric only). Metrics, over live
    tokens: `loss`, `policy_loss` (aggregated as the loss is), `kl` (k3), `kl_k1`, `entropy`, `ratio` (of sequences for
    gspo), `ratio_max`, `clip_fraction` = `clip_fraction_low` (ratio under its bound, A < 0) + `clip_fraction_high` (ratio
    over it, A > 0; see `ratio_metrics` for the other kinds), `approx_kl` (half the mean square of log ratio), `nonfinite`;
    given the rollout's log-probabilities also `logp_gap` and `logp_gap_max` (trainer against rollout, absolute; the
    trainer's are the old ones, or the current ones where the old are the rollout's or absent), `correction_ratio_max` and
    those of `correction_metrics`.
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
        o, live = self.options, self._live(out, batch)
        index_N, logp_N = live.index_N, live.logp_N
        found = objective(logp_N, live.old_N, live.advantage_N, batch.mask_BT, index_N, o)
        policy_N, watched = found.loss_N, [logp_N - live.old_N, live.advantage_N]
        correction_N: Tensor | None = None
        if live.rollout_N is not None:
            by_sequence = o.correction is not None and o.correction.by_sequence
            correction_N = correction_ratio(live.trainer_N, live.rollout_N, batch.mask_BT, index_N, by_sequence=by_sequence)
            if o.correction is not None:
                policy_N = policy_N * correction_weights(correction_N, o.correction)
                watched.append(live.trainer_N - live.rollout_N)

        weight_N = token_weights(batch.mask_BT, index_N, counts, o.loss_agg, o.loss_agg_constant, like=logp_N)
        policy_term = (weight_N * policy_N).sum()
        loss = policy_term
        if o.kl_coef and live.ref_N is not None:
            loss = loss + o.kl_coef * (weight_N * kl(logp_N, live.ref_N, kind=o.kl_kind)).sum()
            watched.append(live.ref_N)
        if o.entropy_coef and live.entropy_N is not None:
            loss = loss - o.entropy_coef * (weight_N * live.entropy_N).sum()
            watched.append(live.entropy_N)
        loss = poison(loss, logp_N, *watched)

        with torch.no_grad():
            sums = ratio_metrics(found, live.advantage_N, o)
            sums["nonfinite"] = (~torch.stack(watched).isfinite()).any(0)
            largest = {"ratio_max": found.ratio_N}
            if correction_N is not None and live.rollout_N is not None:
                largest["logp_gap_max"] = sums["logp_gap"] = (live.trainer_N - live.rollout_N).abs()
                largest["correction_ratio_max"] = correction_N
                sums.update(correction_metrics(correction_N, o.correction))
            if live.ref_N is not None:
                sums["kl"], sums["kl_k1"] = kl(logp_N, live.ref_N, kind="k3"), kl(logp_N, live.ref_N, kind="k1")
            if live.entropy_N is not None:
                sums["entropy"] = live.entropy_N
            tokens = torch.tensor(float(index_N.shape[0]), dtype=torch.float64, device=logp_N.device)
            # (term * all tokens, tokens here) adds up to the aggregate, whatever its own denominator is
            share = counts["tokens"]
            metrics: Metrics = {"loss": (loss.double() * share, tokens), "policy_loss": (policy_term.double() * share, tokens)}
            metrics.update({name: (value_N.sum(dtype=torch.float64), tokens) for name, value_N in sums.items()})
            metrics.update({name: (_max(value_N), tokens) for name, value_N in largest.items()})
        return loss, metrics

    def _live(self, out: TokenOutputs, batch: Batch) -> _Live:
        o, index_N = self.options, live_index(batch.mask_BT)
        logp_N = take(out.logp_BT, index_N)

        def optional(name: str, value_BT: Tensor | None, why: str | None = None) -> Tensor | None:
            if value_BT is None and why is not None:
                raise ValueError(f"{name} is missing: {why}")
            return None if value_BT is None else take(value_BT, index_N)

        def needed(name: str, value_BT: Tensor | None, why: str) -> Tensor:
            value_N = optional(name, value_BT, why)
            assert value_N is not None
            return value_N

        advantage_N = needed("Batch.advantage_BT", batch.advantage_BT, "every policy loss needs advantages")
        if o.old_logp == "rollout":
            old_N = needed("Batch.rollout_logp_BT", batch.rollout_logp_BT, "old_logp: rollout takes the ratio's baseline from it")
            trainer_N = logp_N.detach()
        else:
            # without old log-probabilities this is the first update: the current policy is the old one
            trainer_N = old_N = logp_N.detach() if batch.old_logp_BT is None else take(batch.old_logp_BT, index_N)
        corrects = None if o.correction is None else f"rollout correction {o.correction.kind} compares with it"
        return _Live(
            index_N=index_N,
            logp_N=logp_N,
            old_N=old_N.detach(),
            trainer_N=trainer_N.detach(),
            advantage_N=advantage_N,
            rollout_N=optional("Batch.rollout_logp_BT", batch.rollout_logp_BT, corrects),
            ref_N=optional("Batch.ref_logp_BT", batch.ref_logp_BT, f"kl_coef is {o.kl_coef}" if o.kl_coef else None),
            entropy_N=optional("TokenOutputs.entropy_BT", out.entropy_BT, f"entropy_coef is {o.entropy_coef}" if o.entropy_coef else None),
        )


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
    clip_low: float | None = None,
    clip_high: float | None = None,
    dual_clip: float | None = None,
    cispo_cap: float | None = None,
    cispo_floor: float | None = None,
    rollout_logp: Tensor | None = None,
    correction: RolloutCorrection | CorrectionKind | None = None,
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
    mask [B, T], nonzero at live tokens. `old_logp` None: the current policy, ratio exactly 1. `clip_low` and `clip_high`
    can be given for every kind, as callers that compare kinds do: cispo reads `clip_high` only, and only without
    `cispo_cap`; reinforce reads neither. Other options that the kind does not read raise ValueError (`PolicyOptions`).
    `correction`: a kind by its name has the default bounds.
    """
    options = PolicyOptions(
        kind=kind,
        clip_low=clip_low if kind not in ("cispo", "reinforce") else None,
        clip_high=clip_high if kind in CLIPPED or (kind == "cispo" and cispo_cap is None) else None,
        dual_clip=dual_clip,
        cispo_cap=cispo_cap,
        cispo_floor=cispo_floor,
        correction=RolloutCorrection(correction) if isinstance(correction, str) else correction,
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
    return loss, averaged(metrics)


def averaged(metrics: Metrics) -> dict[str, Tensor]:
    """Metrics of a whole batch: sums over their denominators, the `_max` ones as they are."""
    return {name: top if name.endswith("_max") else top / bottom.clamp(min=1) for name, (top, bottom) in metrics.items()}
