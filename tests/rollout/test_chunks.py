"""Chunk plans: every reply once, bounds kept, padding small."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from rlmca.rollout.chunks import plan_chunks


@given(st.lists(st.tuples(st.integers(1, 900), st.integers(0, 20)), max_size=60), st.one_of(st.none(), st.integers(1, 50)))
def test_every_reply_is_planned_once_in_order_and_within_the_bound(rows: list[tuple[int, int]], limit: int | None) -> None:
    lengths, counts = [r[0] for r in rows], [r[1] for r in rows]
    chunks = plan_chunks(lengths, counts, limit)
    seen: Counter[int] = Counter()
    for chunk in chunks:
        assert chunk and all(piece.count > 0 for piece in chunk)
        if limit is not None:
            assert sum(piece.count for piece in chunk) <= limit
        for piece in chunk:
            assert piece.first == seen[piece.request]
            seen[piece.request] += piece.count
    assert [seen[i] for i in range(len(rows))] == counts


def test_a_group_that_fits_is_not_divided() -> None:
    chunks = plan_chunks([9] * 10, [8] * 10, 20)
    assert [len(chunk) for chunk in chunks] == [2] * 5
    assert all(piece.count == 8 for chunk in chunks for piece in chunk)


def test_padding_is_bounded_where_there_are_enough_prompts() -> None:
    lengths = list(range(10, 1000, 5))
    chunks = plan_chunks(lengths, [4] * len(lengths), None)
    real = sum(lengths)
    padded = sum(max(lengths[p.request] for p in chunk) * len(chunk) for chunk in chunks)
    assert padded < 1.4 * real
    assert len(chunks) < len(lengths) / 8
