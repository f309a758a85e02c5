"""A folder that takes its name when it is whole: until then it lies beside it, with a journal that a second attempt goes on from."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

import xxhash

from rlmca.transfer.convert.base import ConvertError, Item
from rlmca.transfer.convert.execute import Sums
from rlmca.transfer.convert.storage import size_of
from rlmca.transfer.hf_writer import check_target

JOURNAL = ".convert.jsonl"
READ = 4 << 20


class Partial:
    """`.OUT.partial` beside `out`.

    `mark` identifies the conversion: what is read, by names, sizes and times of its files, and what is written. With `resume`
    a partial folder of the same mark is taken over, and `finished` has what of it is written and still reads as it was.
    Raises FileExistsError for an `out` that exists (without `overwrite`), ConvertError for a partial folder of another mark.
    """

    def __init__(self, out: Path, mark: Mapping[str, Any], *, overwrite: bool, resume: bool) -> None:
        out = out.resolve()  # beside the folder itself where `out` is a link to it
        self.out, self.folder = out, out.with_name(f".{out.name}.partial")
        self._old = out.with_name(f".{out.name}.old")
        if self._old.exists() and not out.exists():
            self._old.rename(out)
        try:
            check_target(out, overwrite)
        except FileExistsError as error:
            raise FileExistsError(f"{error}; --overwrite replaces a folder when the new one is whole") from None
        self._mark = json.loads(json.dumps(mark))
        self._journal = self._locked()
        self._lines: list[dict[str, Any]] = self._read_journal() if resume else []
        self.begun = bool(self._lines)
        if not self.begun:
            self._journal.close()
            shutil.rmtree(self.folder)
            self._journal = self._locked()

    def begin(self) -> None:
        """The files are laid out: from here on the folder can be gone on from."""
        self._journal.truncate(0)  # the last line of an attempt that was killed may be cut off
        for line in self._lines or [{"mark": self._mark}]:
            self._write(line)

    def finished(self, items: list[Item]) -> dict[str, Sums]:
        """Items that an earlier attempt wrote and that read back as they were then."""
        known = {line["item"]: Sums(line["crc32"], line["digest"]) for line in self._lines if "item" in line}
        return {
            item.name: known[item.name] for item in items if item.name in known and digest_of(self.folder, item) == known[item.name].digest
        }

    def done(self, item: Item, sums: Sums | None) -> None:
        """Note an item that is written. Without sums it would have to be believed, and is written again instead."""
        if sums is not None:
            self._write({"item": item.name, **sums._asdict()})

    def accept(self) -> None:
        """Everything is there and on the disk: give the folder its name."""
        shutil.rmtree(self._old, ignore_errors=True)
        if self.out.exists():
            self.out.rename(self._old)
        self.folder.rename(self.out)
        (self.out / JOURNAL).unlink()
        self.close()
        shutil.rmtree(self._old, ignore_errors=True)

    def close(self) -> None:
        """Close the journal: others may write to the folder."""
        self._journal.close()

    def _locked(self) -> TextIO:
        """The journal, made if it was not there, and nobody else's until it is closed."""
        self.folder.mkdir(parents=True, exist_ok=True)
        journal = (self.folder / JOURNAL).open("a", encoding="utf-8")
        try:
            fcntl.flock(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            journal.close()
            raise ConvertError(f"another process is writing {self.folder}: wait for its end, or name another OUT") from error
        return journal

    def _write(self, line: Mapping[str, Any]) -> None:
        self._journal.write(json.dumps(line) + "\n")
        self._journal.flush()

    def _read_journal(self) -> list[dict[str, Any]]:
        """Its whole lines; the last may have been cut off by what ended the process."""
        lines = []
        for text in (self.folder / JOURNAL).read_text(encoding="utf-8").splitlines():
            try:
                lines.append(json.loads(text))
            except ValueError:
                break
        if lines and lines[0].get("mark") != self._mark:
            raise ConvertError(
                f"{self.folder} was begun from other files or with other options: leave --resume out to begin anew, or repeat the command "
                "as it was"
            )
        return lines


def digest_of(folder: Path, item: Item) -> str:
    """XXH3 of an item's bytes as they lie in its file, in hexadecimal."""
    return digest_of_bytes(folder / item.slot.path, item.slot.offset, size_of(item.slot))


def digest_of_bytes(path: Path, offset: int, size: int) -> str:
    """XXH3 of a stretch of a file, in hexadecimal; "" when the file ends before."""
    digest, fd = xxhash.xxh3_128(), os.open(path, os.O_RDONLY)
    try:
        while size:
            data = os.pread(fd, min(size, READ), offset)
            if not data:
                return ""
            digest.update(data)
            offset, size = offset + len(data), size - len(data)
    finally:
        os.close(fd)
    return digest.hexdigest()
