"""Programs of strangers, run apart from the machine."""

from __future__ import annotations

from rlmca.rewards.sandbox.run import Limits, Ran, Sandbox

__all__ = ["Limits", "Ran", "Sandbox"]
