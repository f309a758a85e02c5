"""What both loops share: where the run stands, its log, its schedule, its checkpoints, its end."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from rlmca.config import BatchPlan, RunConfig
from rlmca.observe.console import note
from rlmca.observe.log import RunLog
from rlmca.observe.plots import plot_all
from rlmca.observe.progress import progress
from rlmca.run.checkpoint import CheckpointError, Checkpoints, resume_folder
from rlmca.run.foundation import foundation
from rlmca.run.lr import LearningRate
from rlmca.run.output import prepare_output_dir, write_config, write_notes, write_results, write_trainer_state
from rlmca.run.schedule import StepSchedule
from rlmca.run.signals import StopSignal
from rlmca.run.tracking import tracker_options
from rlmca.workers import Ranks

STATE_FILE = "run_state.json"
_SKIPS = 10
"""Steps without an update, one after the other, after which the run says so."""


def _expert_sizes(cfg: RunConfig) -> list[int]:
    """Expert and expert tensor parallel size, where they are not those of a model without experts."""
    m = cfg.megatron
    split = m.tensor_model_parallel_size if m.expert_tensor_parallel_size is None else m.expert_tensor_parallel_size
    plain = cfg.engine != "megatron" or (m.expert_model_parallel_size == 1 and split == m.tensor_model_parallel_size)
    return [] if plain else [m.expert_model_parallel_size, split]


class Resumable(Protocol):
    """The data order and what else goes on where it stood, as far as a checkpoint is concerned."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> object: ...


class Stateful(Protocol):
    """A role whose weights and optimizer a checkpoint keeps."""

    def save(self, path: Path) -> None: ...

    def export_adapter(self, path: Path, base: str) -> None: ...

    def load(self, path: Path) -> None: ...


