"""Which prompts are generated together: similar lengths, and no more replies at once than allowed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_PADDING = 1.25
"""Padded over real prompt tokens above which a chunk takes no further prompt."""
_MIN_PROMPTS = 16
"""Chunks smaller than this are not closed for the sake of padding: small batches cost more than padded ones."""


@dataclass(frozen=True)
class Piece:
    """`count` replies of request `request`, from its seed number `first` on."""

    request: int
    first: int
    count: int


def plan_chunks(lengths: Sequence[int], counts: Sequence[int], limit: int | None) -> list[list[Piece]]:
    """Every reply of every request in exactly one chunk; a chunk holds at most `limit` replies.

    `lengths` are the prompts' tokens, `counts` the replies wanted of each. Requests are taken in order of length. A
    request with more replies than fit is divided over chunks, and its prompt runs once in each; the pieces of one
    request come in the order of its seeds.
    """
    chunks: list[list[Piece]] = []
    replies = tokens = 0
    for request in sorted((i for i, count in enumerate(counts) if count), key=lambda i: lengths[i]):
        first, left = 0, counts[request]
        while left:
            prompts = len(chunks[-1]) if chunks else 0
            padded = lengths[request] * (prompts + 1) > _PADDING * (tokens + lengths[request])
            full = limit is not None and (replies >= limit or (replies + left > limit and left <= limit))
            if not chunks or full or (padded and prompts >= _MIN_PROMPTS):
                chunks.append([])
                replies = tokens = 0
            take = left if limit is None else min(left, limit - replies)
            chunks[-1].append(Piece(request, first, take))
            replies, tokens = replies + take, tokens + lengths[request]
            first, left = first + take, left - take
    return chunks
