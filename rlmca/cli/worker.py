"""One process of a run that torchrun started: the same configuration, read again, then the stage."""

from __future__ import annotations

import os
import signal
import sys


def main() -> int:
    """`x.yaml key=value ...` under torchrun; the exit status."""
    from rlmca.cli import show
    from rlmca.cli.parent import end_with_parent
    from rlmca.cli.stages import run_command
    from rlmca.config import ConfigError, Environment, load_config

    end_with_parent(signal.SIGKILL, os.getppid())
    config, *overrides = sys.argv[1:]
    main_process = os.environ.get("RANK", "0") == "0"
    try:
        env = Environment.from_environ(os.environ)
        cfg = load_config(config, overrides, env=env)
        if cfg.train.use_cpu:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        return run_command(cfg, "train")
    except ConfigError as error:
        if main_process:
            show.errors(error)
        return 2


if __name__ == "__main__":
    sys.exit(main())
