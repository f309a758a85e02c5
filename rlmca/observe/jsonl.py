"""Strict JSON: a number that JSON cannot write (nan, inf) becomes null."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


def plain(value: Any) -> Any:
    """`value` in JSON's own types: non-finite floats become None, containers are walked, scalars of numpy and torch unwrapped."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    if isinstance(value, bool) or value is None or isinstance(value, (str, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if hasattr(value, "item"):
        return plain(value.item())
    return str(value)


def dumps(value: Any, indent: int | None = None) -> str:
    """One JSON text that any strict reader accepts."""
    return json.dumps(plain(value), allow_nan=False, ensure_ascii=False, indent=indent)


def write_atomically(path: Path, text: str) -> None:
    """The file has either its old or its new content, also after a crash; a failed write leaves no temporary file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSON-lines file; a last line that a crash cut short is left out, any other broken line is an error."""
    lines = path.read_bytes().split(b"\n")  # bytes: text may hold Unicode line separators
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            yield json.loads(line)
        except ValueError as error:
            if number == len(lines):
                return
            raise ValueError(f"{path}, line {number}: not JSON ({error})") from error
