"""Packs hold every row once and are about as few as there can be."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlmca.data import pack_rows


@given(st.lists(st.integers(1, 32), max_size=60), st.integers(32, 64))
def test_every_row_once_and_none_over_the_capacity(lengths: list[int], capacity: int) -> None:
    packs = pack_rows(lengths, capacity)
    assert sorted(sum(packs, [])) == list(range(len(lengths)))
    assert all(0 < sum(lengths[r] for r in pack) <= capacity for pack in packs)
    fewest = -(-sum(lengths) // capacity)
    assert len(packs) <= 11 / 9 * max(fewest, sum(2 * n > capacity for n in lengths)) + 4
    assert packs == pack_rows(lengths, capacity) and [pack[0] for pack in packs] == sorted(pack[0] for pack in packs)


def test_many_rows_are_packed_tightly_and_fast() -> None:
    draw = random.Random(0)
    lengths = [min(2048, int(draw.lognormvariate(5.5, 0.8)) + 1) for _ in range(50_000)]
    packs = pack_rows(lengths, 2048)
    assert sum(lengths) / (2048 * len(packs)) > 0.99


def test_a_row_longer_than_a_pack_is_an_error_with_both_numbers() -> None:
    with pytest.raises(ValueError, match="row 1 has 9 tokens, a pack holds 8"):
        pack_rows([3, 9], 8)
