"""Whether what is in the files is what the source says: read both again and compare digests, tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import xxhash

from rlmca.transfer.convert.base import ConvertError, Item, Source
from rlmca.transfer.convert.execute import Sums, assembled, moves_of
from rlmca.transfer.convert.partial import digest_of
from rlmca.transfer.convert.storage import Files, size_of


def verify(
    items: Sequence[Item], source: Source, folder: Path, sums: Mapping[str, Sums], threads: int, advance: Callable[[int], None]
) -> None:
    """ConvertError naming the items whose bytes in `folder` are not those of the source, brought through the plan a second time.

    `sums` has what was counted as they were written, if it was; that must be the same too.
    """
    files = Files()

    def wrong(item: Item) -> str | None:
        expected = xxhash.xxh3_128()
        for data in assembled(moves_of(item, source), item.slot, source, files):
            expected.update(data)
            advance(len(data))
        found = digest_of(folder, item)
        advance(size_of(item.slot))
        told = sums[item.name].digest if item.name in sums else found
        return None if found == expected.hexdigest() == told else item.name

    try:
        with ThreadPoolExecutor(threads) as pool:
            differ = [name for name in pool.map(wrong, items) if name is not None]
    finally:
        files.close()
    if differ:
        some = ", ".join(differ[:8]) + (" and more" if len(differ) > 8 else "")
        raise ConvertError(f"{len(differ)} of {len(items)} tensors do not read back as the source has them: {some}; is the disk sound?")
