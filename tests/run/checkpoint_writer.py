"""Writes one checkpoint in a process of its own that is killed, or finds the disk full, at its n-th file operation.

usage: checkpoint_writer.py OUTPUT_DIR STEP LIMIT kill|full|count CUT
"""

from __future__ import annotations

import errno
import os
import random
import signal
import sys
from pathlib import Path

from rlmca.run.checkpoint import Checkpoints

CHANGES = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir"}


def content(step: int) -> dict[str, bytes]:
    """What checkpoint `step` holds."""
    rng = random.Random(step)
    return {name: rng.randbytes(3000) for name in ("state/__0_0.distcp", "state/.metadata", "trainer.json")}


def fill(folder: Path, step: int) -> None:
    for name, data in content(step).items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        with open(path, "wb") as file:
            file.write(data[:1000])
            file.flush()
            os.fsync(file.fileno())  # a place to be cut, with a part of the file written
            file.write(data[1000:])


def main() -> None:
    output, step, limit, kind, cut = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], int(sys.argv[5])
    seen = 0
    real_fsync = os.fsync

    def operation(name: str, writes: bool) -> None:
        nonlocal seen
        seen += 1
        if kind == "kill" and seen == cut:
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "full" and seen >= cut and writes:  # once full, the disk stays full; removing still works
            raise OSError(errno.ENOSPC, f"No space left on device ({name})")

    def hook(event: str, args: tuple) -> None:
        if event in CHANGES and str(output) in str(args[0]):
            writes = event == "os.mkdir" or (event == "open" and bool(args[2] & (os.O_WRONLY | os.O_RDWR)))
            operation(event, writes)

    def fsync(descriptor: int) -> None:
        operation("fsync", True)
        real_fsync(descriptor)

    checkpoints = Checkpoints(output, limit)
    sys.addaudithook(hook)
    os.fsync = fsync
    with checkpoints.writing(step) as folder:
        fill(folder, step)
    print(seen)


if __name__ == "__main__":
    main()
