"""How a loop reaches a model: whole batches in, whole results out, wherever the ranks are."""

from rlmca.workers.spmd import SpmdGroup, WorkerGroup

__all__ = ["SpmdGroup", "WorkerGroup"]
