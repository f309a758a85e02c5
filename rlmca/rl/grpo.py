"""Stage grpo: group-relative policy optimisation."""

from __future__ import annotations

import contextlib
import math
import time

from rlmca.algorithms import AdaptiveKl
from rlmca.algorithms.moments import RunningMoments
from rlmca.config import RunConfig, batch_plan
from rlmca.data import Hub, ShuffledOrder, load_prompts
from rlmca.planner import check_model
from rlmca.rewards import rewards_of
from rlmca.rl.baselines import AtItsStart, Reference
from rlmca.rl.choice import other_renderings, row_filter, thinking_templates
from rlmca.rl.curriculum import Curriculum
from rlmca.rl.loop import Roles, run_loop
from rlmca.rl.update import policy_options
from rlmca.run.evaluate import evaluate_policy
from rlmca.run.roles import export_policy, say, start_ranks
from rlmca.run.rollouts import RolloutWriter
from rlmca.run.session import Session
from rlmca.run.source import check_lengths, open_source, rollout_engine, sampling_params
from rlmca.transfer.source import resolve_model


def run(cfg: RunConfig) -> dict[str, float]:
    """Train as the configuration says; returns the results that are written to `all_results.json`."""
    policy_options(cfg)  # contradictory options are refused before anything is loaded
    keep = None if cfg.gathering.prompt_filter is None else row_filter(cfg.gathering.prompt_filter)
    with contextlib.ExitStack() as stack:
        ranks = stack.enter_context(contextlib.closing(start_ranks(cfg)))
        rewards = rewards_of(cfg.rewards, cfg.generation.max_new_tokens)
        stack.callback(rewards.close)
        parallel = ranks.loop
        source = open_source(cfg)
        check_model(cfg, source.folder)  # what preflight could not see of a model on the hub
        seed = cfg.train.seed if cfg.data.data_seed is None else cfg.data.data_seed
        hub = Hub(cache_dir=cfg.model.cache_dir, token=cfg.model.hf_hub_token)
        longest = cfg.generation.max_prompt_len
        thinking, other = (source.template, None) if cfg.gathering.thinking_ratio is None else thinking_templates(cfg, source.tokenizer)
        prompts = load_prompts(cfg.data, thinking, longest, log=say(parallel), seed=seed, hub=hub, keep=keep, other=other)
        evals = cfg.data.eval_dataset
        held_out = load_prompts(cfg.data, source.template, longest, evals, say(parallel), seed=seed, hub=hub) if evals else None
        check_lengths(cfg, source, [*prompts, *other_renderings(prompts), *(held_out or [])])
        plan = batch_plan(cfg, math.prod(ranks.sizes), len(prompts))
        session = Session(cfg, plan, ranks, best_metric="accuracy", lower_is_better=False)
        order = ShuffledOrder(
            len(prompts), plan.global_batch, seed, shuffle=not cfg.data.disable_shuffling, fingerprint=prompts.fingerprint
        )
        curriculum = None
        if cfg.gathering.curriculum == "pass_rate":
            low, high = cfg.gathering.curriculum_range
            session.kept["curriculum"] = curriculum = Curriculum(len(prompts), low, high, prompts.fingerprint)
        moments = RunningMoments()
        if cfg.gathering.reward_normalize == "running":
            session.kept["reward_moments"] = moments
        adaptive = None if cfg.rl.kl_target is None else AdaptiveKl(cfg.rl.kl_coef, cfg.rl.kl_target)
        if adaptive is not None:
            session.kept["kl_coef"] = adaptive
        policy = ranks.build("policy", source.folder)
        session.restore(policy, order)
        reference: Reference | None = None
        if cfg.rl.kl_coef > 0 and cfg.finetuning.lora and cfg.model.ref_model is None:
            reference = AtItsStart(policy)
        elif cfg.rl.kl_coef > 0:
            folder = source.folder if cfg.model.ref_model is None else resolve_model(cfg.model.ref_model, cfg.model)
            reference = ranks.build("reference", folder, trainable=False)
        rollout = rollout_engine(cfg, source, parallel.device, session.output_dir / "sglang")
        stack.callback(rollout.close)

        def score_held_out() -> dict[str, float]:
            assert held_out is not None
            greedy = sampling_params(cfg, source, greedy=True)
            return evaluate_policy(rollout, held_out, rewards, greedy, tokenizer=source.tokenizer, seed=cfg.train.seed)

        start = time.perf_counter()
        with session, RolloutWriter(session.output_dir, parallel.is_main and cfg.rl.log_rollouts, source.tokenizer.decode) as dump:
            roles = Roles(
                policy=policy,
                reference=reference,
                kl=adaptive,
                rollout=rollout,
                rewards=rewards,
                prompts=prompts,
                order=order,
                curriculum=curriculum,
                moments=moments,
                params=sampling_params(cfg, source, greedy=False),
                tokenizer=source.tokenizer,
                dump=dump,
                evaluate=score_held_out if held_out is not None else None,
            )
            run_loop(cfg, session, roles)
            session.load_best(policy)
            if cfg.train.do_eval and cfg.train.eval_strategy == "no":
                session.log_eval(session.step, score_held_out(), epoch=order.epochs)
            exported = export_policy(cfg, policy, source)
            if exported is not None:
                say(parallel)(f"Hugging Face model: {exported}")
        plots = ("loss", "reward", "reply_length", "entropy", "kl", "eval_accuracy")
        return session.finish(seconds=time.perf_counter() - start, plots=plots)
