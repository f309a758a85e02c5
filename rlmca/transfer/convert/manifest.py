"""manifest.json beside converted weights: what every tensor's bytes came to when they were written."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlmca import __version__
from rlmca.transfer.convert.base import ConvertError, Item
from rlmca.transfer.convert.execute import Sums
from rlmca.transfer.convert.partial import digest_of_bytes
from rlmca.transfer.convert.storage import size_of

MANIFEST = "manifest.json"
FORMAT = "rlmca-manifest-1"


def write_manifest(folder: Path, source: Path, items: Sequence[Item], sums: Mapping[str, Sums]) -> None:
    """One entry an item: file, offset, bytes, type, shape and the XXH3-128 digest of its bytes."""
    tensors = {
        item.name: {
            "file": str(item.slot.path),
            "offset": item.slot.offset,
            "bytes": size_of(item.slot),
            "dtype": item.slot.dtype,
            "shape": list(item.slot.shape),
            "xxh3_128": sums[item.name].digest,
        }
        for item in items
    }
    head = {"format": FORMAT, "rlmca": __version__, "source": source.resolve().name}
    (folder / MANIFEST).write_text(json.dumps({**head, "tensors": tensors}, indent=1) + "\n", encoding="utf-8")


def check_manifest(folder: Path) -> int:
    """Read every tensor that the folder's manifest names and compare; returns how many there are.

    ConvertError naming those whose bytes are others, or when there is no manifest.
    """
    path = folder / MANIFEST
    entries = _entries(path)
    wrong = []
    for name, (file, offset, size, digest) in entries.items():
        place = folder / file
        if not place.is_file() or place.stat().st_size < offset + size or digest_of_bytes(place, offset, size) != digest:
            wrong.append(name)
    if wrong:
        some = ", ".join(wrong[:8]) + (" and more" if len(wrong) > 8 else "")
        raise ConvertError(f"{folder}: the bytes of {len(wrong)} of {len(entries)} tensors are not those that were written: {some}")
    named = {file for file, *_ in entries.values()}
    kinds = (".safetensors", ".distcp", ".pt")
    data = {str(file.relative_to(folder)) for file in folder.rglob("*") if file.suffix in kinds and file.name != "common.pt"}
    if more := sorted(data - named):
        raise ConvertError(f"{folder} has files that {path} does not name: {', '.join(more[:8])}")
    return len(entries)


def _entries(path: Path) -> dict[str, tuple[str, int, int, str]]:
    """{name: (file, offset, bytes, digest)}. ConvertError when it is no whole manifest."""
    if not path.is_file():
        raise ConvertError(f"{path.parent} has no {path.name}: it was not written by `convert`, or with --fast; verify a result of it")
    try:
        manifest: Any = json.loads(path.read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT:
            raise ConvertError(f"{path} is of format {manifest['format']!r}, this version knows {FORMAT}")
        entries = {name: (str(e["file"]), int(e["offset"]), int(e["bytes"]), str(e["xxh3_128"])) for name, e in manifest["tensors"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, ConvertError):
            raise
        raise ConvertError(f"{path} is no manifest of a conversion ({error})") from error
    if not entries or any(min(o, n) < 0 or Path(f).is_absolute() or ".." in Path(f).parts for f, o, n, _ in entries.values()):
        raise ConvertError(f"{path} is no manifest of a conversion: it names nothing, or what is not in its folder")
    return entries
