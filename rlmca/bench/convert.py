"""`bench convert`: conversion beside `cp -r` and beside safetensors' own load and save, of a random model, on one disk, in one run.

Every measurement has a process of its own, so that peaks of memory are its own; the processes alternate, and the fastest of all
rounds counts, since a disk and other processes can only make one slower. Imports and waiting for the disk count on no side.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from rlmca.bench.base import Bench
from rlmca.bench.commands import run_command
from rlmca.config import ConfigError
from rlmca.observe.console import console

CP, PEER = "cp -r", "safetensors load + save"
KINDS = {
    CP: "cp",
    PEER: "safetensors",
    "HF -> torch_dist": "to_megatron",
    "HF -> torch_dist --fast": "to_megatron_fast",
    "torch_dist -> HF": "to_hf",
    "torch_dist -> HF --fast": "to_hf_fast",
    "HF -> ranks TP2 PP2": "to_ranks",
    "ranks TP2 PP2 -> HF": "from_ranks",
}
"""Row of the table -> what the worker calls it. Those that read a Megatron checkpoint come after the one that made it."""
BARS = {"fast over cp": 1.5, "default over safetensors": 1.5, "memory MB": 150}


@dataclass(frozen=True)
class ConvertBenchOptions:
    """`params` of the random Qwen3 model in bfloat16, `rounds` of every measurement; `folder` is where it lies (default: a temporary
    folder)."""

    params: float = 0.6e9
    rounds: int = 3
    folder: Path = Path()


def run_convert_bench(options: ConvertBenchOptions) -> dict[str, Any]:
    """Make the model, run all rounds, print the table, return the figures."""
    if options.rounds < 1 or not 1e6 <= options.params <= 1e13:
        raise ConfigError("bench convert: rounds must be at least 1, params at least 1e6")
    base = options.folder if options.folder != Path() else None
    with tempfile.TemporaryDirectory(dir=base) as name:
        folder = Path(name)
        made = _measure(folder, "make", options.params)
        need = 4 * made["bytes"]
        if shutil.disk_usage(folder).free < need:
            raise ConfigError(f"bench convert: {folder} needs {need / 1e9:.1f} GB more; folder=PLACE names another place")
        measured: dict[str, list[dict[str, Any]]] = {row: [] for row in KINDS}
        for _ in range(options.rounds):
            for row, kind in KINDS.items():
                measured[row].append(_measure(folder, kind))
    rows = {row: _figures(values, made["bytes"]) for row, values in measured.items()}
    for figures in rows.values():
        figures["over_cp"] = figures["seconds"] / rows[CP]["seconds"]
        figures["over_safetensors"] = figures["seconds"] / rows[PEER]["seconds"]
    _print(rows, made, options)
    shown = {"params": made["params"], "rounds": options.rounds}
    return {"bench": "convert", "options": shown, "bytes": made["bytes"], "cpu_count": os.cpu_count(), "results": rows, "bars": BARS}


def _measure(folder: Path, kind: str, params: float | None = None) -> dict[str, Any]:
    out = folder / f"{kind}.json"
    command = [sys.executable, "-m", "rlmca.bench.convert_worker", kind, str(folder), str(out)]
    command += [] if params is None else [str(params)]
    run_command(command, env={}, log=out.with_suffix(".log"), shown=f"python -m rlmca.bench.convert_worker {kind}")
    result: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return result


def _figures(values: list[dict[str, Any]], size: int) -> dict[str, float]:
    seconds = min(run["seconds"] for run in values)
    return {
        "seconds": seconds,
        "median_seconds": statistics.median(run["seconds"] for run in values),
        "mb_per_second": size / 1e6 / seconds,
        "memory_mb": max(run["memory"] for run in values) / 1e6,
    }


def _print(rows: dict[str, dict[str, float]], made: dict[str, Any], options: ConvertBenchOptions) -> None:
    size = f"{made['params'] / 1e9:.2f}B parameters, {made['bytes'] / 1e9:.2f} GB in bfloat16"
    table = Table(title=f"Conversion of {size}; fastest of {options.rounds}, on {os.cpu_count()} cores", title_justify="left")
    table.add_column("way", no_wrap=True)
    for column in ("s", "MB/s", "of cp", "of safetensors", "memory MB"):
        table.add_column(column, justify="right")
    for name, row in rows.items():
        cells = (f"{row['seconds']:.2f}", f"{row['mb_per_second']:.0f}", f"{row['over_cp']:.2f}", f"{row['over_safetensors']:.2f}")
        table.add_row(name, *cells, "" if name == CP else f"{row['memory_mb']:.0f}")
    console().print(table)
    if not 0.8 < made["params"] / options.params < 1.25:
        console().print(f"the smallest model of this shape has more than params={options.params:g}", markup=False)
    console().print("memory: the most that the process had beyond what its imports took; without --fast with digests and checksums")


CONVERT = Bench("convert", ConvertBenchOptions(), run_convert_bench)
