"""One conversion from beginning to end: what is read, what is written, and that nothing is lost on the way."""

from __future__ import annotations

import errno
import math
import os
import resource
import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from rlmca.layouts import ModelLayout, Topology
from rlmca.layouts.pipeline import pipeline_topology
from rlmca.transfer.convert.base import DTYPES, ConvertError, Format, Item, Source, Stored, Target
from rlmca.transfer.convert.computed import MergedSource
from rlmca.transfer.convert.execute import Execution, Sums, bytes_of, check_plan
from rlmca.transfer.convert.formats import open_source
from rlmca.transfer.convert.hf import QUANTIZATION, HFTarget
from rlmca.transfer.convert.kept import WithKept
from rlmca.transfer.convert.manifest import write_manifest
from rlmca.transfer.convert.partial import Partial
from rlmca.transfer.convert.rank_files import RankFilesTarget
from rlmca.transfer.convert.storage import Files, sync
from rlmca.transfer.convert.torch_dist import TorchDistTarget
from rlmca.transfer.convert.verify import verify
from rlmca.transfer.side_files import copy_side_files, has_tokenizer, settle_config

DTYPE_NAMES = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}


@dataclass(frozen=True)
class ConvertOptions:
    """What the command line says, see `rlmca-cli convert --help`."""

    source: Path
    out: Path
    to: Format | None = None
    dtype: str | None = None
    shard_gb: float | None = None
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: int | None = None
    pipeline_layout: str | None = None
    vocab_multiple: int = 1
    transformer_impl: Literal["transformer_engine", "local"] | None = None
    adapters: tuple[Path, ...] = ()
    hf_config: Path | None = None
    verify: bool = False
    fast: bool = False
    overwrite: bool = False
    resume: bool = False
    threads: int = field(default_factory=lambda: min(4, os.cpu_count() or 1))
    synced: bool = True
    """Wait until the disk holds everything; a benchmark does not."""

    @property
    def has_layout(self) -> bool:
        """Whether a layout of ranks is asked for."""
        sizes = (self.tp, self.pp, self.vpp, self.ep, self.vocab_multiple)
        return any(size > 1 for size in sizes) or (self.etp, self.pipeline_layout, self.transformer_impl) != (None, None, None)

    @property
    def spec(self) -> Literal["local", "te"]:
        """The layer spec that names the parameters on ranks."""
        return "local" if self.transformer_impl == "local" else "te"


class Watcher(Protocol):
    """Who is told how far it is."""

    def begin(self, what: str, total: int) -> None:
        """A stretch of work of so many bytes begins."""
        ...

    def advance(self, size: int) -> None:
        """So many bytes are done; called from any thread."""
        ...


class Silent:
    """Nobody."""

    def begin(self, what: str, total: int) -> None:
        """See `Watcher`."""

    def advance(self, size: int) -> None:
        """See `Watcher`."""


@dataclass(frozen=True)
class Plan:
    """A conversion that is known to be possible."""

    source: Source
    target: Target
    format: Format
    dtypes: Mapping[str, str]
    """Type of every Hugging Face tensor as it is written."""


@dataclass(frozen=True)
class Summary:
    """What was done. `seconds` without the check of `verify`; `peak_bytes` is the most memory that the process ever had."""

    tensors: int
    bytes: int
    seconds: float
    peak_bytes: int
    resumed: int = 0
    verified: int = 0
    note: str = ""
    """What the source lacks that a user may miss."""


def plan(options: ConvertOptions) -> Plan:
    """Open the source and lay out the target; reads headers alone. Raises for everything that stands against it."""
    source = open_source(options.source, options.hf_config)
    try:
        if options.adapters:
            source = MergedSource(source, options.adapters)
        to = _format(options, source)
        dtypes = _types(source, options.dtype)
        target = _target(source, options, to, dtypes)
        check_plan(target.items, source)
    except BaseException:
        source.close()
        raise
    return Plan(source, target, to, dtypes)


def convert(options: ConvertOptions, watcher: Watcher | None = None) -> Summary:
    """Make `options.out`. ConvertError and its like before the first byte is written; an error or an interrupt later leaves `out`
    as it was, and says where it stopped."""
    if options.fast and options.resume:
        raise ConvertError("--resume goes on by the digests of what is written, and --fast takes none: leave one of them out")
    made = plan(options)
    try:
        return _execute(made, options, watcher or Silent())
    finally:
        made.source.close()


def _execute(made: Plan, options: ConvertOptions, watcher: Watcher) -> Summary:
    start, items, out = time.perf_counter(), list(made.target.items), options.out
    inside, out = options.source.resolve(), out.resolve()
    if not out.name:
        raise ConvertError(f"OUT is {options.out}; name a folder")
    if out == inside or inside in out.parents or out in inside.parents:
        raise ConvertError(f"{out} and {options.source} lie in each other; name another folder")
    files, total = Files(), bytes_of(items)
    if not options.resume:
        _check_space(out, total)
    partial = Partial(out, _mark(made, options), overwrite=options.overwrite, resume=options.resume)
    sums: dict[str, Sums] = {}

    def done(item: Item, found: Sums | None) -> None:
        partial.done(item, found)
        if found is not None:
            sums[item.name] = found

    try:
        if not partial.begun:
            made.target.begin(partial.folder)
        partial.begin()
        sums |= partial.finished(items)
        resumed, rest = len(sums), [item for item in items if item.name not in sums]
        watcher.begin("writing", bytes_of(rest))
        run = Execution(made.source, partial.folder, options.threads, options.fast, made.target.archives, done, watcher.advance)
        run.run(rest, files)
        made.target.finish(partial.folder, None if options.fast else {name: found.crc32 for name, found in sums.items()})
        seconds = time.perf_counter() - start
        if options.verify:
            watcher.begin("reading back", 2 * total)
            verify(items, made.source, partial.folder, sums, options.threads, watcher.advance)
        _side_files(made, partial.folder)
        if not options.fast:
            write_manifest(partial.folder, options.source, items, sums)
        if options.synced:
            sync(partial.folder)
        partial.accept()
    except BaseException as error:
        raise _stopped(error, partial, len(sums), len(items), options) from error
    finally:
        partial.close()
        files.close()
    return Summary(len(items), total, seconds, peak_memory(), resumed, len(items) if options.verify else 0, _note(made.source))


