"""Keys of reinforcement learning and of pairs that come later, or have another name here (TRL's, verl's, slime's)."""

from __future__ import annotations

from collections.abc import Mapping

from rlmca.config.foreign.entry import Foreign, always, refuse

_LATER = "not in this version"

RL: Mapping[str, Foreign] = {
    **refuse("lam value_clip vf_coef critic_learning_rate critic_model", f"a value model is {_LATER}", "write rl_algorithm: grpo"),
    **refuse("critic_warmup_steps", f"a value model is {_LATER}", "write rl_algorithm: grpo", 0),
    **refuse("use_dynamic_batch_size use_dynamic_bsz", "has another name here", "write max_tokens_per_microbatch"),
    **refuse("max_tokens_per_gpu ppo_max_token_len_per_gpu", "has another name here", "write max_tokens_per_microbatch"),
    **refuse("n_samples_per_prompt", "has another name here", "write num_generations"),
    **refuse("max_response_length max_completion_length rollout_max_response_len", "has another name here", "write max_new_tokens"),
    **refuse("max_prompt_length rollout_max_prompt_len", "has another name here", "write max_prompt_len"),
    **refuse("advantage_estimator adv_estimator", "has another name here", "write advantage"),
    **refuse("eps_clip", "has two names here", "write clip_ratio_low and clip_ratio_high"),
    **refuse("eps_clip_high", "has another name here", "write clip_ratio_high"),
    **refuse("beta", "has another name in each stage", "write kl_coef, in stage dpo pref_beta"),
    **refuse("epsilon", "has two names here", "write clip_ratio_low and clip_ratio_high"),
    **refuse("epsilon_high", "has another name here", "write clip_ratio_high"),
    **refuse("num_iterations", "has another name here", "write updates_per_rollout"),
    **refuse("reward_funcs", "has another name here", "write rewards"),
    **refuse("reward_weights", "a weight stands with its function here", "write rewards: [{name: exact, weight: 0.5}]"),
    **refuse("scale_rewards", "has another name here", "write advantage_std"),
    **refuse("importance_sampling_level", "has another name here", "write rl_algorithm: gspo for ratios of whole replies"),
    **refuse("mask_truncated_completions", "has another name here", "write mask_truncated"),
    **refuse("loss_type", "has another name in each stage", "write rl_algorithm or loss_agg, in stage dpo pref_loss"),
    **refuse("label_smoothing", "has another name here", "write dpo_label_smoothing"),
    **refuse("rpo_alpha", "has another name here", "write pref_ftx"),
    **refuse("num_rollout", "has another name here", "write max_steps"),
    **refuse("hf_checkpoint", "has another name here", "write model_name_or_path"),
    **refuse("balance_data", "ranks get equal work wherever max_tokens_per_microbatch or packing is set", "leave it out"),
    **refuse("train_critic critic_reward_batch_size critic_flush_seconds", f"the online critic is {_LATER}"),
    **refuse("max_restarts", f"restarting ranks is {_LATER}", "leave it out: the same command goes on from the newest checkpoint", 0),
    **refuse("async_staleness", f"generation ahead of training is {_LATER}", "write 0", 0),
    **always("colocate", "the local rollout engine always shares the trainer's device", "leave it out"),
}
