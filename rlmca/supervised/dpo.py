"""Stage dpo: learning from pairs of a better and a worse reply."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from rlmca.algorithms.contract import Metrics, TokenOutputs
from rlmca.algorithms.losses import PreferenceLoss, PreferenceOptions
from rlmca.config import RunConfig, batch_plan
from rlmca.data import Hub, Pairs, ShuffledOrder, batch_of_pairs, load_train_eval_pairs
from rlmca.engines.finetuning_setup import adapter_folders
from rlmca.planner import check_model
from rlmca.run.foundation import weights_digest
from rlmca.run.roles import export_policy, say, start_ranks
from rlmca.run.session import Session
from rlmca.run.source import open_source, run_dtype
from rlmca.supervised.loop import Supervised, run_loop
from rlmca.supervised.reference import ReferenceLogProbs, missing, pieces
from rlmca.transfer.source import resolve_model
from rlmca.types import Batch
from rlmca.workers import Ranks, WorkerGroup

PLOTS = ("loss", "rewards/accuracies", "rewards/margins", "eval_loss", "eval_rewards/accuracies")


def preference_options(cfg: RunConfig) -> PreferenceOptions:
    """The loss that the YAML describes."""
    own = cfg.preference
    return PreferenceOptions(
        kind=own.pref_loss,  # type: ignore[arg-type]
        beta=own.pref_beta,
        label_smoothing=own.dpo_label_smoothing,
        simpo_gamma=own.simpo_gamma if own.pref_loss == "simpo" else None,
        ftx=own.pref_ftx,
    )


@dataclass
class Preferences(Supervised):
    """What the loop talks to: batches of pairs with the reference's log-probs, and losses of held-out pairs."""

    references: Mapping[str, ReferenceLogProbs] = field(default_factory=dict)
    """By the name of the set, the training one's is ""; empty for a loss without a reference."""

    def batch(self, rows: Sequence[int]) -> Batch:
        """See `Supervised.batch`."""
        return pair_batch(cast(Pairs, self.train), rows, self.references.get(""))

    def evaluate(self, step: int) -> dict[str, float]:
        """See `evaluate_pairs`."""
        sets = cast(Mapping[str, Pairs], self.evals)
        return evaluate_pairs(self.policy, cast(PreferenceLoss, self.loss), sets, self.references, self.eval_rows)


def pair_batch(pairs: Pairs, numbers: Sequence[int], reference: ReferenceLogProbs | None) -> Batch:
    """The batch of some pairs, with the reference's log-probs where there is one."""
    batch = batch_of_pairs([pairs[number] for number in numbers])
    return batch if reference is None else reference.added(batch, numbers)


def evaluate_pairs(
    policy: WorkerGroup, loss: PreferenceLoss, sets: Mapping[str, Pairs], references: Mapping[str, ReferenceLogProbs], at_once: int
) -> dict[str, float]:
    """The loss's own metrics (`loss`, `rewards/…`, `logps/…`), means over all pairs; of several sets also `<set>_<metric>` of each.

    Sums are divided once at the end, so the result does not depend on how many pairs are read `at_once`, nor on the ranks.
    """
    result: dict[str, float] = {}
    whole: dict[str, list[float]] = {}
    for name, pairs in sets.items():
        own: dict[str, list[float]] = {}
        for numbers in pieces(range(len(pairs)), at_once):
            batch = pair_batch(pairs, numbers, references.get(name))
            out = TokenOutputs(policy.log_probs(batch).logp_BT.double().cpu(), None)
            metrics: Metrics = loss.terms(out, batch, loss.counts(batch))[1]
            for total in (own, whole):
                for metric, (top, bottom) in metrics.items():
                    sums = total.setdefault(metric, [0.0, 0.0])
                    sums[0] += float(top)
                    sums[1] += float(bottom)
        if len(sets) > 1:
            result |= {f"{name}_{metric}": top / bottom for metric, (top, bottom) in own.items()}
    return {metric: top / bottom for metric, (top, bottom) in whole.items()} | result


