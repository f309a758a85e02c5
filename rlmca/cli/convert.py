"""`rlmca-cli convert IN OUT`: the command line of conversion, its progress bar and its summary."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from rlmca.cli import show
from rlmca.layouts import LayoutError, UnsupportedField
from rlmca.transfer.convert.base import ConvertError, Item, Source
from rlmca.transfer.convert.execute import bytes_of
from rlmca.transfer.convert.manifest import check_manifest
from rlmca.transfer.convert.run import ConvertOptions, Interrupted, Summary, convert, plan
from rlmca.transfer.convert.storage import size_of
from rlmca.transfer.hf_folder import HFFolderError

DESCRIPTION = """\
Turns a Hugging Face folder into a Megatron checkpoint and back; what IN is, is read off its files. Without --to a Hugging Face
folder becomes a distributed checkpoint (torch_dist), which Megatron-Core loads in any layout, or, with sizes of a layout, a file
per rank; a Megatron checkpoint becomes a Hugging Face folder. `convert FOLDER --verify` alone checks a folder against its
manifest.json."""


def convert_command(arguments: Sequence[str], prog: str = "rlmca-cli convert") -> int:
    """Run the command; the exit status (0 done, 1 refused or failed, 130 interrupted)."""
    options = _parser(prog).parse_args(list(arguments))

    try:
        if options.out is None:
            if not options.verify:
                raise ConvertError("OUT is missing: name the folder to write (or write --verify to check FOLDER against its manifest.json)")
            parser_defaults = vars(_parser(prog).parse_args([str(options.source), "--verify"]))
            if given := [name for name, value in vars(options).items() if value != parser_defaults[name]]:
                raise ConvertError(
                    f"OUT is missing, and {', '.join('--' + name for name in given)} belong to a conversion: name the folder to write"
                )
            count = check_manifest(options.source)
            print(f"{options.source}: {count} tensors are as they were written")
            return 0
        wanted = {name: value for name, value in vars(options).items() if name != "dry_run" and value is not None}
        wanted["adapters"] = tuple(wanted.pop("adapter_name_or_path", ()))
        chosen = ConvertOptions(**wanted)
        if options.dry_run:
            made = plan(chosen)
            try:
                _print_plan(made.source, made.target.items, made.format, chosen.out)
            finally:
                made.source.close()
            return 0
        with _Bar() as bar:
            summary = convert(chosen, bar)
    except Interrupted as error:
        show.message(f"convert: {error}")
        return 130
    except (ConvertError, HFFolderError, UnsupportedField, LayoutError, FileExistsError, OSError) as error:
        show.message(f"convert: {error}")
        return 1
    _print_summary(chosen.out, summary)
    return 0


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog, description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("source", type=Path, metavar="IN", help="folder to read")
    parser.add_argument("out", type=Path, metavar="OUT", nargs="?", help="folder to write; must not exist (see --overwrite)")
    parser.add_argument("--to", choices=("hf", "torch_dist", "ranks"), help="what to write")
    parser.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), help="type of the weights (default: as stored)")
    layout = parser.add_argument_group("layout of a file per rank")
    for name, what in (("tp", "tensor"), ("pp", "pipeline"), ("vpp", "virtual pipeline"), ("ep", "expert")):
        layout.add_argument(f"--{name}", type=_positive, default=1, metavar="N", help=f"{what}-parallel size")
    layout.add_argument("--etp", type=_positive, metavar="N", help="expert-tensor-parallel size (default: --tp)")
    layout.add_argument("--pipeline_layout", metavar="TEXT", help="layers of each stage, as pipeline_model_parallel_layout writes them")
    layout.add_argument("--vocab_multiple", type=_positive, default=1, metavar="N", help="pad the vocabulary to a multiple of N x tp rows")
    layout.add_argument(
        "--transformer_impl", choices=("transformer_engine", "local"), help="whose parameter names (default transformer_engine)"
    )
    parser.add_argument(
        "--adapter_name_or_path", type=Path, action="append", metavar="FOLDER", help="LoRA adapter to merge; may be repeated"
    )
    parser.add_argument("--hf_config", type=Path, metavar="FOLDER", help="where config.json is when IN has none")
    parser.add_argument("--shard_gb", type=float, metavar="X", help="largest file in 10^9 bytes (default 5)")
    parser.add_argument("--verify", action="store_true", help="read both sides again and compare a digest per tensor")
    parser.add_argument("--fast", action="store_true", help="no digests, no manifest.json, no checksums inside archives")
    parser.add_argument("--resume", action="store_true", help="go on where an earlier attempt stopped")
    parser.add_argument("--overwrite", action="store_true", help="replace OUT when the new folder is whole")
    parser.add_argument("--threads", type=_positive, metavar="N", help="default: as many as cores, at most 4")
    parser.add_argument("--dry_run", "--dry-run", action="store_true", help="print what would be written, and write nothing")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return number


class _Bar:
    """A progress bar with bytes and rate on standard error."""

    def __init__(self) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=Console(stderr=True))
        self._task: TaskID | None = None

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def begin(self, what: str, total: int) -> None:
        """See `Watcher`."""
        self._progress.start()
        self._task = self._progress.add_task(what, total=total)

    def advance(self, size: int) -> None:
        """See `Watcher`."""
        if self._task is not None:
            self._progress.advance(self._task, size)


def _print_plan(source: Source, items: Sequence[Item], kind: str, out: Path) -> None:
    files: dict[str, list[int]] = {}
    for item in items:
        files.setdefault(str(item.slot.path), []).append(size_of(item.slot))
    table = Table(title=escape(f"{source.path} ({source.format}) -> {out} ({kind})"), title_justify="left")
    for column in ("file", "tensors", "bytes"):
        table.add_column(column, justify="left" if column == "file" else "right", overflow="fold")
    for file, sizes in files.items():
        table.add_row(escape(file), str(len(sizes)), f"{sum(sizes):,}")
    table.add_row("all", str(len(items)), f"{bytes_of(items):,}", style="bold")
    console = Console()
    console.print(table)
    elements = sum(math.prod(stored.shape) for stored in source.tensors.values())
    family = source.layout.family.model_type
    console.print(f"{family}, {elements:,} parameters in {len(source.tensors)} Hugging Face tensors; nothing was written", highlight=False)


def _print_summary(out: Path, summary: Summary) -> None:
    rate = summary.bytes / 1e6 / max(summary.seconds, 1e-9)
    parts = [f"{summary.tensors} tensors", f"{summary.bytes / 1e9:.3f} GB", f"{summary.seconds:.2f} s", f"{rate:.0f} MB/s"]
    parts.append(f"peak memory {summary.peak_bytes / 1e6:.0f} MB")
    if summary.resumed:
        parts.append(f"{summary.resumed} tensors were there already")
    if summary.verified:
        parts.append(f"{summary.verified} read back bit for bit")
    print(f"{out}: " + ", ".join(parts))
    if summary.note:
        print(f"note: {summary.note}")
