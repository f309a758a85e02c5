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
    try:
        manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        entries = manifest["tensors"]
        if manifest["format"] != FORMAT:
            raise ConvertError(f"{path} is of format {manifest['format']!r}, this version knows {FORMAT}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, ConvertError):
            raise
        raise ConvertError(f"{path} is no manifest of a conversion: {error}; --fast writes none") from error
    wrong = []
    for name, entry in entries.items():
        try:
            found = digest_of_bytes(folder / entry["file"], entry["offset"], entry["bytes"])
        except FileNotFoundError:
            found = ""
        if found != entry["xxh3_128"]:
            wrong.append(name)
    if wrong:
        raise ConvertError(
            f"{folder}: the bytes of {len(wrong)} of {len(entries)} tensors are not those that were written: {', '.join(wrong[:8])}"
        )
    return len(entries)