class Interrupted(RuntimeError):
    """The run stopped early because a signal asked for it; a checkpoint was written if the schedule writes any."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(f"stopped by signal {signal_number}; the same command goes on from the newest checkpoint-N, if there is one")
        self.signal_number = signal_number


class Session:
    """One training run of `plan.total_steps` steps, fresh or resumed. Use as a context; every process of the loop has one.

    `step` is the last finished step, `tokens` the tokens seen. `best` is (step, value) of the best evaluation.
    """

    def __init__(self, cfg: RunConfig, plan: BatchPlan, ranks: Ranks, *, best_metric: str, lower_is_better: bool) -> None:
        train = cfg.train
        parallel = ranks.loop
        self.cfg, self.plan, self.parallel = cfg, plan, parallel
        self._layout = [*ranks.sizes, *_expert_sizes(cfg)]
        self.output_dir = Path(str(train.output_dir))
        self.step, self.tokens = 0, 0
        self.kept: dict[str, Resumable] = {}
        """Further state that checkpoints keep, by name: set before `restore`."""
        self.best: tuple[int, float] | None = None
        self.best_metric, self._lower_is_better = best_metric, lower_is_better
        self.schedule = StepSchedule(
            total_steps=plan.total_steps,
            steps_per_epoch=plan.steps_per_epoch,
            logging_steps=train.logging_steps,
            save_strategy=train.save_strategy,  # type: ignore[arg-type]
            save_steps=train.save_steps,
            eval_strategy=train.eval_strategy,  # type: ignore[arg-type]
            eval_steps=train.eval_steps,
        )
        self.learning_rate = LearningRate(train, plan.total_steps)
        self.checkpoints = Checkpoints(self.output_dir, train.save_total_limit, parallel.is_main, parallel.barrier)
        wanted: bool | str | None = True if train.resume_newest else train.resume_from_checkpoint
        self.resume_from = resume_folder(self.checkpoints, wanted, train.overwrite_output_dir)
        prepare_output_dir(cfg, parallel.is_main, resuming=self.resume_from is not None)
        self.foundation = foundation(cfg)
        self.reached = False
        """True once an evaluation reached `stop_value`: the run is done before its last step."""
        self._skips = 0
        self._goal_missed = False
        """Whether it was said that evaluations have no `stop_metric`."""
        self._stop = StopSignal()
        self._ending = False
        self._interval: list[Mapping[str, float]] = []
        self._losses: list[float] = []
        self._names: set[str] = set()
        self._last: dict[str, float] = {}
        self._log: RunLog | None = None

    def __enter__(self) -> Session:
        if self.parallel.is_main:
            write_config(self.cfg)
        self._log = RunLog(
            self.output_dir,
            self.plan.total_steps,
            tracker_options(self.cfg),
            append=self.resume_from is not None,
            is_main=self.parallel.is_main,
            step=self.step,
            tokens=self.tokens,
        )
        self._stop.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._stop.__exit__(*exception)
        if self._log is not None:
            self._log.close()

    # ---- where the run stands

    def restore(self, role: Stateful, order: Resumable) -> None:
        """Take up the checkpoint that the run resumes from, if any; before the context is entered."""
        if self.resume_from is None:
            return
        state = json.loads((self.resume_from / STATE_FILE).read_text(encoding="utf-8"))
        if not state["resumable"]:
            raise CheckpointError(
                f"resume_from_checkpoint: {self.resume_from} was written with save_only_model: true and has no optimizer state; "
                "start a new run from its weights or write checkpoints with save_only_model: false"
            )
        self._check_something_is_left(int(state["step"]), bool(state.get("reached")))
        if state.get("engine", "megatron") != self.cfg.engine:
            raise CheckpointError(
                f"resume_from_checkpoint: {self.resume_from} was written by the {state['engine']} engine and this run has the "
                f"{self.cfg.engine} one: set USE_MCA as it was, or start a new run from the Hugging Face folder"
            )
        before, now = state.get("trained", "all weights"), self.foundation.trained
        if before != now:
            raise CheckpointError(
                f"resume_from_checkpoint: {self.resume_from} was written by a run that trains {before}, this one trains {now}: "
                "write what the run was started with, or start a new one from its Hugging Face folder or its adapter"
            )
        if changed := self.foundation.changed(state.get("stands_on", {})):
            raise CheckpointError(
                f"resume_from_checkpoint: {self.resume_from} holds an adapter of other weights: {' and '.join(changed)} changed since it "
                "was written; write what the run was started with, or start a new one from the adapter in the checkpoint"
            )
        if state["layout"] != self._layout:
            raise CheckpointError(
                f"resume_from_checkpoint: {self.resume_from} was written with tensor, context, pipeline, data "
                f"(and expert, expert tensor) parallel = {state['layout']}, "
                f"this run has {self._layout}; resuming in another layout is not in this version: start it as it was started"
            )
        if state["global_batch"] != self.plan.global_batch and self.parallel.is_main:
            note(f"the global batch was {state['global_batch']} and is {self.plan.global_batch} from here on: steps and epochs shift")
        role.load(self.resume_from)
        order.load_state_dict(state["order"])
        for name, part in self.kept.items():
            if name in state.get("kept", {}):  # absent where the run before did without it
                part.load_state_dict(state["kept"][name])
        self.step, self.tokens = int(state["step"]), int(state["tokens"])
        self.reached = bool(state.get("reached"))
        self.best = None if state["best"] is None else (int(state["best"][0]), float(state["best"][1]))
        if self.best is not None:
            self.checkpoints.keep = self.best[0]
        if self.parallel.is_main:
            note(f"resuming after step {self.step} of {self.plan.total_steps} from {self.resume_from}")

    def _check_something_is_left(self, step: int, reached: bool) -> None:
        """A run that ended early, before its results were written, still has them to write; a finished one has nothing."""
        total = self.plan.total_steps
        if step > total or ((reached or step == total) and (self.output_dir / "train_results.json").exists()):
            goal = " and reached stop_value" if reached else ""
            raise CheckpointError(
                f"{self.resume_from} is at step {step} and the run has {total}{goal}: it would make no optimizer step; "
                "raise max_steps or num_train_epochs, or set overwrite_output_dir: true to start again"
            )

    def steps(self) -> Iterator[int]:
        """The numbers of the steps left to do, with a progress bar; raises Interrupted when a signal stopped the run."""
        with progress(self.plan.total_steps, "steps", start=self.step, is_main=self.parallel.is_main) as bar:
            while self.step < self.plan.total_steps and not self.reached:
                yield self.step + 1
                self.step += 1
                bar.advance()
                if self._ending and self.step < self.plan.total_steps and not self.reached:
                    received = self._stop.received
                    raise Interrupted(int(received) if received is not None else 15)

    # ---- logging

    def log(self, step: int, metrics: Mapping[str, float], *, epoch: float, tokens: int) -> None:
        """Count a step's tokens and, at logging steps, write the averages since the last line (maxima of `*_max`)."""
        self.tokens += tokens
        self._watch_skips(step, metrics)
        self._interval.append(metrics)
        if "loss" in metrics:
            self._losses.append(metrics["loss"])
        if not self.schedule.should_log(step):
            return
        merged = average(self._interval)
        self._interval = []
        merged["lr"] = metrics["lr"]
        self._last = merged
        self._write(step, merged, epoch)

    def _watch_skips(self, step: int, metrics: Mapping[str, float]) -> None:
        self._skips = self._skips + 1 if metrics.get("skipped", 0.0) >= 1.0 else 0
        if self._skips and self._skips % _SKIPS == 0 and self.parallel.is_main:
            why = "gradients overflow in float16: the loss scale is coming down" if metrics.get("overflow") else "see loss and grad_norm"
            note(f"warning: no weight has moved in the last {self._skips} steps, up to step {step}, all of them were skipped ({why})")

    def log_eval(self, step: int, metrics: Mapping[str, float], *, epoch: float) -> None:
        """Write the metrics of an evaluation, named `eval_…`, and remember the best one."""
        named = {f"eval_{name}": value for name, value in metrics.items()}
        self._last |= named
        self._write(step, named, epoch)
        value = metrics.get(self.best_metric)
        kept = not self.cfg.train.load_best_model_at_end or self.schedule.should_save(step)  # what was not saved cannot be loaded
        if kept and value is not None and (self.best is None or (value < self.best[1]) == self._lower_is_better and value != self.best[1]):
            self.best = (step, value)
        self.reached = self._at_goal(named)
        if self.reached and self.parallel.is_main:
            name, goal = self.cfg.train.stop_metric, self.cfg.train.stop_value
            note(f"{name} {named[name]:.4g} reached stop_value {goal:g}: the run ends at step {step} of {self.plan.total_steps}")

    def _at_goal(self, metrics: Mapping[str, float]) -> bool:
        goal, name = self.cfg.train.stop_value, self.cfg.train.stop_metric
        if goal is None:
            return False
        if name not in metrics:
            if not self._goal_missed and self.parallel.is_main:
                note(f"warning: stop_metric {name} is none of this evaluation's metrics, and stop_value waits for it: {', '.join(metrics)}")
            self._goal_missed = True
            return False
        lower = name.endswith(("loss", "perplexity"))
        return metrics[name] <= goal if lower else metrics[name] >= goal

    def _write(self, step: int, metrics: Mapping[str, float], epoch: float) -> None:
        assert self._log is not None, "the session is a context: enter it before logging"
        self._names |= metrics.keys()
        self._log.log(step, metrics, epoch=epoch, tokens=self.tokens)

    # ---- checkpoints

    def should_save(self, step: int) -> bool:
        """True when the schedule saves after this step, or the run ends here early and writes checkpoints at all.

        Asked once a step by every rank: a signal that comes later ends the run after the next step, not without a save.
        """
        self._ending = self.parallel.any_rank(self._stop.requested)
        return self.schedule.should_save(step) or (self.cfg.train.save_strategy != "no" and (self.reached or self._ending))

    def save(self, step: int, role: Stateful, order: Resumable) -> None:
        """Write `checkpoint-{step}`: the role's state, and where data, tokens and evaluation stand."""
        if self.cfg.train.load_best_model_at_end and self.best is not None:
            self.checkpoints.keep = self.best[0]
        with self.checkpoints.writing(step) as folder:
            role.save(folder)
            if self.cfg.finetuning.lora:
                role.export_adapter(folder, self.cfg.model.model_name_or_path)
            if self.parallel.is_main:
                write_notes(folder, self.foundation.notes)
                state = {
                    "step": step,
                    "tokens": self.tokens,
                    "order": order.state_dict(),
                    "kept": {name: part.state_dict() for name, part in self.kept.items()},
                    "best": self.best,
                    "reached": self.reached,
                    "resumable": not self.cfg.train.save_only_model,
                    "engine": self.cfg.engine,
                    "trained": self.foundation.trained,
                    "stands_on": dict(self.foundation.stands_on),
                    "layout": self._layout,
                    "global_batch": self.plan.global_batch,
                }
                (folder / STATE_FILE).write_text(json.dumps(state, indent=1), encoding="utf-8")
        if self.parallel.is_main:
            self._write_state(step)

    def load_best(self, role: Stateful) -> None:
        """With `load_best_model_at_end`: go back to the weights of the best evaluation, if they are not those of now."""
        if self.cfg.train.load_best_model_at_end and self.best is not None and self.best[0] != self.step:
            role.load(self.output_dir / f"checkpoint-{self.best[0]}")

    # ---- the end

    def finish(self, *, seconds: float, plots: tuple[str, ...]) -> dict[str, float]:
        """Write results, state and plots; returns the results."""
        results = {k: v for k, v in self._last.items() if k not in ("lr", "loss") and not k.startswith("eval_")}
        if self._losses:
            results["train_loss"] = sum(self._losses) / len(self._losses)  # the mean over this start's steps, as Transformers has it
        results |= {"epoch": self.schedule.epoch(self.step), "train_runtime": seconds, "num_input_tokens_seen": float(self.tokens)}
        evals = {k: v for k, v in self._last.items() if k.startswith("eval_")}
        if self.parallel.is_main:
            write_results(self.output_dir, "train", results)
            if evals:
                write_results(self.output_dir, "eval", evals)
            self._write_state(self.step)
            write_notes(self.output_dir, self.foundation.notes)
            for text in self.foundation.notes:
                note(f"{self.output_dir}: {text}")
            if self.cfg.train.plot_loss:
                plot_all(self.output_dir, [name for name in plots if name in self._names])
        return results | evals

    def _write_state(self, step: int) -> None:
        best = {} if self.best is None else {"best_global_step": self.best[0], "best_metric": self.best[1]}
        write_trainer_state(
            self.output_dir,
            step=step,
            total_steps=self.plan.total_steps,
            epoch=self.schedule.epoch(step),
            extra={"num_input_tokens_seen": self.tokens} | best,
        )


def average(collected: list[Mapping[str, float]]) -> dict[str, float]:
    """Mean of every metric over the entries that have it; of `*_max` the largest."""
    result: dict[str, float] = {}
    for name in dict.fromkeys(name for metrics in collected for name in metrics):
        values = [metrics[name] for metrics in collected if name in metrics]
        result[name] = max(values) if name.endswith("_max") else sum(values) / len(values)
    return result
