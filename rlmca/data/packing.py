"""Packs: rows that are trained on together, put together from their lengths alone."""

from __future__ import annotations

import bisect
from collections.abc import Sequence


def pack_rows(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Row numbers of each pack: every row once, at most `capacity` tokens a pack, about as few packs as there can be.

    Best fit decreasing (Johnson 1973, "Near-optimal bin packing algorithms": at most 11/9 of the fewest possible, plus
    4): the longest row first, each into the fullest pack that has room for it. Packs depend on the data and the
    capacity, not on seeds or ranks, and come in the order of their first rows; rows in a pack keep their order.
    ValueError for a row longer than a pack.
    """
    packs: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, pack), ascending
    for row in sorted(range(len(lengths)), key=lambda r: (-lengths[r], r)):
        length = lengths[row]
        if length > capacity:
            raise ValueError(f"row {row} has {length} tokens, a pack holds {capacity}")
        at = bisect.bisect_left(room, (length, -1))
        left, pack = room.pop(at) if at < len(room) else (capacity, len(packs))
        if pack == len(packs):
            packs.append([])
        packs[pack].append(row)
        if left > length:
            bisect.insort(room, (left - length, pack))
    return sorted(sorted(pack) for pack in packs)
