"""The loop of supervised training: next rows, one optimizer step, log, evaluate, save."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlmca.algorithms.contract import Loss
from rlmca.data import Dataset, Encoded, ShuffledOrder
from rlmca.data.streaming import RowStream
from rlmca.run.session import Session
from rlmca.run.timing import Stopwatch
from rlmca.supervised.evaluation import evaluate
from rlmca.supervised.replies import ReplyEvaluation
from rlmca.types import Batch, batch_of_examples
from rlmca.workers import WorkerGroup


@dataclass
class Supervised:
    """Everything the loop talks to."""

    policy: WorkerGroup
    loss: Loss
    train: Dataset | None
    """None: `order` reads the rows itself."""
    evals: Mapping[str, Dataset]
    order: ShuffledOrder | RowStream
    eval_rows: int
    """Rows of one evaluation batch over all data-parallel ranks."""
    packs: Sequence[Sequence[int]] | None = None
    """Packing: the rows of each pack, and `order` counts packs."""
    replies: ReplyEvaluation | None = None
    """Scores generated replies besides the loss."""

    def next_batch(self) -> Batch:
        """The rows of the next step."""
        if isinstance(self.order, RowStream):
            return collate(self.order.next_rows())
        _, numbers = self.order.next()
        return self.batch(numbers if self.packs is None else [row for number in numbers for row in self.packs[number]])

    def batch(self, rows: Sequence[int]) -> Batch:
        """The batch of some rows of the training set."""
        assert self.train is not None
        return collate([self.train[row] for row in rows])

    def evaluate(self, step: int) -> dict[str, float]:
        """Loss on the held-out rows and, where reward functions are given, scores of replies to their prompts."""
        metrics = evaluate(self.policy, self.evals, self.eval_rows)
        return metrics if self.replies is None else metrics | self.replies(self.policy, step)


def run_loop(session: Session, parts: Supervised) -> None:
    """All steps from where the session stands; saves and evaluates as the schedule says."""
    for step in session.steps():
        watch = Stopwatch()
        batch = parts.next_batch()
        lr = session.learning_rate(step)
        metrics = parts.policy.train_batch(batch, parts.loss, lr)
        metrics |= {"lr": lr, "time_step": watch.seconds()["time_step"]}
        session.log(step, metrics, epoch=parts.order.epochs, tokens=batch.num_tokens)
        if session.schedule.should_eval(step):
            session.log_eval(step, parts.evaluate(step), epoch=parts.order.epochs)
        if session.should_save(step):
            session.save(step, parts.policy, parts.order)


def collate(examples: Sequence[Encoded]) -> Batch:
    """The batch of some rows."""
    return batch_of_examples([e.ids for e in examples], [e.mask for e in examples])
