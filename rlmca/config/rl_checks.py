"""What must hold between the keys of advantages, policy loss and KL; findings and notes in the form of `checks`."""

from __future__ import annotations

from collections.abc import Iterator

from rlmca.config.schema import RunConfig

Finding = tuple[tuple[str, ...], str]

_CLIPPED = ("grpo", "ppo", "gspo", "gspo_token")
_ONE_STEP = ("updates_per_rollout", "mini_batch_size", "rollout_batch_size")


def findings(cfg: RunConfig) -> Iterator[Finding]:
    """Every contradiction of a configuration of stage grpo."""
    yield from _steps(cfg)
    yield from _advantages(cfg)
    yield from _loss(cfg)
    yield from _correction(cfg)
    yield from _kl(cfg)


def _steps(cfg: RunConfig) -> Iterator[Finding]:
    rl = cfg.rl
    if rl.mini_batch_size is not None and rl.rollout_batch_size % rl.mini_batch_size:
        yield (
            ("rollout_batch_size", "mini_batch_size"),
            f"rollout_batch_size {rl.rollout_batch_size} is not a multiple of mini_batch_size {rl.mini_batch_size}",
        )
        return
    if rl.policy_loss == "reinforce" and rl.updates_per_step > 1:
        who = "rl_algorithm: nemotron_grpo" if rl.rl_algorithm == "nemotron_grpo" else "policy_loss: reinforce"
        yield (
            ("policy_loss", *_ONE_STEP),
            f"{who} takes the ratio as 1, which holds for the first optimiser step of a rollout alone, and this makes "
            f"{rl.updates_per_step}: write updates_per_rollout: 1 and leave mini_batch_size out, or write policy_loss: ppo",
        )


def _advantages(cfg: RunConfig) -> Iterator[Finding]:
    rl = cfg.rl
    if rl.num_generations < 2 and rl.advantage != "reinforce_plus_plus":
        yield (
            ("num_generations", "advantage"),
            f"num_generations: 1 gives every reply advantage 0 with advantage {rl.advantage}; write at least 2",
        )
    if rl.advantage != "grpo" and rl.advantage_std != "none":
        yield (
            ("advantage", "advantage_std"),
            f"advantage_std: {rl.advantage_std} belongs to advantage: grpo, and advantage is {rl.advantage}: leave it out",
        )
    if rl.gamma != 1 and not rl.token_level:
        yield (
            ("gamma", "advantage"),
            f"gamma belongs to advantage: reinforce_plus_plus, and advantage is {rl.advantage}: leave it out",
        )
    if rl.drop_zero_std_groups and rl.token_level:
        yield (
            ("drop_zero_std_groups", "advantage"),
            f"drop_zero_std_groups: advantage: {rl.advantage} whitens over all replies, those that score alike included; leave it out",
        )
    if rl.drop_zero_std_groups and rl.kl_rewarded:
        yield (
            ("drop_zero_std_groups", "kl_in", "kl_coef"),
            "drop_zero_std_groups: replies that score alike still differ in the KL with kl_in: reward; leave one out",
        )


def _loss(cfg: RunConfig) -> Iterator[Finding]:
    rl, given = cfg.rl, cfg.given
    if rl.policy_loss == "reinforce":
        for name in ("clip_ratio_low", "clip_ratio_high"):
            if getattr(rl, name) is not None:
                yield ("policy_loss", name), f"{name}: policy_loss reinforce has no ratio to clip: leave it out"
    if rl.dual_clip is not None and rl.policy_loss not in ("grpo", "ppo"):
        yield ("dual_clip", "policy_loss"), f"dual_clip belongs to policy_loss ppo or grpo, and policy_loss is {rl.policy_loss}"
    elif rl.dual_clip is not None and rl.clip_ratio_high is not None and rl.dual_clip <= 1 + rl.clip_ratio_high:
        yield (
            ("dual_clip", "clip_ratio_high"),
            f"dual_clip: {rl.dual_clip} is inside the clip range; write more than 1 + clip_ratio_high = {1 + rl.clip_ratio_high}",
        )
    if rl.cispo_cap is not None and rl.policy_loss != "cispo":
        yield ("cispo_cap", "policy_loss"), f"cispo_cap belongs to policy_loss cispo, and policy_loss is {rl.policy_loss}"
    elif rl.cispo_cap is not None and rl.clip_ratio_high is not None:
        yield (
            ("cispo_cap", "clip_ratio_high"),
            "cispo_cap and clip_ratio_high both bound the ratio of policy_loss cispo, one absolute, one relative to 1: leave one out",
        )
    if "loss_agg_constant" in given and rl.loss_agg != "seq_mean_token_sum_norm":
        yield (
            ("loss_agg_constant", "loss_agg"),
            f"loss_agg_constant belongs to loss_agg seq_mean_token_sum_norm, and loss_agg is {rl.loss_agg}",
        )


