"""The losses that engines run, by one name: each is written in a file of its own."""

from __future__ import annotations

from rlmca.algorithms.policy import PolicyLoss, policy_loss
from rlmca.algorithms.policy_options import PolicyKind, PolicyOptions
from rlmca.algorithms.preference import PreferenceLoss, PreferenceOptions
from rlmca.algorithms.supervised import SftLoss

__all__ = ["PolicyKind", "PolicyLoss", "PolicyOptions", "PreferenceLoss", "PreferenceOptions", "SftLoss", "policy_loss"]
