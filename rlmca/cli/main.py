"""`rlmca-cli`: parses a command line, checks everything, then runs or launches.

Nothing here imports torch before the configuration is known to be right, so a mistake is reported in a moment.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Sequence

from rlmca.cli import show
from rlmca.config import ConfigError, Environment, RunConfig, load_config

LATER = ("plan", "serve", "board")
USAGE = """rlmca-cli COMMAND ...

  train x.yaml [key=value ...]      train (stages pt, sft, dpo and grpo); --dry_run prints the plan alone
  eval x.yaml [key=value ...]       score a data set with the reward functions
  generate x.yaml [key=value ...]   write replies to a data set
  chat x.yaml [key=value ...]       talk to a model, or answer the lines of a pipe
  export x.yaml [key=value ...]     write a Hugging Face folder
  convert IN OUT [--tp N ...]       Hugging Face folders and Megatron checkpoints into each other; --help lists the options
  pairs REPLIES OUT [--min_margin X ...]  a ranking set for stage dpo out of scored replies; --help lists the options
  bench NAME [--json FILE]          the project's own benchmarks
  env                               versions of every dependency and what is missing for which feature
  version                           the version
  help [KEY]                        the keys of a configuration, or one of them
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; the exit status (2: the command or the configuration is wrong)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(arguments)
    except ConfigError as error:
        show.errors(error)
        return 2
    except KeyboardInterrupt:
        return 130


def _dispatch(arguments: list[str]) -> int:
    command, rest = (arguments[0], arguments[1:]) if arguments else ("", [])
    if command in ("", "-h", "--help"):
        print(USAGE)
        return 0 if command else 2
    if command in ("version", "--version"):
        show.version()
        return 0
    if command == "help":
        show.help_text(USAGE, rest)
        return 0
    if command == "env":
        from rlmca.cli.dependencies import print_environment

        print_environment()
        return 0
    if command == "bench":
        return _bench(rest)
    if command == "convert":
        from rlmca.cli.convert import convert_command

        return convert_command(rest)
    if command == "pairs":
        from rlmca.cli.pairs import pairs_command

        return pairs_command(rest)
    if command in ("train", "eval", "generate", "chat", "export"):
        return _run(command, rest)
    if command in LATER:
        raise ConfigError(f"command {command}: not in this version; rlmca-cli help lists the commands")
    raise ConfigError(f"{command}: unknown command; rlmca-cli help lists the commands")


def _run(command: str, arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog=f"rlmca-cli {command}", allow_abbrev=False)
    parser.add_argument("config", help="YAML or JSON file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that win over the file's")
    if command == "train":
        parser.add_argument("--dry_run", "--dry-run", action="store_true", help="check everything and print the plan")
        parser.add_argument("--gpus", type=int, help="with --dry_run: plan for this many processes")
    known, overrides = _options_first(arguments, parser)
    options = parser.parse_args(known)
    overrides = [*options.overrides, *overrides]
    env = Environment.from_environ(os.environ)
    cfg = _checked(options.config, overrides, env, command)
    if cfg.train.use_cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if command != "train":
        from rlmca.cli.stages import run_command

        return run_command(cfg, command)
    return _train(cfg, options, overrides)


def _options_first(arguments: list[str], parser: argparse.ArgumentParser) -> tuple[list[str], list[str]]:
    """argparse takes positionals in one block only; overrides may stand anywhere, so they are set apart first."""
    overrides = [a for a in arguments[1:] if "=" in a and not a.startswith("-")]
    return [a for i, a in enumerate(arguments) if i == 0 or a not in overrides], overrides


def _checked(path: str, overrides: Sequence[str], env: Environment, command: str) -> RunConfig:
    errors = env.launch_errors() if command == "train" else []
    try:
        cfg = load_config(path, overrides, env=env, command=command)
    except ConfigError as error:
        raise ConfigError([*errors, *error.errors]) from None
    if errors:
        raise ConfigError(errors)
    return cfg


def _train(cfg: RunConfig, options: argparse.Namespace, overrides: Sequence[str]) -> int:
    from rlmca.cli.launch import local_devices, plan_launch, start

    if options.gpus is not None and not options.dry_run:
        raise ConfigError("--gpus belongs to --dry_run; NPROC_PER_NODE sets the number of processes of a run")
    if options.gpus is not None and options.gpus < 1:
        raise ConfigError(f"--gpus {options.gpus}: at least 1")
    launch = plan_launch(cfg, local_devices(cfg))
    if launch.ray or (cfg.stage == "grpo" and (options.gpus or 1) > 1):
        cfg = dataclasses.replace(cfg, ray_ranks=options.gpus or launch.world_sizes[0])
    if options.dry_run:
        from rlmca.planner import dry_run

        dry_run(cfg, options.gpus or launch.world_sizes[0], here=options.gpus is None)
        return 0
    if cfg.env.is_main:
        from rlmca.planner import preflight_errors

        found = [error for size in launch.world_sizes for error in preflight_errors(cfg, size)]
        if found:
            raise ConfigError(list(dict.fromkeys(found)))
    if launch.torchrun:
        return start(launch, cfg.env, options.config, overrides)
    from rlmca.cli.stages import run_command

    return run_command(cfg, "train")


def _bench(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="rlmca-cli bench", allow_abbrev=False)
    parser.add_argument("name", metavar="NAME", help="the benchmark")
    parser.add_argument("--json", metavar="FILE", help="write the figures to a file")
    options, extra = parser.parse_known_args(arguments)
    from rlmca.bench.commands import CommandFailed
    from rlmca.bench.registry import run_bench

    try:
        status = run_bench(options.name, options.json, extra)
    except CommandFailed as error:
        show.message(str(error))
        return 1
    return int(status or 0)


if __name__ == "__main__":
    sys.exit(main())