def _correction(cfg: RunConfig) -> Iterator[Finding]:
    rl, kind = cfg.rl, cfg.rl.rollout_correction
    if kind != "none" and rl.old_logp == "rollout":
        yield (
            ("rollout_correction", "old_logp"),
            f"rollout_correction: {kind} compares the trainer's log-probs with the rollout's, and old_logp: rollout takes one for "
            "the other: leave one out",
        )
    if rl.rollout_correction_cap is not None and not kind.startswith("tis"):
        yield (
            ("rollout_correction_cap", "rollout_correction"),
            f"rollout_correction_cap belongs to rollout_correction tis, and rollout_correction is {kind}",
        )
    if rl.rollout_correction_range and not kind.startswith("icepop"):
        yield (
            ("rollout_correction_range", "rollout_correction"),
            f"rollout_correction_range belongs to rollout_correction icepop, and rollout_correction is {kind}",
        )


def _kl(cfg: RunConfig) -> Iterator[Finding]:
    rl = cfg.rl
    if rl.kl_coef > 0 and rl.rl_algorithm == "nemotron_grpo":
        yield (
            ("kl_coef", "rl_algorithm"),
            f"kl_coef: {rl.kl_coef:g}, and rl_algorithm: nemotron_grpo keeps no reference: leave kl_coef out, or write rl_algorithm: grpo",
        )
    elif rl.kl_coef > 0 and rl.kl_in == "loss" and rl.policy_loss == "reinforce":
        yield (
            ("kl_coef", "kl_in", "policy_loss"),
            f"kl_coef: {rl.kl_coef:g} in the loss, and policy_loss: reinforce is the policy gradient alone: write kl_in: reward, "
            "or kl_coef: 0",
        )
    if rl.kl_in == "loss" and rl.kl_estimator in ("k1", "abs"):
        yield (
            ("kl_in", "kl_estimator"),
            f"kl_estimator: {rl.kl_estimator} in the loss: its gradient is not that of the KL; write k2 or k3, or kl_in: reward",
        )
    if rl.kl_target is not None and rl.kl_coef == 0:
        yield ("kl_target", "kl_coef"), "kl_target adapts kl_coef by a factor, and kl_coef is 0: write its start above 0"


def notes(cfg: RunConfig) -> Iterator[str]:
    """One sentence for each given key that the other keys leave without effect."""
    rl, given = cfg.rl, cfg.given
    if rl.advantage_std == "none" and "advantage_eps" in given and rl.advantage_eps != 1e-6:
        yield "advantage_eps has no effect: advantages are divided by no spread"
    if rl.kl_coef == 0:
        named = [name for name in ("kl_estimator", "kl_in") if name in given and getattr(rl, name) not in ("k3", "loss")]
        yield from (f"{name} has no effect: kl_coef is 0" for name in named)
    if rl.old_logp == "trainer" and rl.updates_per_step == 1 and rl.early_stop_kl is not None:
        yield "early_stop_kl has no effect: a rollout's one optimiser step has ratio 1"
    if rl.policy_loss == "reinforce" and rl.old_logp == "rollout":
        yield "old_logp has no effect: policy_loss reinforce takes the ratio as 1"
    if cfg.generation.top_p < 1 or cfg.generation.top_k > 0:
        yield "top_p and top_k shape sampling, but the ratio of the loss uses log-probabilities before them: the update is then biased"
