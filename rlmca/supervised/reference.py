"""Log-probabilities of the reference model, computed once for all pairs before training and read from a file afterwards.

One file a data set, `reference-DIGEST.npy` in the output folder: float32, one number for every target of every row, in the
set's order. The digest is of the token rows, the reference's weights and how they compute, so that a file of other data
or of another reference is never read; the file gets its name when it is whole. Training maps it into memory: what is read of
it is what a batch needs, however large the set.

Shape legend: B rows, T token positions, N targets of a batch in row-major order, R rows of the set.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch

from rlmca.config import LateError
from rlmca.data import DataError, Pairs, batch_of_pairs
from rlmca.observe.console import note
from rlmca.observe.progress import progress
from rlmca.parallel.groups import Parallel
from rlmca.types import Batch
from rlmca.workers import WorkerGroup

_NAME = re.compile(r"\.?reference-[0-9a-f]{32}\.npy(\.tmp)?")
Write = Callable[[int, np.ndarray], None]
"""(place of the first number, numbers)"""


class ReferenceLogProbs:
    """The reference's log-probs of one set of pairs, on disk. All processes of the loop have one."""

    def __init__(self, pairs: Pairs, output_dir: Path, identity: str) -> None:
        """`identity` tells the reference's weights, and whatever else its numbers depend on, from others."""
        self.pairs = pairs
        digest = hashlib.blake2b(f"{pairs.fingerprint}\n{identity}".encode(), digest_size=16).hexdigest()
        self.path = output_dir / f"reference-{digest}.npy"
        targets_R = np.fromiter((sum(row.mask[1:]) for row in pairs.rows), dtype=np.int64, count=len(pairs.rows))
        self._start = np.concatenate(([0], np.cumsum(targets_R)))
        self._values: np.ndarray | None = None

    @property
    def there(self) -> bool:
        """Whether the whole file is on disk."""
        try:
            self._read()
        except (OSError, ValueError):
            return False
        return True

    def compute(self, model: WorkerGroup, pairs_at_once: int, parallel: Parallel) -> None:
        """Ask the model, `pairs_at_once` pairs at a time, those of about equal length together. Collective; the main process writes.

        LateError, on all processes alike, when a number is not finite: no step could be made with it.
        """
        lengths = self.pairs.lengths
        order = sorted(range(len(lengths)), key=lambda n: -lengths[n])
        with self._writing(parallel.is_main) as write, progress(len(self.pairs), "reference", is_main=parallel.is_main) as bar:
            for numbers in pieces(order, pairs_at_once):
                batch = batch_of_pairs([self.pairs[n] for n in numbers])
                logp_N = model.log_probs(batch).logp_BT.float().cpu()[batch.mask_BT].numpy()
                begin = 0
                for number in numbers:
                    end = begin + int(self._start[2 * number + 2] - self._start[2 * number])
                    if not np.isfinite(logp_N[begin:end]).all():
                        raise LateError(f"the reference gives a token of pair {number} a log-prob that is not finite: look at its weights")
                    write(int(self._start[2 * number]), logp_N[begin:end])
                    begin = end
                bar.advance(len(numbers))

    def open(self) -> None:
        """Map the file. DataError where this process does not find what the main one wrote."""
        try:
            self._values = self._read()
        except (OSError, ValueError) as error:
            raise DataError(
                f"{self.path} cannot be read ({error}): every process reads the reference's log-probs from output_dir, which must be on a "
                "file system that all of them share"
            ) from None

    def added(self, batch: Batch, numbers: Sequence[int]) -> Batch:
        """The batch of the pairs with these numbers, with the reference's log-probs of its targets."""
        assert self._values is not None, "open it first"
        logp_N = np.concatenate([self._values[self._start[2 * n] : self._start[2 * n + 2]] for n in numbers])
        ref_BT = torch.zeros(batch.mask_BT.shape, dtype=torch.float32)
        ref_BT[batch.mask_BT] = torch.from_numpy(logp_N)
        return batch.replace(ref_logp_BT=ref_BT)

    def _read(self) -> np.ndarray:
        values = np.load(self.path, mmap_mode="r", allow_pickle=False)
        if values.dtype != np.float32 or values.shape != (int(self._start[-1]),):
            raise ValueError(f"it holds {values.dtype} {values.shape}")
        return values

    @contextmanager
    def _writing(self, is_main: bool) -> Iterator[Write]:
        """The file under another name until it is whole; nothing is left of one that fails."""
        if not is_main:
            yield lambda place, values: None
            return
        temporary = self.path.with_name(f".{self.path.name}.tmp")
        try:
            with temporary.open("wb") as file:
                shape = (int(self._start[-1]),)
                np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": shape})
                yield _writer(file, file.tell())
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def _writer(file: BinaryIO, header: int) -> Write:
    def write(place: int, values: np.ndarray) -> None:
        file.seek(header + 4 * place)
        file.write(values.astype("<f4").tobytes())

    return write


def missing(references: Mapping[str, ReferenceLogProbs], parallel: Parallel) -> list[ReferenceLogProbs]:
    """Those whose file the main process does not find: the same on all processes. Of files that nobody asks for nothing is kept."""
    found: list[str] = []
    if parallel.is_main:
        wanted = {reference.path for reference in references.values()}
        for folder in {path.parent for path in wanted}:
            for path in folder.iterdir():
                if _NAME.fullmatch(path.name) and path not in wanted:
                    path.unlink()
        found = [name for name, reference in references.items() if not reference.there]
        if references and not found:
            note("reference: log-probs of an earlier start are read, they are of the same pairs and weights")
    return [references[name] for name in parallel.broadcast_object(found)]


def pieces(numbers: Sequence[int], at_once: int) -> Iterator[Sequence[int]]:
    """`at_once` of them at a time."""
    return (numbers[at : at + at_once] for at in range(0, len(numbers), at_once))
