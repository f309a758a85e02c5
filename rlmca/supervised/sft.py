"""Stage sft: supervised fine-tuning on conversations."""

from __future__ import annotations

import contextlib
import math
import time

from rlmca.algorithms.losses import SftLoss
from rlmca.config import RunConfig, batch_plan
from rlmca.data import Hub, ShuffledOrder, load_prompts, load_train_eval, pack_rows
from rlmca.planner import check_model
from rlmca.rewards import build_rewards
from rlmca.run.roles import export_policy, say, start_ranks
from rlmca.run.session import Session
from rlmca.run.source import open_source
from rlmca.supervised.loop import Supervised, run_loop
from rlmca.supervised.replies import ReplyEvaluation


def run(cfg: RunConfig) -> dict[str, float]:
    """Train as the configuration says; returns the results that are written to `all_results.json`.

    Under torchrun every process calls this and is one rank of the model; with Ray one process does, and the ranks are actors.
    """
    with contextlib.ExitStack() as stack:
        ranks = stack.enter_context(contextlib.closing(start_ranks(cfg)))
        parallel = ranks.loop
        source = open_source(cfg)
        check_model(cfg, source.folder)  # what preflight could not see of a model on the hub
        data_seed = cfg.train.seed if cfg.data.data_seed is None else cfg.data.data_seed
        hub = Hub(cache_dir=cfg.model.cache_dir, token=cfg.model.hf_hub_token)
        train, evals = load_train_eval(cfg.data, source.template, say(parallel), seed=data_seed, hub=hub)
        packs = pack_rows(train.lengths, cfg.data.cutoff_len) if cfg.data.packs else None
        if packs is not None:
            filled = train.num_tokens / (len(packs) * cfg.data.cutoff_len)
            say(parallel)(f"packing: {len(train)} rows in {len(packs)} packs of {cfg.data.cutoff_len} tokens, {filled:.1%} filled")
        units = len(train) if packs is None else len(packs)
        plan = batch_plan(cfg, math.prod(ranks.sizes), units)
        session = Session(cfg, plan, ranks, best_metric="loss", lower_is_better=True)
        fingerprint = train.fingerprint if packs is None else f"{train.fingerprint} in packs of {cfg.data.cutoff_len}"
        order = ShuffledOrder(units, plan.global_batch, data_seed, shuffle=not cfg.data.disable_shuffling, fingerprint=fingerprint)
        policy = ranks.build("policy", source.folder)
        session.restore(policy, order)
        replies: ReplyEvaluation | None = None
        if cfg.rewards.rewards and cfg.data.eval_dataset:
            longest = cfg.generation.max_prompt_len
            prompts = load_prompts(cfg.data, source.template, longest, cfg.data.eval_dataset, say(parallel), seed=data_seed, hub=hub)
            rewards = build_rewards(cfg.rewards.rewards, cfg.rewards.reward_workers, cfg.rewards.reward_timeout)
            replies = stack.enter_context(contextlib.closing(ReplyEvaluation(cfg, source, parallel, prompts, rewards)))
        parts = Supervised(
            policy=policy,
            loss=SftLoss(),
            train=train,
            evals=evals,
            order=order,
            packs=packs,
            eval_rows=cfg.train.per_device_eval_batch_size * plan.data_parallel,
            replies=replies,
        )
        start = time.perf_counter()
        with session:
            run_loop(session, parts)
            session.load_best(policy)
            if cfg.train.do_eval and cfg.train.eval_strategy == "no":
                session.log_eval(session.step, parts.evaluate(session.step), epoch=order.epochs)
            folder = export_policy(cfg, policy, source)
            if folder is not None:
                say(parallel)(f"Hugging Face model: {folder}")
        return session.finish(seconds=time.perf_counter() - start, plots=("loss", "eval_loss", "eval_accuracy"))
