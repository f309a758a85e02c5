"""Options of the policy loss, and which of them contradict each other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from rlmca.algorithms.aggregate import LossAgg
from rlmca.algorithms.correction import RolloutCorrection
from rlmca.algorithms.kl import KlKind

PolicyKind = Literal["ppo", "grpo", "cispo", "gspo", "gspo_token", "reinforce"]
CLIPPED = ("ppo", "grpo", "gspo", "gspo_token")
SEQUENCE_RATIO = ("gspo", "gspo_token")


@dataclass(frozen=True)
class PolicyOptions:
    """Options of the policy loss; contradictory ones raise ValueError here, an option that the kind does not read included.

    kind: see `objectives`. `ppo` and `grpo` are one formula; they differ in what presets choose for the aggregation.
    """

    kind: PolicyKind = "grpo"
    clip_low: float | None = None
    """Clipped kinds: the ratio is bounded below by 1 - clip_low. None: 0.2, gspo and gspo_token 3e-4."""
    clip_high: float | None = None
    """Clipped kinds, and cispo without `cispo_cap`: bounded above by 1 + clip_high. None: 0.2, gspo and gspo_token 4e-4."""
    dual_clip: float | None = None
    """Clipped kinds, c > 1: for A < 0 the loss is at most -c A (Dual-clip PPO, arXiv 1912.09729, eq. 5)."""
    cispo_cap: float | None = None
    """cispo: largest ratio, absolute; None: 1 + clip_high."""
    cispo_floor: float | None = None
    """cispo: smallest ratio, absolute; None: no lower bound."""
    correction: RolloutCorrection | None = None
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
        wrong = [*self._of_the_kind(), *self._bounds(), *self._aggregation(), *self._rest()]
        if wrong:
            raise ValueError("; ".join(wrong))

    @property
    def bounds(self) -> tuple[float, float]:
        """Least and largest ratio that the loss uses."""
        default_low, default_high = (3e-4, 4e-4) if self.kind in SEQUENCE_RATIO else (0.2, 0.2)
        top = 1 + (default_high if self.clip_high is None else self.clip_high)
        if self.kind in CLIPPED:
            return 1 - (default_low if self.clip_low is None else self.clip_low), top
        if self.kind == "cispo":
            return self.cispo_floor or 0.0, top if self.cispo_cap is None else self.cispo_cap
        return 0.0, float("inf")

    def _of_the_kind(self) -> Iterator[str]:
        kinds = get_args(PolicyKind)
        if self.kind not in kinds:
            yield f"policy loss {self.kind!r} is unknown; write one of {', '.join(kinds)}"
            return
        if self.kind not in CLIPPED:
            instead = "cispo_floor" if self.kind == "cispo" else "no clip option"
            if self.clip_low is not None:
                yield f"clip_low {self.clip_low} has no meaning with policy loss {self.kind}; write {instead}"
            if self.dual_clip is not None:
                yield f"dual_clip {self.dual_clip} has no meaning with policy loss {self.kind}, which bounds no loss; leave it out"
        if self.kind != "cispo":
            for name in ("cispo_cap", "cispo_floor"):
                if getattr(self, name) is not None:
                    yield f"{name} {getattr(self, name)} has no meaning with policy loss {self.kind}; leave it out or use cispo"
        elif self.cispo_cap is not None and self.clip_high is not None:
            yield f"cispo_cap {self.cispo_cap} and clip_high {self.clip_high} are two upper bounds of one ratio; leave one of them out"
        if self.kind == "reinforce":
            if self.clip_high is not None:
                yield f"clip_high {self.clip_high} has no meaning with policy loss reinforce, whose ratio is 1; leave it out"
            if self.kl_coef:
                yield f"kl_coef {self.kl_coef} in the loss is refused with policy loss reinforce; put the KL into the reward or write 0"

    def _bounds(self) -> Iterator[str]:
        if self.clip_low is not None and not 0 <= self.clip_low <= 1:
            yield f"clip_low {self.clip_low} must lie in [0, 1]: the ratio is bounded below by 1 - clip_low"
        if self.clip_high is not None and not self.clip_high >= 0:
            yield f"clip_high {self.clip_high} must not be negative: the ratio is bounded above by 1 + clip_high"
        if self.dual_clip is not None and not self.dual_clip > 1:
            yield f"dual_clip {self.dual_clip} must exceed 1, or be left out"
        if self.cispo_cap is not None and not self.cispo_cap > 0:
            yield f"cispo_cap {self.cispo_cap} must be positive: it is the largest ratio itself, not its distance from 1"
        if self.cispo_floor is not None and not (self.cispo_floor >= 0 and self.cispo_floor <= self.bounds[1]):
            yield f"cispo_floor {self.cispo_floor} must lie between 0 and the upper bound of the ratio, {self.bounds[1]}"

    def _aggregation(self) -> Iterator[str]:
        aggregations = get_args(LossAgg)
        if self.loss_agg not in aggregations:
            yield f"loss_agg {self.loss_agg!r} is unknown; write one of {', '.join(aggregations)}"
        normed = self.loss_agg == "seq_mean_token_sum_norm"
        if normed and not (self.loss_agg_constant is not None and self.loss_agg_constant > 0):
            yield "loss_agg seq_mean_token_sum_norm needs a positive loss_agg_constant, for example max_new_tokens"
        if not normed and self.loss_agg_constant is not None:
            yield f"loss_agg_constant has no meaning with loss_agg {self.loss_agg}; leave it out or use seq_mean_token_sum_norm"

    def _rest(self) -> Iterator[str]:
        if self.kl_kind not in ("k2", "k3"):
            yield f"KL estimator {self.kl_kind!r} in the loss is refused: its gradient is not that of the KL; write k2 or k3"
        if not self.kl_coef >= 0:
            yield f"kl_coef {self.kl_coef} must not be negative: the policy would be driven away from the reference"
        if self.old_logp not in ("trainer", "rollout"):
            yield f"old_logp {self.old_logp!r} is unknown; write trainer or rollout"
        elif self.old_logp == "rollout" and self.correction is not None:
            yield f"rollout correction {self.correction.kind} needs old_logp: trainer; with rollout the ratio corrects already"
        if not self.temperature > 0:
            yield f"temperature {self.temperature} must be positive: log-probabilities are taken at it"
