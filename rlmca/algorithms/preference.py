"""Losses on preference pairs: DPO and its relatives, with LLaMA-Factory's names and meanings.

With l the log-probability of a reply (summed over its tokens for sigmoid and hinge, their mean for ipo, orpo and simpo)
and D = (l_chosen - l_rejected) of the policy less the same of the reference:
- sigmoid: -(1 - e) log sigmoid(beta D) - e log sigmoid(-beta D) (DPO, arXiv 2305.18290, eq. 7; e label smoothing, eq. 3 of
  Mitchell 2023, "A note on DPO with noisy preferences"). hinge: max(0, 1 - beta D) (SLiC, arXiv 2305.10425).
- ipo: (D - 1 / (2 beta))^2 (arXiv 2310.12036, eq. 17).
- simpo: -log sigmoid(beta (l_chosen - l_rejected) - gamma) (arXiv 2405.14734, eq. 6), no reference.
- orpo: -l_chosen - beta log sigmoid(log odds of chosen - of rejected) (arXiv 2403.07691, eq. 6-7), no reference.
Each may add pref_ftx * -(mean log-probability of the chosen reply's tokens).

Shape legend: B rows, T positions, N live tokens, P pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from rlmca.algorithms.aggregate import row_sums
from rlmca.algorithms.contract import Counts, Metrics, TokenOutputs
from rlmca.algorithms.numeric import live_index, poison, take
from rlmca.algorithms.policy import averaged
from rlmca.types import Batch

PreferenceKind = Literal["sigmoid", "hinge", "ipo", "orpo", "simpo"]
LARGEST_LOGP = -1e-6
"""ORPO's odds p / (1 - p) have no value at p = 1, which a reply learnt by heart reaches in fp32."""


@dataclass(frozen=True)
class PreferenceOptions:
    """Options of a preference loss; contradictory ones raise ValueError here."""

    kind: PreferenceKind = "sigmoid"
    beta: float = 0.1
    label_smoothing: float = 0.0
    """sigmoid only: the share of pairs believed to be labelled the wrong way round."""
    simpo_gamma: float | None = None
    """simpo only: the margin that is aimed at; None: 0.5."""
    ftx: float = 0.0
    """Weight of the supervised loss on the chosen replies."""

    def __post_init__(self) -> None:
        wrong = []
        if self.kind not in get_args(PreferenceKind):
            wrong.append(f"pref_loss {self.kind!r} is unknown; write one of {', '.join(get_args(PreferenceKind))}")
        if not self.beta > 0:
            wrong.append(f"pref_beta {self.beta} must be positive")
        if not 0 <= self.label_smoothing < 0.5:
            wrong.append(f"dpo_label_smoothing {self.label_smoothing} must lie in [0, 0.5): from a half on nothing is preferred")
        elif self.label_smoothing and self.kind != "sigmoid":
            wrong.append(f"dpo_label_smoothing has no meaning with pref_loss {self.kind}; write 0 or use sigmoid")
        if self.simpo_gamma is not None and self.kind != "simpo":
            wrong.append(f"simpo_gamma has no meaning with pref_loss {self.kind}; leave it out or use simpo")
        if self.simpo_gamma is not None and not self.simpo_gamma >= 0:
            wrong.append(f"simpo_gamma {self.simpo_gamma} must not be negative: it is the margin that chosen must win by")
        if not self.ftx >= 0:
            wrong.append(f"pref_ftx {self.ftx} must not be negative")
        if wrong:
            raise ValueError("; ".join(wrong))

    @property
    def needs_reference(self) -> bool:
        """Whether the loss compares with a reference model."""
        return self.kind not in ("orpo", "simpo")

    @property
    def by_mean(self) -> bool:
        """Whether a reply's log-probability is the mean over its tokens."""
        return self.kind in ("ipo", "orpo", "simpo")


