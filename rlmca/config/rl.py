"""Keys of reinforcement learning (stage grpo)."""

from __future__ import annotations

from dataclasses import dataclass

from rlmca.config.fields import option

_PRESETS_LATER = (
    "dapo",
    "dr_grpo",
    "cispo",
    "gspo",
    "gspo_token",
    "rloo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "nemotron_grpo",
    "ppo",
)
LOSS_AGG = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm")


def _later(names: tuple[str, ...], instead: str) -> dict[str, str]:
    return {name: f"{name}: not in this version; write {instead}" for name in names}


@dataclass(frozen=True)
class RLConfig:
    """The rollout, the advantages and the policy loss."""

    rl_algorithm: str = option("grpo", "Preset that fills in the keys below.", choices=("grpo",), refused=_later(_PRESETS_LATER, "grpo"))
    rollout_batch_size: int = option(32, "Prompts of one rollout.", at_least=1)
    num_generations: int = option(8, "Replies to each prompt.", at_least=1)
    mini_batch_size: int | None = option(None, "Prompts of one optimiser step; rollout_batch_size when not set.", at_least=1)
    updates_per_rollout: int = option(1, "Passes of updates over one rollout.", at_least=1)
    advantage: str = option(
        "grpo",
        "Reward minus the mean of its prompt's replies, over their spread.",
        choices=("grpo",),
        refused=_later(("rloo", "dr_grpo", "gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline"), "grpo"),
    )
    advantage_std: str = option("sample", "Spread that advantages are divided by.", choices=("population", "sample", "none"))
    advantage_eps: float = option(1e-6, "Added to the spread.", above=0)
    advantage_clip: float | None = option(None, "Advantages are cut to plus and minus this.", above=0)
    policy_loss: str = option(
        "grpo",
        "Clipped ratio loss; grpo averages within sequences first, ppo over all tokens.",
        choices=("grpo", "ppo"),
        refused=_later(("cispo", "gspo", "gspo_token", "reinforce"), "grpo or ppo"),
    )
    loss_agg: str = option("seq_mean_token_mean", "How token losses are averaged; ppo's default is token_mean.", choices=LOSS_AGG)
    loss_agg_constant: float | None = option(None, "Divisor of seq_mean_token_sum_norm; max_new_tokens when not set.", above=0)
    clip_ratio_low: float = option(0.2, "The ratio is clipped below at 1 minus this.", at_least=0, at_most=1)
    clip_ratio_high: float = option(0.2, "The ratio is clipped above at 1 plus this.", at_least=0)
    dual_clip: float | None = option(None, "Bounds the loss of tokens with negative advantage at this times the advantage.", above=1)
    old_logp: str = option("trainer", "Baseline of the ratio: recomputed by the trainer, or as sampled.", choices=("trainer", "rollout"))
    kl_coef: float = option(0.001, "Weight of the KL to the reference model; 0: no reference is kept.", at_least=0)
    kl_estimator: str = option(
        "k3",
        "Estimator of the KL on sampled tokens.",
        choices=("k2", "k3"),
        refused={"k1": "k1: as a loss its gradient is not that of the KL; write k2 or k3"},
    )
    kl_in: str = option("loss", "Where the KL enters.", choices=("loss",), refused=_later(("reward",), "loss"))
    entropy_coef: float = option(0.0, "Weight of the entropy bonus.", at_least=0)
    drop_zero_std_groups: bool = option(False, "Leave out of the update the groups whose replies all score alike.")
    mask_truncated: bool = option(False, "Leave out of the loss the replies that ran into max_new_tokens.")
    debug_mode: bool = option(False, "Print a prompt, its replies and their reward parts.")
    debug_interval: int = option(1, "Print every so many steps in debug_mode.", at_least=1)
    log_rollouts: bool = option(True, "Write every rollout to rollouts/step-N.jsonl.zst.")

    @property
    def updates_per_step(self) -> int:
        """Optimiser steps of one rollout."""
        return self.updates_per_rollout * (self.rollout_batch_size // (self.mini_batch_size or self.rollout_batch_size))
