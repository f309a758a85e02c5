"""What the policy is compared with: the reference of the KL, the baseline of the ratio, and the log-probs that they need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from rlmca.algorithms.contract import TokenOutputs
from rlmca.config import RunConfig
from rlmca.types import Batch
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


def with_baselines(batch: Batch, index: int, policy: WorkerGroup, reference: Reference | None, cfg: RunConfig) -> Batch:
    """The mini-batch number `index` of a rollout with the log-probs that its loss needs; those that are there are kept.

    The first optimizer step of a rollout needs no baseline: its own forward is that policy, and its ratio exactly 1.
    """
    temperature = cfg.generation.temperature
    if cfg.rl.policy_loss == "reinforce" or (index == 0 and cfg.rl.updates_per_rollout == 1):
        batch = batch.replace(old_logp_BT=None)
    elif cfg.rl.old_logp == "trainer" and batch.old_logp_BT is None:
        batch = batch.replace(old_logp_BT=policy.log_probs(batch, temperature=temperature).logp_BT.float().cpu())
    if reference is not None and batch.ref_logp_BT is None:
        batch = batch.replace(ref_logp_BT=reference.log_probs(batch, temperature=temperature).logp_BT.float().cpu())
    return batch