def _note(source: Source) -> str:
    return "" if has_tokenizer(source.path) else f"{source.path} has no tokenizer, and so the result has none"


def peak_memory() -> int:
    """The most bytes of memory that the process ever had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _format(options: ConvertOptions, source: Source) -> Format:
    to: Format = options.to or ("ranks" if options.has_layout else "torch_dist" if source.format == "hf" else "hf")
    if options.has_layout and to != "ranks":
        raise ConvertError(f"--to {to} has no layout of ranks: leave --tp and its kin out, or write --to ranks")
    if options.shard_gb is not None and to == "ranks":
        raise ConvertError("--shard_gb: a file per rank is as large as the rank's share; leave it out, or write --to hf or torch_dist")
    return to


def _types(source: Source, dtype: str | None) -> dict[str, str]:
    """Type of each tensor in the target: the one asked for, but for what is never rounded (buffers, layers that are kept)."""
    own = {name: stored.dtype for name, stored in source.tensors.items()}
    if dtype is None:
        return own
    if dtype not in DTYPE_NAMES:
        raise ConvertError(f"--dtype {dtype}: write {', '.join(DTYPE_NAMES)}")
    exact = source.layout.hf_buffers() | (own.keys() - source.layout.hf_tensors().keys())
    return {name: stored if name in exact else DTYPE_NAMES[dtype] for name, stored in own.items()}


def topology_of(options: ConvertOptions, num_layers: int) -> Topology:
    """The layout of ranks that the options ask for."""
    made = pipeline_topology(
        num_layers, tp=options.tp, pp=options.pp, vpp=options.vpp, ep=options.ep, etp=options.etp, layout=options.pipeline_layout
    )
    return Topology(made.tp, made.pp, options.vocab_multiple, made.chunks, made.ep, made.etp)


def _target(source: Source, options: ConvertOptions, to: Format, dtypes: Mapping[str, str]) -> Target:
    shard_gb = 5.0 if options.shard_gb is None else options.shard_gb
    if not 0 < shard_gb < math.inf:
        raise ConvertError(f"shard_gb is {shard_gb:g}; write a positive number of 10^9 bytes")
    if to == "hf":
        return HFTarget({name: Stored(stored.shape, dtypes[name]) for name, stored in source.tensors.items()}, shard_gb)
    if to == "torch_dist":
        made: Target = TorchDistTarget(source.layout, dtypes, max_bytes=int(shard_gb * 10**9))
    else:
        layout = ModelLayout(source.layout.hf_config, options.spec, source.layout.form)
        made = RankFilesTarget(layout, topology_of(options, layout.num_layers), dtypes)
    own = source.layout.hf_tensors()
    kept = {name: Stored(stored.shape, dtypes[name]) for name, stored in source.tensors.items() if name not in own}
    return WithKept(made, kept) if kept else made


def _side_files(made: Plan, folder: Path) -> None:
    copy_side_files(made.source.path, folder)
    trained = made.source.layout.hf_tensors().keys() - made.source.layout.hf_buffers()
    kinds = {made.dtypes[name] for name in trained}
    only = DTYPES[kinds.pop()] if len(kinds) == 1 else None
    settle_config(folder, made.source.layout.hf_config, only, drop=(QUANTIZATION,))


def _mark(made: Plan, options: ConvertOptions) -> dict[str, Any]:
    """What two attempts must have in common for one to go on where the other stopped."""
    free = ("out", "threads", "verify", "overwrite", "resume", "synced")
    wanted = {name: str(value) for name, value in asdict(options).items() if name not in free}
    parts = {part.slot.path for name in made.source.tensors for part in made.source.parts(name) or ()}
    beside = {path for folder in (options.source, made.source.path, *options.adapters) for path in _files(folder)}
    read = {str(path): [path.stat().st_size, path.stat().st_mtime_ns] for path in sorted(parts | beside)}
    return {"options": wanted, "files": read}


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.resolve().rglob("*") if path.is_file())


def _check_space(out: Path, total: int) -> None:
    there = next(folder for folder in out.resolve().parents if folder.exists())
    free = shutil.disk_usage(there).free
    if free < total:
        raise ConvertError(f"{out} takes {total / 1e9:.2f} GB, and {there} has {free / 1e9:.2f} GB left; make room or name another place")


def _stopped(error: BaseException, partial: Partial, done: int, total: int, options: ConvertOptions) -> BaseException:
    """The error with where it stopped and how it goes on."""
    left = "is untouched" if options.out.exists() else "was not made"
    where = f"stopped after {done} of {total} tensors; {options.out} {left}; {partial.folder} has what is written: --resume goes on with it"
    if isinstance(error, KeyboardInterrupt):
        return Interrupted(where)
    if isinstance(error, OSError):
        reason = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else str(error)
        return ConvertError(f"{reason}: {where}")
    if isinstance(error, ValueError):
        return ConvertError(f"{error}\n{where}")
    error.add_note(where)
    return error


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, with where it stopped."""
