"""torchrun with the exit status of the first process that failed, ending when its launcher ends."""

from __future__ import annotations

import os
import signal
import sys


def main() -> int:
    """torchrun's command line; the exit status."""
    from rlmca.cli.parent import end_with_parent

    end_with_parent(signal.SIGTERM, os.getppid())
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # what torchrun sets by itself, with a warning
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    try:
        torchrun(sys.argv[1:])
    except SignalException as error:
        return 128 + int(error.sigval)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        print(f"process {rank} ended with status {failure.exitcode}", file=sys.stderr)
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    return 0


if __name__ == "__main__":
    sys.exit(main())
