"""Pure arithmetic of training: advantages, losses, KL estimators, reply ends. Knows no engine and no process group."""

from __future__ import annotations

from rlmca.algorithms.advantages import AdvantageStd, assign_advantages, group_advantages
from rlmca.algorithms.aggregate import LossAgg
from rlmca.algorithms.contract import Counts, Loss, Metrics, TokenOutputs
from rlmca.algorithms.kl import KlKind, kl
from rlmca.algorithms.losses import PolicyKind, PolicyLoss, PolicyOptions, SftLoss, policy_loss
from rlmca.algorithms.replies import finish_of, reply_lengths, reply_mask
from rlmca.algorithms.whitening import whiten

__all__ = [
    "AdvantageStd", "Counts", "KlKind", "Loss", "LossAgg", "Metrics", "PolicyKind", "PolicyLoss", "PolicyOptions", "SftLoss",
    "TokenOutputs", "assign_advantages", "finish_of", "group_advantages", "kl", "policy_loss", "reply_lengths", "reply_mask", "whiten",
]  # fmt: skip
