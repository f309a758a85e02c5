"""What an engine is to everything above it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Protocol

from rlmca.algorithms.contract import Loss, TokenOutputs
from rlmca.transfer.stream import Weights
from rlmca.types import Batch

AdapterUse = bool | Literal["start"]
"""Whether log-probs are those of the weights with the adapter or without it, or with the adapter as it was when the run started."""

Limits = Mapping[str, float]
"""The most that a metric of an optimizer step may be, by its name: beyond it the step is not taken."""


class Engine(Protocol):
    """A model on ranks. Every method is collective over the engine's ranks.

    A `batch` is this data-parallel rank's share; ranks of one share pass the same batch. How the share is cut
    into micro-batches, padded and sent through pipeline stages is the engine's own business and changes no number.
    """

    def shares(self, batch: Batch) -> list[list[int]]:
        """Row numbers of each data-parallel rank's share of a whole batch, the same on all ranks."""
        ...

    def train_batch(self, batch: Batch, loss: Loss, learning_rate: float, limits: Limits | None = None) -> dict[str, float]:
        """One optimizer step on the batch of all ranks together.

        Returns the loss's metrics, `loss`, `grad_norm` (before clipping), and `skipped` (1.0 when no target was
        live or a number was not finite: weights and optimizer state are then untouched). In float16 also `loss_scale`, the
        factor of this step, and `overflow` (1.0 when the step was skipped because it was too large).

        With `limits` also `stopped`: 1.0 when one of these metrics, which are those of all ranks together, was beyond its
        limit. All ranks decide alike, after the backward pass and its collectives; weights, optimizer state and step counts
        are then untouched, and the step counts as skipped.
        """
        ...

    def log_probs(self, batch: Batch, *, temperature: float = 1.0, entropy: bool = False, adapter: AdapterUse = True) -> TokenOutputs:
        """Log-probabilities (and entropy, nats) of the batch's targets, [B, T], zero elsewhere; without gradient.

        With `adapter=False` those of the weights that an adapter stands beside, without it; with "start" those of the model as
        it was when the run started (ValueError when the engine was not told to keep the adapter that it starts from).
        """
        ...

    def weights(self) -> Weights:
        """The live weights, to be read as Hugging Face tensors; an adapter is merged into what is read."""
        ...

    def export_adapter(self, path: Path, base: str) -> None:
        """Write the adapter in PEFT's format into the existing folder `path`; `base` is what its configuration calls its model."""
        ...

    def offload(self) -> int:
        """Move weights, optimizer state and gradients out of the device's memory; bytes freed on this rank.

        Until `onload` every other method raises RuntimeError. Without effect when it is done already.
        """
        ...

    def onload(self) -> None:
        """Bring back what `offload` moved, bit by bit; without effect otherwise."""
        ...

    def save(self, path: Path) -> None:
        """Write weights and, unless the engine was told to leave it out, optimizer state into the folder `path`."""
        ...

    def load(self, path: Path) -> None:
        """Continue from a folder that `save` wrote."""
        ...
