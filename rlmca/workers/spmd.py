"""Worker groups. `SpmdGroup`: every process of the run executes the same loop and is one rank of the model.

With one process this is the in-process group: the share is the whole batch and nothing is communicated.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch

from rlmca.algorithms.contract import Loss, TokenOutputs
from rlmca.engines.base import Engine
from rlmca.parallel.groups import Parallel, share
from rlmca.transfer.stream import LiveWeights
from rlmca.types import Batch


class WorkerGroup(Protocol):
    """A role (policy, reference, …) as its loop sees it. Batches and results are whole; sharing them is the group's task."""

    def train_batch(self, batch: Batch, loss: Loss, learning_rate: float) -> dict[str, float]:
        """One optimizer step on the whole batch; see `Engine.train_batch`."""
        ...

    def log_probs(self, batch: Batch, *, temperature: float = 1.0, entropy: bool = False) -> TokenOutputs:
        """[B, T] for every row of the whole batch; see `Engine.log_probs`."""
        ...

    def weights(self) -> LiveWeights:
        """The live parameters of this process with their layout."""
        ...

    def save(self, path: Path) -> None:
        """Write the role's state below `path`."""
        ...

    def load(self, path: Path) -> None:
        """Continue from what `save` wrote."""
        ...


class SpmdGroup:
    """The engine of this process, together with the engines of all other processes of the run."""

    def __init__(self, engine: Engine, parallel: Parallel) -> None:
        self.engine, self.parallel = engine, parallel

    def train_batch(self, batch: Batch, loss: Loss, learning_rate: float) -> dict[str, float]:
        """See `WorkerGroup`. Raises ValueError for fewer rows than data-parallel ranks."""
        return self.engine.train_batch(batch.rows(self._own(len(batch))), loss, learning_rate)

    def log_probs(self, batch: Batch, *, temperature: float = 1.0, entropy: bool = False) -> TokenOutputs:
        """See `WorkerGroup`. A batch smaller than the data-parallel size is grown with rows of zero weight."""
        real, width = batch.ids_BT.shape
        batch = batch.pad_to(max(real, self.parallel.dp_size), width)
        own = self._own(len(batch))
        out = self.engine.log_probs(batch.rows(own), temperature=temperature, entropy=entropy)
        if self.parallel.dp_size == 1:
            return TokenOutputs(out.logp_BT[:real], None if out.entropy_BT is None else out.entropy_BT[:real])
        parts = [t for t in (out.logp_BT, out.entropy_BT) if t is not None]
        whole = parts[0].new_zeros(len(parts), len(batch), width)
        whole[:, own] = torch.stack(parts)
        self.parallel.dp_sum(whole)  # every row comes from one rank, the others add zeros
        return TokenOutputs(whole[0, :real], whole[1, :real] if entropy else None)

    def weights(self) -> LiveWeights:
        """See `WorkerGroup`."""
        return self.engine.weights()

    def save(self, path: Path) -> None:
        """See `WorkerGroup`."""
        self.engine.save(path)

    def load(self, path: Path) -> None:
        """See `WorkerGroup`."""
        self.engine.load(path)

    def _own(self, rows: int) -> list[int]:
        return share(range(rows), self.parallel.dp_rank, self.parallel.dp_size)
