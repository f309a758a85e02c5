"""The project's own benchmarks, by name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlmca.bench.base import Bench, parse_extra
from rlmca.bench.compare import DEMO
from rlmca.bench.convert import CONVERT
from rlmca.bench.logprobs import LOGPROBS
from rlmca.config import ConfigError
from rlmca.run.output import write_json

__all__ = ["BENCHES", "run_bench"]

BENCHES: dict[str, Bench] = {bench.name: bench for bench in (DEMO, CONVERT, LOGPROBS)}


def run_bench(name: str, json_file: str | Path | None = None, extra: Sequence[str] = ()) -> int:
    """Run benchmark `name` with `key=value` options, print its table, write its figures to `json_file`; 0 when it ran.

    Raises `ConfigError` for a name, an option or a value that is not known, before anything runs.
    """
    if name not in BENCHES:
        raise ConfigError(f"bench {name}: no such benchmark; there is: {', '.join(sorted(BENCHES))}")
    bench = BENCHES[name]
    figures = bench.run(parse_extra(bench.options, extra, where=f"bench {name}"))
    if json_file is not None:
        path = Path(json_file)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, figures)
    return 0
