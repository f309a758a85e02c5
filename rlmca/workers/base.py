"""Worker groups: how a loop reaches a model, wherever its ranks are. Same calls, same results.

`SpmdRanks`: every process of the run executes the loop and is a rank of the model; one process is the in-process
case. `RayRanks`: one process executes the loop, the ranks are Ray actors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from rlmca.algorithms.contract import Loss, TokenOutputs
from rlmca.engines.base import AdapterUse, Limits
from rlmca.layouts import Form
from rlmca.parallel.groups import Parallel
from rlmca.transfer.side_files import Tokenizer
from rlmca.types import Batch


class WorkerError(RuntimeError):
    """Ranks that cannot be started, or one that ended in mid-run."""


@dataclass(frozen=True)
class ExportOptions:
    """A Hugging Face folder to write; see `transfer.export.export_hf`."""

    out_dir: Path
    source_dir: Path
    dtype: torch.dtype
    shard_gb: float


class WorkerGroup(Protocol):
    """A role (policy, reference, …) as its loop sees it. Batches and results are whole; sharing them is the group's task."""

    def train_batch(self, batch: Batch, loss: Loss, learning_rate: float, limits: Limits | None = None) -> dict[str, float]:
        """One optimizer step on the whole batch; see `Engine.train_batch`."""
        ...

    def log_probs(self, batch: Batch, *, temperature: float = 1.0, entropy: bool = False, adapter: AdapterUse = True) -> TokenOutputs:
        """[B, T] for every row of the whole batch; see `Engine.log_probs`."""
        ...

    def hf_tensors(self, form: Form | None = None) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, tensor) of the live weights in the main process of the loop; every process of it runs to the end.

        Experts come in `form` (None: as the model's files hold them). A tensor may be a view of a live parameter: copy it to keep it.
        """
        ...

    def export(self, options: ExportOptions, tokenizer: Tokenizer | None) -> None:
        """Write the live weights as a Hugging Face folder, whole or not at all."""
        ...

    def export_adapter(self, path: Path, base: str) -> None:
        """See `Engine.export_adapter`."""
        ...

    def save(self, path: Path) -> None:
        """Write the role's state below `path`."""
        ...

    def load(self, path: Path) -> None:
        """Continue from what `save` wrote."""
        ...

    def close(self) -> None:
        """Let go of the model, so that others can have its memory; nothing else may be called afterwards."""
        ...


class Ranks(Protocol):
    """The processes that hold the models of a run; every role lives on all of them."""

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """(tensor, context, pipeline, data) parallel sizes."""
        ...

    @property
    def loop(self) -> Parallel:
        """The processes that execute the loop together."""
        ...

    def build(self, role: str, folder: Path, *, trainable: bool = True) -> WorkerGroup:
        """A model with the weights of a Hugging Face folder: the policy, or a frozen reference."""
        ...

    def close(self) -> None:
        """End groups and processes; safe to call twice and after a failure."""
        ...
