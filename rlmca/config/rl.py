"""Keys of reinforcement learning (stage grpo)."""

from __future__ import annotations

from dataclasses import dataclass

from rlmca.config.fields import option
from rlmca.config.presets import PRESETS

ADVANTAGES = ("grpo", "rloo", "dr_grpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
POLICY_LOSSES = ("grpo", "ppo", "cispo", "gspo", "gspo_token", "reinforce")
KL_ESTIMATORS = ("k1", "k2", "k3", "abs")
LOSS_AGG = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm")


def _later(names: tuple[str, ...], instead: str) -> dict[str, str]:
    return {name: f"{name}: not in this version; write {instead}" for name in names}


@dataclass(frozen=True)
class RLConfig:
    """The rollout, the advantages and the policy loss."""

    rl_algorithm: str = option(
        "grpo",
        "Preset: the defaults of the keys below, each of which can be set by itself.",
        choices=tuple(PRESETS),
        refused=_later(("ppo",), "grpo, whose advantages need no critic"),
    )
    rollout_batch_size: int = option(32, "Prompts of one rollout.", at_least=1)
    num_generations: int = option(8, "Replies to each prompt.", at_least=1)
    mini_batch_size: int | None = option(None, "Prompts of one optimiser step; rollout_batch_size when not set.", at_least=1)
    updates_per_rollout: int = option(1, "Passes of updates over one rollout.", at_least=1)
    early_stop_kl: float | None = option(
        None,
        "Half the mean square of the log ratio, over all ranks, from which on the rest of a rollout's optimiser steps is left out.",
        above=0,
    )
    advantage: str = option(
        "grpo",
        "From rewards to advantages. grpo: minus the group's mean, over its spread; dr_grpo: the mean alone; rloo: the mean of the "
        "others; reinforce_plus_plus: discounted, whitened over the rollout; reinforce_plus_plus_baseline: minus the group's mean first.",
        choices=ADVANTAGES,
        refused=_later(("gae",), "grpo, whose advantages need no critic"),
    )
    advantage_std: str = option("sample", "Spread that advantages are divided by.", choices=("population", "sample", "none"))
    advantage_eps: float = option(1e-6, "Added to the spread.", above=0)
    advantage_clip: float | None = option(None, "Advantages are cut to plus and minus this.", above=0)
    gamma: float = option(1.0, "Discount of a token's reward for each token before it; reinforce_plus_plus alone.", above=0, at_most=1)
    policy_loss: str = option(
        "grpo",
        "grpo and ppo: clipped ratio; cispo: capped, detached ratio times log-prob; gspo, gspo_token: ratio of the sequence; "
        "reinforce: log-prob alone.",
        choices=POLICY_LOSSES,
    )
    loss_agg: str = option("seq_mean_token_mean", "How token losses are averaged.", choices=LOSS_AGG)
    loss_agg_constant: float | None = option(None, "Divisor of seq_mean_token_sum_norm; max_new_tokens when not set.", above=0)
    clip_ratio_low: float | None = option(0.2, "The ratio is clipped below at 1 minus this; 3e-4 in gspo.", at_least=0, at_most=1)
    clip_ratio_high: float | None = option(0.2, "The ratio is clipped above at 1 plus this; 4e-4 in gspo.", at_least=0)
    dual_clip: float | None = option(None, "Bounds the loss of tokens with negative advantage at this times the advantage.", above=1)
    cispo_cap: float | None = option(
        None, "cispo: the ratio counts at most this much; 5 when not set, 1 + clip_ratio_high where that is given.", above=0
    )
    old_logp: str = option("trainer", "Baseline of the ratio: recomputed by the trainer, or as sampled.", choices=("trainer", "rollout"))
    rollout_correction: str = option(
        "none",
        "Weight of the loss by the ratio of the trainer's log-probs to those of sampling. tis: cut at a cap; icepop: 0 outside of a "
        "range; _sequence: of the whole reply.",
        choices=("none", "tis", "icepop", "tis_sequence", "icepop_sequence"),
    )
    rollout_correction_cap: float | None = option(None, "tis: largest weight; 2 when not set.", above=0)
    rollout_correction_range: list[float] = option([], "icepop: weights that count, [low, high]; [0.5, 2] when not set.", at_least=0)
    kl_coef: float = option(0.001, "Weight of the KL to the reference model; 0: no reference is kept.", at_least=0)
    kl_estimator: str = option("k3", "Estimator of the KL on sampled tokens; k1 and abs in the reward alone.", choices=KL_ESTIMATORS)
    kl_in: str = option("loss", "Where the KL enters: the loss, or the reward of every token.", choices=("loss", "reward"))
    kl_target: float | None = option(None, "Adapt kl_coef, its start, so that the KL of a token comes to this.", above=0)
    entropy_coef: float = option(0.0, "Weight of the entropy bonus.", at_least=0)
    drop_zero_std_groups: bool = option(False, "Leave out of the update the groups whose replies all score alike.")
    mask_truncated: bool = option(False, "Leave out of the loss the replies that ran into max_new_tokens.")
    debug_mode: bool = option(False, "Print a prompt, its replies and their reward parts.")
    debug_interval: int = option(1, "Print every so many steps in debug_mode.", at_least=1)
    log_rollouts: bool = option(True, "Write every rollout to rollouts/step-N.jsonl.zst.")

    @property
    def updates_per_step(self) -> int:
        """Optimiser steps of one rollout, without early stop."""
        return self.updates_per_rollout * (self.rollout_batch_size // (self.mini_batch_size or self.rollout_batch_size))

    @property
    def token_level(self) -> bool:
        """True when the tokens of one reply have advantages of their own."""
        return self.advantage.startswith("reinforce_plus_plus")

    @property
    def kl_rewarded(self) -> bool:
        """True when the KL is taken off the reward."""
        return self.kl_coef > 0 and self.kl_in == "reward"
