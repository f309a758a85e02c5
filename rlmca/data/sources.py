"""Raw rows of a data set: from files, from the hub, or made on the spot; all at once or one after the other.

A record that cannot be read becomes a `BadRow` in its place, so that positions stay the file's own. Records of JSON
lines end at a line feed and nowhere else: U+2028, U+0085 and their like are text.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rlmca.data.errors import BadRow, DataError
from rlmca.data.info import FILE_TYPES, TEXT_COLUMN, DatasetEntry
from rlmca.data.options import Hub
from rlmca.data.reasoning import reasoning_rows

Raw = Any
"""What a record decoded to (anything; a format wants a dict), or the BadRow that says why it did not."""

UTF8_BOM = b"\xef\xbb\xbf"
CSV_FIELD_LIMIT = 1 << 30


def read_rows(entry: DatasetEntry, hub: Hub | None = None) -> list[Raw]:
    """All records of a data set in order. DataError when the source as a whole cannot be read or holds no record."""
    rows = list(iter_rows(entry, hub))
    if not rows:
        raise DataError(f"data set {entry.name!r} is empty: {entry.where} holds no row")
    return rows


def iter_rows(entry: DatasetEntry, hub: Hub | None = None, *, lazy: bool = False) -> Iterator[Raw]:
    """The same records one after the other; `lazy` fetches those of a hub's set only as they are asked for.

    Of a file no more than a part is held in memory, but for .json, which holds one list. DataError as it comes.
    """
    if entry.procedural is not None:
        yield from reasoning_rows(entry.procedural)
    elif entry.hub is not None:
        yield from _read_hub(entry, hub or Hub(), lazy)
    else:
        assert entry.path is not None
        for file in source_files(entry.path):
            yield from iter_file(file)


def source_files(path: Path) -> list[Path]:
    """The file itself, or all files below a folder in the order of their names (hidden ones left out)."""
    if not path.is_dir():
        files = [path]
    else:
        inside = (file for file in sorted(path.rglob("*")) if file.is_file())
        files = [file for file in inside if not any(part.startswith(".") for part in file.relative_to(path).parts)]
        if not files:
            raise DataError(f"folder {path} holds no file")
    for file in files:
        if file.suffix.lstrip(".").lower() not in FILE_TYPES:
            raise DataError(f"{file}: a data file is one of {', '.join(FILE_TYPES)}")
    return files


def read_file(path: Path) -> list[Raw]:
    """The records of one file, by its suffix."""
    return list(iter_file(path))


def iter_file(path: Path) -> Iterator[Raw]:
    """The records of one file, one after the other."""
    kind = path.suffix.lstrip(".").lower()
    try:
        if kind in ("parquet", "arrow"):
            yield from _read_arrow(path, kind)
        elif kind == "csv":
            yield from _read_csv(path)
        elif kind == "json":
            yield from _read_json(path, path.read_bytes().removeprefix(UTF8_BOM))
        else:
            yield from (_json_lines if kind == "jsonl" else _text_lines)(_lines(path))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from None


def _lines(path: Path) -> Iterator[bytes]:
    """Lines without their end; a line ends at a line feed, with or without a carriage return before it."""
    with path.open("rb") as file:
        for number, line in enumerate(file):
            line = line.removeprefix(UTF8_BOM) if number == 0 else line
            yield line.removesuffix(b"\n").removesuffix(b"\r")


def _text_lines(lines: Iterable[bytes]) -> Iterator[Raw]:
    """A line is a row with the one column `text`, as the `text` loader of `datasets` has it."""
    for line in lines:
        try:
            yield {TEXT_COLUMN: line.decode("utf-8")}
        except UnicodeDecodeError:
            yield BadRow("not UTF-8")


def _read_json(path: Path, data: bytes) -> list[Raw]:
    """A list of rows; JSON lines under the name .json are taken too."""
    stripped = data.lstrip()
    if not stripped:
        return []
    if stripped.startswith(b"["):
        try:
            whole = json.loads(data.decode("utf-8"))
            return list(whole)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path} is not one whole JSON list in UTF-8: {error}") from None
    rows = list(_json_lines(data.split(b"\n")))
    if not any(isinstance(row, dict) for row in rows):
        raise DataError(f"{path} holds neither a JSON list of rows nor one JSON object a line")
    return rows


def _json_lines(lines: Iterable[bytes]) -> Iterator[Raw]:
    for line in lines:
        if not line.strip():
            continue
        try:
            yield json.loads(line.decode("utf-8"))
        except UnicodeDecodeError:
            yield BadRow("not UTF-8")
        except (ValueError, RecursionError):
            yield BadRow("broken JSON")


def _read_csv(path: Path) -> Iterator[Raw]:
    # Undecodable bytes become lone surrogates: the row that holds them is told apart and dropped, the others are kept.
    before = csv.field_size_limit(CSV_FIELD_LIMIT)
    file = path.open(encoding="utf-8", errors="surrogateescape", newline="")
    try:
        if file.read(1) != "\ufeff":
            file.seek(0)
        reader = csv.reader(file, strict=True)
        header: list[str] | None = None
        for record in reader:
            if not record:
                continue
            if header is None:
                header = record
                if len(set(header)) != len(header):
                    raise DataError(f"{path}: the header names a column twice: {', '.join(header)}")
                continue
            if not all(map(is_text, record)):
                yield BadRow("not UTF-8")
            elif len(record) != len(header):
                yield BadRow("number of fields differs from the header")
            else:
                yield dict(zip(header, record, strict=True))
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num}: {error}; the quotes of a CSV file must be closed") from None
    finally:
        file.close()
        csv.field_size_limit(before)


def _read_arrow(path: Path, kind: str) -> Iterator[Raw]:
    import pyarrow
    import pyarrow.parquet

    try:
        if path.stat().st_size == 0:
            return
        if kind == "parquet":
            batches = pyarrow.parquet.ParquetFile(path).iter_batches()
        else:
            # `datasets` writes the stream format, pyarrow and others the file format, both under one suffix.
            with path.open("rb") as file:
                is_file_format = file.read(6) == b"ARROW1"
            mapped = pyarrow.memory_map(str(path))
            if is_file_format:
                opened = pyarrow.ipc.open_file(mapped)
                batches = map(opened.get_batch, range(opened.num_record_batches))
            else:
                batches = iter(pyarrow.ipc.open_stream(mapped))
        for batch in batches:
            names = batch.schema.names
            if len(set(names)) != len(names):
                raise DataError(f"{path}: a column is named twice: {', '.join(names)}")
            yield from _arrow_rows(batch)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read as {kind}: {error}") from None


def _arrow_rows(batch: Any) -> Iterator[Raw]:
    try:
        yield from batch.to_pylist()
        return
    except (ValueError, OverflowError):
        pass
    for i in range(batch.num_rows):
        try:
            yield batch.slice(i, 1).to_pylist()[0]
        except UnicodeDecodeError:
            yield BadRow("not UTF-8")
        except (ValueError, OverflowError) as error:
            yield BadRow(f"a value out of range ({error})")


def _read_hub(entry: DatasetEntry, hub: Hub, lazy: bool) -> Iterator[Raw]:
    import datasets

    try:
        loaded = datasets.load_dataset(
            entry.hub, name=entry.subset, data_dir=entry.folder, split=entry.split, cache_dir=hub.cache_dir, token=hub.token, streaming=lazy
        )
        yield from map(dict, loaded)
    except Exception as error:
        subset = f", subset {entry.subset!r}" if entry.subset else ""
        raise DataError(
            f"data set {entry.name!r}: hub data set {entry.hub!r}{subset}, split {entry.split!r} cannot be loaded: "
            f"{type(error).__name__}: {error}"
        ) from error


def is_text(value: object) -> bool:
    """A str that can be written as UTF-8 (no lone surrogate, which no tokenizer takes)."""
    if not isinstance(value, str):
        return False
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