def reference_identity(cfg: RunConfig, policy_folder: Path) -> str:
    """What the reference's numbers depend on besides the pairs. Without ref_model it is the policy as it starts, adapters included.

    Of the weights a part is read, so size and time of the files count too: a folder that was written to is another reference.
    """
    computes = (cfg.engine, str(run_dtype(cfg)), sorted(dataclasses.asdict(cfg.megatron).items()) if cfg.engine == "megatron" else "")
    folder = policy_folder if cfg.model.ref_model is None else resolve_model(cfg.model.ref_model, cfg.model)
    adapters = adapter_folders(cfg) if cfg.model.ref_model is None else ()
    return f"{weights_digest(folder, adapters)} {_written(folder)} {computes}"


def _written(folder: Path) -> list[tuple[str, int, int]]:
    """(name, bytes, time of the last change) of the files that say what a model is."""
    files = (path for path in sorted(folder.iterdir()) if path.name == "config.json" or path.suffix in (".safetensors", ".bin"))
    return [(path.name, status.st_size, status.st_mtime_ns) for path in files for status in [path.stat()]]


def build_policy(
    cfg: RunConfig, ranks: Ranks, folder: Path, references: Mapping[str, ReferenceLogProbs], pairs_at_once: int
) -> WorkerGroup:
    """The policy as it starts, and the reference's log-probs on disk.

    The reference is never in memory beside the policy: one of its own is gone before the policy is built, and otherwise it is
    the policy itself, which has not learnt anything yet.
    """
    to_do = missing(references, ranks.loop)
    if to_do and cfg.model.ref_model is not None:
        reference = ranks.build("reference", resolve_model(cfg.model.ref_model, cfg.model), trainable=False)
        for one in to_do:
            one.compute(reference, pairs_at_once, ranks.loop)
        reference.close()
        to_do = []
    policy = ranks.build("policy", folder)
    for one in to_do:
        one.compute(policy, pairs_at_once, ranks.loop)
    ranks.loop.barrier()
    for one in references.values():
        one.open()
    return policy


def run(cfg: RunConfig) -> dict[str, float]:
    """Train as the configuration says; returns the results that are written to `all_results.json`."""
    loss = PreferenceLoss(preference_options(cfg))  # contradictory options are refused before anything is loaded
    with contextlib.closing(start_ranks(cfg)) as ranks:
        parallel = ranks.loop
        source = open_source(cfg)
        check_model(cfg, source.folder)  # what preflight could not see of a model on the hub
        seed = cfg.train.seed if cfg.data.data_seed is None else cfg.data.data_seed
        hub = Hub(cache_dir=cfg.model.cache_dir, token=cfg.model.hf_hub_token)
        train, evals = load_train_eval_pairs(cfg.data, source.template, say(parallel), seed=seed, hub=hub)
        plan = batch_plan(cfg, math.prod(ranks.sizes), len(train))
        session = Session(cfg, plan, ranks, best_metric="loss", lower_is_better=True)
        order = ShuffledOrder(len(train), plan.global_batch, seed, shuffle=not cfg.data.disable_shuffling, fingerprint=train.fingerprint)
        references: dict[str, ReferenceLogProbs] = {}
        eval_pairs = cfg.train.per_device_eval_batch_size * plan.data_parallel
        if loss.options.needs_reference:
            identity = parallel.broadcast_object(reference_identity(cfg, source.folder))  # each node may have files of its own
            read = {"": train, **(evals if cfg.train.eval_strategy != "no" or cfg.train.do_eval else {})}
            references = {name: ReferenceLogProbs(pairs, session.output_dir, identity) for name, pairs in read.items()}
        policy = build_policy(cfg, ranks, source.folder, references, eval_pairs)
        session.restore(policy, order)
        parts = Preferences(
            policy=policy,
            loss=loss,
            train=train,  # type: ignore[arg-type]
            evals=evals,  # type: ignore[arg-type]
            order=order,
            eval_rows=eval_pairs,
            references=references,
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
        return session.finish(seconds=time.perf_counter() - start, plots=PLOTS)
