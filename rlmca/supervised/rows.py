"""What the stages that train on rows share: from a configuration to training data, a session, a loop and an exported model."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlmca.algorithms.losses import SftLoss
from rlmca.config import BatchPlan, RunConfig, batch_plan
from rlmca.data import DataError, Dataset, Hub, ShuffledOrder, load_prompts, load_train_eval, pack_rows
from rlmca.data.cache import TrainEval, cache_key, load_or_make, read_cache
from rlmca.data.encoders import Encoder
from rlmca.data.streaming import RowStream
from rlmca.data.supervised import load_evals
from rlmca.parallel.groups import Parallel
from rlmca.planner import check_model
from rlmca.rewards import rewards_of
from rlmca.run.roles import export_policy, say, start_ranks
from rlmca.run.session import Session
from rlmca.run.source import Source, open_source
from rlmca.supervised.loop import Supervised, run_loop
from rlmca.supervised.replies import ReplyEvaluation
from rlmca.workers import Ranks

MakeEncoder = Callable[[RunConfig, Source], Encoder]
_ENDLESS = 1 << 60
"""Rows of data whose length is not known: enough for every batch."""


@dataclass(frozen=True)
class RowData:
    """The rows of a run, how many make a step, and in which order they come."""

    plan: BatchPlan
    order: ShuffledOrder | RowStream
    evals: Mapping[str, Dataset]
    train: Dataset | None = None
    """None when `order` reads the rows itself."""
    packs: Sequence[Sequence[int]] | None = None


def run_rows(cfg: RunConfig, make_encoder: MakeEncoder) -> dict[str, float]:
    """Train on the rows that an encoder makes; returns the results that are written to `all_results.json`.

    Under torchrun every process calls this and is one rank of the model; with Ray one process does, and the ranks are actors.
    """
    with contextlib.ExitStack() as stack:
        ranks = stack.enter_context(contextlib.closing(start_ranks(cfg)))
        parallel = ranks.loop
        source = open_source(cfg)
        check_model(cfg, source.folder)  # what preflight could not see of a model on the hub
        data_seed = cfg.train.seed if cfg.data.data_seed is None else cfg.data.data_seed
        hub = Hub(cache_dir=cfg.model.cache_dir, token=cfg.model.hf_hub_token)
        encoder = make_encoder(cfg, source)
        data = (stream_data if cfg.data.streaming else loaded_data)(cfg, ranks, source, encoder, data_seed, hub)
        session = Session(cfg, data.plan, ranks, best_metric="loss", lower_is_better=True)
        policy = ranks.build("policy", source.folder)
        session.restore(policy, data.order)
        replies: ReplyEvaluation | None = None
        if cfg.stage == "sft" and cfg.rewards.rewards and cfg.data.eval_dataset:
            longest = cfg.generation.max_prompt_len
            prompts = load_prompts(cfg.data, source.template, longest, cfg.data.eval_dataset, say(parallel), seed=data_seed, hub=hub)
            rewards = rewards_of(cfg.rewards, cfg.generation.max_new_tokens)
            replies = stack.enter_context(contextlib.closing(ReplyEvaluation(cfg, source, parallel, prompts, rewards)))
        parts = Supervised(
            policy=policy,
            loss=SftLoss(),
            train=data.train,
            evals=data.evals,
            order=data.order,
            packs=data.packs,
            eval_rows=cfg.train.per_device_eval_batch_size * data.plan.data_parallel,
            replies=replies,
        )
        start = time.perf_counter()
        with session:
            run_loop(session, parts)
            session.load_best(policy)
            if cfg.train.do_eval and cfg.train.eval_strategy == "no":
                session.log_eval(session.step, parts.evaluate(session.step), epoch=data.order.epochs)
            folder = export_policy(cfg, policy, source)
            if folder is not None:
                say(parallel)(f"Hugging Face model: {folder}")
        return session.finish(seconds=time.perf_counter() - start, plots=("loss", "eval_loss", "eval_accuracy"))


def loaded_data(cfg: RunConfig, ranks: Ranks, source: Source, encoder: Encoder, seed: int, hub: Hub) -> RowData:
    """All rows, tokenised before training."""
    tell = say(ranks.loop)
    train, evals = shared_rows(cfg, ranks.loop, source, encoder, seed, hub)
    packs = pack_rows(train.lengths, cfg.data.cutoff_len) if cfg.data.packs else None
    if packs is not None:
        filled = train.num_tokens / (len(packs) * cfg.data.cutoff_len)
        tell(f"packing: {len(train)} rows in {len(packs)} packs of {cfg.data.cutoff_len} tokens, {filled:.1%} filled")
    units = len(train) if packs is None else len(packs)
    plan = batch_plan(cfg, math.prod(ranks.sizes), units)
    fingerprint = train.fingerprint if packs is None else f"{train.fingerprint} in packs of {cfg.data.cutoff_len}"
    order = ShuffledOrder(units, plan.global_batch, seed, shuffle=not cfg.data.disable_shuffling, fingerprint=fingerprint)
    return RowData(plan, order, evals, train, packs)


def stream_data(cfg: RunConfig, ranks: Ranks, source: Source, encoder: Encoder, seed: int, hub: Hub) -> RowData:
    """Rows that are read and tokenised as training needs them, by every process for itself; the run counts as one epoch."""
    data, tell = cfg.data, say(ranks.loop)
    plan = batch_plan(cfg, math.prod(ranks.sizes), _ENDLESS)
    plan = dataclasses.replace(plan, num_rows=plan.total_steps * plan.global_batch, steps_per_epoch=plan.total_steps)
    stream = RowStream(
        data,
        encoder,
        batch_size=plan.global_batch,
        capacity=plan.global_batch * data.cutoff_len if data.packs else None,
        buffer_size=1 if data.disable_shuffling else data.buffer_size,
        held=int(data.val_size),
        seed=seed,
        hub=hub,
        log=tell,
    )
    evals = {"eval": stream.held_out} if stream.held_out is not None else load_evals(data, encoder, tell, seed=seed, hub=hub)
    return RowData(plan, stream, evals)


def shared_rows(cfg: RunConfig, parallel: Parallel, source: Source, encoder: Encoder, seed: int, hub: Hub) -> TrainEval:
    """Training and evaluation rows, tokenised by one process and read by the others through memory maps.

    That process is rank 0 with `data_shared_file_system`, else the first one of each node. Without `tokenized_path` the
    folder between them is a temporary one. A failure of one process is an error on all.
    """
    data = cfg.data

    def make() -> TrainEval:
        return load_train_eval(data, source.template, say(parallel), seed=seed, hub=hub, encoder=encoder)

    if parallel.world_size == 1 and data.tokenized_path is None:
        return make()
    leads = parallel.is_main if data.data_shared_file_system else int(os.environ.get("LOCAL_RANK", parallel.rank)) == 0
    named = None if data.tokenized_path is None else Path(data.tokenized_path)
    where = Path(str(cfg.train.output_dir)) if data.data_shared_file_system else Path(tempfile.gettempdir())
    path = named or where / f"rlmca-rows-{parallel.broadcast_object(uuid.uuid4().hex)}"
    made: TrainEval | None = None
    failure: Exception | None = None
    if leads:
        try:
            key = cache_key(data, encoder, seed) if named else {}
            made, fresh = load_or_make(path, key, make, overwrite=data.overwrite_cache)
            if named:
                say(parallel)(f"tokenised rows {'written to' if fresh else 'read from'} {path}: {len(made[0])} to train on")
        except Exception as error:
            failure = error
    failed = parallel.any_rank(failure is not None)  # also: nobody reads before everything is written
    try:
        if failure is not None:
            raise failure
        if failed:
            raise DataError("the process that reads the data failed; it says why")
        return made if made is not None else read_cache(path)
    finally:
        parallel.barrier()
        if leads and named is None:
            shutil.rmtree(path, ignore_errors=True)  # open maps stay readable
