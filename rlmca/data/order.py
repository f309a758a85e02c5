"""In which order rows are read: shuffled anew each epoch, resumable, each row once per epoch.

The order is one endless sequence of row numbers: epoch 0's permutation, then epoch 1's, and so on. Batches are cut
from that sequence, so the rows left over at the end of an epoch open the next batch instead of being lost, and the
position in it (rows taken so far) is all there is to save.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

WORD = 2**32


class ShuffledOrder:
    """Endless batches of row numbers. `fingerprint` names the data, so that a saved position is not applied to other data.

    Permutations come from NumPy's frozen MT19937 stream, keyed by (seed, epoch): the same in every version.
    """

    def __init__(self, num_rows: int, batch_size: int, seed: int, shuffle: bool = True, fingerprint: str = "") -> None:
        if num_rows < 1 or batch_size < 1:
            raise ValueError(f"an order needs rows and a batch size of at least 1, not {num_rows} rows in batches of {batch_size}")
        self.num_rows = num_rows
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.fingerprint = fingerprint
        self.position = 0
        self._epoch = -1
        self._rows: list[int] = []

    @property
    def epochs(self) -> float:
        """How many times the data has been read, with the part of the running epoch."""
        return self.position / self.num_rows

    def next(self) -> tuple[int, list[int]]:
        """(epoch of the first row, row numbers of the next batch). Never ends."""
        return self.position // self.num_rows, self.take(self.batch_size)

    def take(self, count: int) -> list[int]:
        """The next `count` row numbers of the sequence."""
        rows: list[int] = []
        while len(rows) < count:
            number, at = divmod(self.position, self.num_rows)
            part = self._order(number)[at : at + count - len(rows)]
            rows += part
            self.position += len(part)
        return rows

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps; plain numbers and text."""
        return {
            "position": self.position,
            "num_rows": self.num_rows,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "fingerprint": self.fingerprint,
        }

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Continue where `state` was saved. On other data, or another order of it, start at the first row with a warning.

        Returns True when the position was taken over. The batch size may differ from the saved one.
        """
        mine = self.state_dict()
        other = [key for key in ("num_rows", "fingerprint", "seed", "shuffle") if state.get(key) != mine[key]]
        if other:
            difference = ", ".join(f"{key} was {state.get(key)!r} and is {mine[key]!r}" for key in other)
            warnings.warn(f"the saved data position belongs to other data or another order: {difference}; data starts at 0", stacklevel=2)
            self.position = 0
            return False
        self.position = int(state["position"])
        return True

    def _order(self, epoch: int) -> list[int]:
        if not self.shuffle:
            self._rows = self._rows or list(range(self.num_rows))
        elif epoch != self._epoch:
            key = np.array([self.seed % WORD, self.seed // WORD % WORD, epoch], dtype=np.uint32)
            self._rows = np.random.RandomState(key).permutation(self.num_rows).tolist()
            self._epoch = epoch
        return self._rows
