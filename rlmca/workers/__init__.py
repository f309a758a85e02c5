"""How a loop reaches a model: whole batches in, whole results out, wherever the ranks are."""

from rlmca.workers.base import ExportOptions, Ranks, WorkerError, WorkerGroup
from rlmca.workers.spmd import SpmdGroup, SpmdRanks

__all__ = ["ExportOptions", "Ranks", "SpmdGroup", "SpmdRanks", "WorkerError", "WorkerGroup"]
