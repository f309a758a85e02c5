"""An engine's tensors out of the device's memory and back, bit by bit: room for whoever shares the device.

Storages are emptied and filled in place. Everything that views them (parameters in a flat buffer, gradients, masters in
the optimizer) stays valid and needs no knowledge of it.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class Offload:
    """What an engine has put aside; nothing while `active` is False."""

    def __init__(self) -> None:
        self._kept: list[tuple[torch.UntypedStorage, int, Tensor | None]] = []

    @property
    def active(self) -> bool:
        return bool(self._kept)

    def out(self, keep: Iterable[Tensor], drop: Iterable[Tensor] = ()) -> int:
        """Move the memory behind `keep` to the host and free that behind `drop` (gradients, zero when they come back).

        Returns the bytes that are free now. Tensors that share memory are moved once, whole; memory that torch does not
        own (a mapped file) stays where it is.
        """
        freed = 0
        for tensors, copied in ((keep, True), (drop, False)):
            for tensor in tensors:
                storage = tensor.untyped_storage()
                size = storage.nbytes()
                if not size or not storage.resizable():
                    continue
                view = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
                self._kept.append((storage, size, view.cpu().clone() if copied else None))
                del view
                storage.resize_(0)
                freed += size
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return freed

    def back(self) -> None:
        """Fill everything again; without effect when nothing is put aside."""
        for storage, size, copy in self._kept:
            storage.resize_(size)
            view = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            view.zero_() if copy is None else view.copy_(copy)
        self._kept = []

    def check(self) -> None:
        """RuntimeError while the engine's tensors are put aside: kernels would read memory that is not there."""
        if self.active:
            raise RuntimeError("the engine's memory is offloaded: call onload() before using it")


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Parameters, moments and whatever else a torch optimizer keeps in tensors."""
    state = [value for values in optimizer.state.values() for value in values.values() if isinstance(value, Tensor)]
    return [p for group in optimizer.param_groups for p in group["params"]] + state
