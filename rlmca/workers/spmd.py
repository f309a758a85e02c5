"""SPMD ranks: every process of the run executes the same loop and is one rank of every model.

With one process this is the in-process case: the share is the whole batch and nothing is communicated.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from rlmca.algorithms.contract import Loss, TokenOutputs
from rlmca.config import RunConfig
from rlmca.engines.base import AdapterUse, Engine, Limits
from rlmca.engines.setup import build_engine, end_parallel, start_parallel
from rlmca.layouts import Form
from rlmca.parallel.groups import Parallel
from rlmca.transfer.export import export_hf
from rlmca.transfer.side_files import Tokenizer
from rlmca.types import Batch
from rlmca.workers.base import ExportOptions


class SpmdGroup:
    """The engine of this process, together with the engines of all other processes of the run. See `WorkerGroup`."""

    def __init__(self, engine: Engine, parallel: Parallel) -> None:
        self.engine, self.parallel = engine, parallel

    def train_batch(self, batch: Batch, loss: Loss, learning_rate: float, limits: Limits | None = None) -> dict[str, float]:
        """See `WorkerGroup`. A batch smaller than the data-parallel size is grown with rows of zero weight."""
        batch = self._grown(batch)
        return self.engine.train_batch(batch.rows(self._own(batch)), loss, learning_rate, limits)

    def log_probs(self, batch: Batch, *, temperature: float = 1.0, entropy: bool = False, adapter: AdapterUse = True) -> TokenOutputs:
        """See `WorkerGroup`. A batch smaller than the data-parallel size is grown with rows of zero weight."""
        real, width = batch.ids_BT.shape
        batch = self._grown(batch)
        own = self._own(batch)
        out = self.engine.log_probs(batch.rows(own), temperature=temperature, entropy=entropy, adapter=adapter)
        if self.parallel.dp_size == 1:
            return TokenOutputs(out.logp_BT[:real], None if out.entropy_BT is None else out.entropy_BT[:real])
        parts = [t for t in (out.logp_BT, out.entropy_BT) if t is not None]
        whole = parts[0].new_zeros(len(parts), len(batch), width)
        whole[:, own] = torch.stack(parts)
        self.parallel.dp_sum(whole)  # every row comes from one rank, the others add zeros
        return TokenOutputs(whole[0, :real], whole[1, :real] if entropy else None)

    def hf_tensors(self, form: Form | None = None) -> Iterator[tuple[str, Tensor]]:
        """See `WorkerGroup`."""
        weights = self.engine.weights()
        return (weights if form is None else weights.in_form(form)).tensors()

    def export(self, options: ExportOptions, tokenizer: Tokenizer | None) -> None:
        """See `WorkerGroup`."""
        export_hf(
            self.engine.weights(),
            options.out_dir,
            options.source_dir,
            tokenizer,
            dtype=options.dtype,
            shard_gb=options.shard_gb,
            overwrite=True,
        )

    def export_adapter(self, path: Path, base: str) -> None:
        """See `WorkerGroup`."""
        self.engine.export_adapter(path, base)

    def save(self, path: Path) -> None:
        """See `WorkerGroup`."""
        self.engine.save(path)

    def load(self, path: Path) -> None:
        """See `WorkerGroup`."""
        self.engine.load(path)

    def close(self) -> None:
        """See `WorkerGroup`."""
        del self.engine
        gc.collect()  # a model is full of cycles
        if self.parallel.device.type == "cuda":
            torch.cuda.empty_cache()

    def _grown(self, batch: Batch) -> Batch:
        """Filters of RL may leave fewer samples than ranks: what one rank trains on, two must train on too."""
        units = len(batch) if batch.unit_B is None else len(batch.unit_B.unique())
        return batch.pad_to(len(batch) + max(0, self.parallel.dp_size - units), batch.ids_BT.shape[1])

    def _own(self, batch: Batch) -> list[int]:
        return self.engine.shares(batch)[self.parallel.dp_rank]


class SpmdRanks:
    """This process as a rank among those that torchrun started; without torchrun it is alone. See `Ranks`."""

    def __init__(self, cfg: RunConfig) -> None:
        env = cfg.env
        self._cfg = cfg
        self.loop = start_parallel(cfg, rank=env.rank or 0, world_size=env.world_size or 1, local_rank=env.local_rank or 0)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """See `Ranks`."""
        return self.loop.sizes

    def build(self, role: str, folder: Path, *, trainable: bool = True) -> SpmdGroup:
        """See `Ranks`."""
        return SpmdGroup(build_engine(self._cfg, folder, self.loop, trainable=trainable), self.loop)

    def close(self) -> None:
        """See `Ranks`."""
        end_parallel(self._cfg)