class PreferenceLoss:
    """A preference loss, mean over pairs, on the counts/terms contract.

    Two rows with the same `Batch.unit_B` are a pair, the first of them the chosen reply; both must be in one micro-batch. A
    pair with a row without a live token (what fills up a batch; a reply cut away) is none: it is in no sum and no
    denominator. Reads `ref_logp_BT` when `options.needs_reference`. Metrics, means over pairs: `loss`, `rewards/chosen`,
    `rewards/rejected` (beta * (policy - reference), without a reference beta * policy), `rewards/accuracies` (chosen above
    rejected; a tie is not), `rewards/margins`, `logps/chosen`, `logps/rejected` (summed or mean, as the loss reads them),
    `sft_loss` (with orpo or pref_ftx) and `odds_ratio_loss` (orpo).
    """

    temperature = 1.0
    needs_entropy = False

    def __init__(self, options: PreferenceOptions) -> None:
        self.options = options

    def counts(self, batch: Batch) -> dict[str, Tensor]:
        """`pairs` with two live rows."""
        return {"pairs": torch.tensor(float(len(_pairs(batch))), dtype=torch.float64, device=batch.mask_BT.device)}

    def terms(self, out: TokenOutputs, batch: Batch, counts: Counts) -> tuple[Tensor, Metrics]:
        """See `contract.Loss.terms`. Raises ValueError without `unit_B`, a needed reference, or for rows that do not pair up."""
        pair_P2 = _pairs(batch)
        paired_B = torch.zeros(len(batch), dtype=torch.bool, device=batch.mask_BT.device).index_fill(0, pair_P2.reshape(-1), True)
        mask_BT = batch.mask_BT & paired_B[:, None]
        index_N = live_index(mask_BT)
        length_B = mask_BT.sum(1)

        def of_pairs(value_BT: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            value_N = take(value_BT, index_N)
            chosen_P, rejected_P = row_sums(value_N, mask_BT, index_N)[pair_P2].unbind(1)
            return value_N, chosen_P, rejected_P

        logp_N, *policy = of_pairs(out.logp_BT)
        watched, reference = [logp_N], None
        if self.options.needs_reference:
            if batch.ref_logp_BT is None:
                raise ValueError(f"Batch.ref_logp_BT is missing: pref_loss {self.options.kind} compares with a reference")
            ref_N, *reference = of_pairs(batch.ref_logp_BT.detach())
            watched.append(ref_N)
        lengths = length_B[pair_P2].unbind(1)
        each = _per_pair(policy, reference, lengths, self.options)
        weight = 1 / counts["pairs"].clamp(min=1)
        loss = poison((each["loss"].sum() * weight).to(logp_N.dtype), logp_N, *watched)
        pairs = torch.tensor(float(len(pair_P2)), dtype=torch.float64, device=logp_N.device)
        return loss, {name: (value_P.detach().sum(dtype=torch.float64), pairs) for name, value_P in each.items()}


def _pairs(batch: Batch) -> Tensor:
    """[P, 2] row numbers (chosen, rejected) of the pairs whose rows are both live."""
    if batch.unit_B is None:
        raise ValueError("Batch.unit_B is missing: it says which two rows are a pair")
    live_B = batch.mask_BT.any(1)
    order_B = torch.argsort(batch.unit_B, stable=True)
    _, size_U = torch.unique_consecutive(batch.unit_B[order_B], return_counts=True)
    start_U = size_U.cumsum(0) - size_U
    live_U = torch.zeros_like(size_U).index_add_(
        0, torch.arange(len(size_U), device=size_U.device).repeat_interleave(size_U), live_B[order_B].long()
    )
    if bool(((size_U != 2) & (live_U > 0)).any()):
        at = int(((size_U != 2) & (live_U > 0)).nonzero()[0, 0])
        unit = int(batch.unit_B[order_B[start_U[at]]])
        raise ValueError(f"unit {unit} has {int(size_U[at])} rows in a micro-batch; a preference pair is two rows, kept together")
    start_P = start_U[(size_U == 2) & (live_U == 2)]
    return torch.stack([order_B[start_P], order_B[start_P + 1]], 1)


def _per_pair(policy: list[Tensor], reference: list[Tensor] | None, lengths: tuple[Tensor, ...], o: PreferenceOptions) -> dict[str, Tensor]:
    """Loss and metrics of each pair, [P] float64, from summed log-probabilities (chosen, rejected)."""
    means = [total / n for total, n in zip(policy, lengths, strict=True)]
    chosen_P, rejected_P = means if o.by_mean else policy
    ref_chosen_P, ref_rejected_P = torch.zeros_like(chosen_P), torch.zeros_like(rejected_P)
    if reference is not None:
        ref_chosen_P, ref_rejected_P = (total / n if o.by_mean else total for total, n in zip(reference, lengths, strict=True))
    delta_P = (chosen_P - rejected_P) - (ref_chosen_P - ref_rejected_P)
    metrics: dict[str, Tensor] = {}
    if o.kind == "sigmoid":
        loss_P = -(1 - o.label_smoothing) * logsigmoid(o.beta * delta_P) - o.label_smoothing * logsigmoid(-o.beta * delta_P)
    elif o.kind == "hinge":
        loss_P = torch.relu(1 - o.beta * delta_P)
    elif o.kind == "ipo":
        loss_P = (delta_P - 1 / (2 * o.beta)).square()
    elif o.kind == "simpo":
        loss_P = -logsigmoid(o.beta * delta_P - (0.5 if o.simpo_gamma is None else o.simpo_gamma))
    else:
        metrics["odds_ratio_loss"] = -logsigmoid(_log_odds(chosen_P) - _log_odds(rejected_P))
        loss_P = -chosen_P + o.beta * metrics["odds_ratio_loss"]
    if o.ftx or o.kind == "orpo":
        metrics["sft_loss"] = -means[0]
    if o.ftx:
        loss_P = loss_P - o.ftx * means[0]
    reward_P, against_P = o.beta * (chosen_P - ref_chosen_P), o.beta * (rejected_P - ref_rejected_P)
    return metrics | {
        "loss": loss_P,
        "rewards/chosen": reward_P,
        "rewards/rejected": against_P,
        "rewards/accuracies": reward_P > against_P,
        "rewards/margins": reward_P - against_P,
        "logps/chosen": chosen_P,
        "logps/rejected": rejected_P,
    }


def _log_odds(mean_P: Tensor) -> Tensor:
    """log p - log(1 - p) of p = exp(mean_P)."""
    return mean_P - torch.log(-torch.expm1(mean_P.clamp(max=LARGEST_LOGP)))


def preference_loss(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    ref_chosen: Tensor | None = None,
    ref_rejected: Tensor | None = None,
    *,
    kind: PreferenceKind = "sigmoid",
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    simpo_gamma: float | None = None,
    chosen_len: Tensor | None = None,
    rejected_len: Tensor | None = None,
    ftx: float = 0.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """(loss, metrics), means over pairs, of summed log-probabilities [P]; what `PreferenceLoss` computes from tokens.

    `ref_*` are needed by sigmoid, hinge and ipo; the lengths in tokens by ipo, orpo, simpo and `ftx`. Raises ValueError
    without them, for contradictory options (`PreferenceOptions`) and for shapes that differ. fp32 or better.
    """
    o = PreferenceOptions(kind=kind, beta=beta, label_smoothing=label_smoothing, simpo_gamma=simpo_gamma, ftx=ftx)
    if o.needs_reference and (ref_chosen is None or ref_rejected is None):
        raise ValueError(f"pref_loss {kind} needs ref_chosen and ref_rejected")
    if (o.by_mean or ftx) and (chosen_len is None or rejected_len is None):
        raise ValueError(f"{f'pref_loss {kind}' if o.by_mean else 'pref_ftx'} needs chosen_len and rejected_len")
    shapes = {tuple(x.shape) for x in (policy_chosen, policy_rejected, ref_chosen, ref_rejected, chosen_len, rejected_len) if x is not None}
    if len(shapes) != 1:
        raise ValueError(f"chosen and rejected do not pair up: shapes {sorted(shapes)}")
    reference = (
        [ref_chosen.double(), ref_rejected.double()] if o.needs_reference and ref_chosen is not None and ref_rejected is not None else None
    )
    ones = torch.ones_like(policy_chosen, dtype=torch.float64)
    lengths = tuple(ones if n is None else n.double() for n in (chosen_len, rejected_len))
    each = _per_pair([policy_chosen.double(), policy_rejected.double()], reference, lengths, o)
    pairs = torch.tensor(float(policy_chosen.numel()), dtype=torch.float64, device=policy_chosen.device)
    dtype = torch.promote_types(policy_chosen.dtype, torch.float32)
    loss = (each["loss"].sum() / pairs.clamp(min=1)).to(dtype)
    return loss, averaged({name: (value_P.detach().sum(dtype=torch.float64), pairs) for name, value_P in each.items()})
