"""Pure arithmetic of training: advantages, losses, KL estimators, reply ends. Knows no engine and no process group."""

from __future__ import annotations

from rlmca.algorithms.advantages import AdvantageStd, GroupAdvantage, assign_advantages, group_advantages, leave_one_out
from rlmca.algorithms.aggregate import LossAgg
from rlmca.algorithms.contract import Counts, Loss, Metrics, TokenOutputs
from rlmca.algorithms.correction import CorrectionKind, RolloutCorrection
from rlmca.algorithms.kl import KlKind, kl
from rlmca.algorithms.kl_control import AdaptiveKl, adapted_kl_coef
from rlmca.algorithms.moments import RunningMoments
from rlmca.algorithms.policy import PolicyLoss, policy_loss
from rlmca.algorithms.policy_options import PolicyKind, PolicyOptions
from rlmca.algorithms.preference import PreferenceKind, PreferenceLoss, PreferenceOptions, preference_loss
from rlmca.algorithms.replies import finish_of, reply_lengths, reply_mask
from rlmca.algorithms.returns import at_last_token, discounted_returns, gae, reinforce_plus_plus
from rlmca.algorithms.reward_model import bradley_terry
from rlmca.algorithms.supervised import SftLoss
from rlmca.algorithms.value import explained_variance, value_loss, value_terms
from rlmca.algorithms.vector_mse import vector_mse, vector_rewards
from rlmca.algorithms.whitening import whiten

__all__ = [
    "AdaptiveKl", "AdvantageStd", "CorrectionKind", "Counts", "GroupAdvantage", "KlKind", "Loss", "LossAgg", "Metrics", "PolicyKind",
    "PolicyLoss", "PolicyOptions", "PreferenceKind", "PreferenceLoss", "PreferenceOptions", "RolloutCorrection", "RunningMoments",
    "SftLoss", "TokenOutputs", "adapted_kl_coef", "assign_advantages", "at_last_token", "bradley_terry", "discounted_returns",
    "explained_variance", "finish_of", "gae", "group_advantages", "kl", "leave_one_out", "policy_loss", "preference_loss",
    "reinforce_plus_plus", "reply_lengths", "reply_mask", "value_loss", "value_terms", "vector_mse", "vector_rewards", "whiten",
]  # fmt: skip
