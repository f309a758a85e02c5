"""Boxes of stored tensors, read back against numpy's own slicing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlmca.layouts.boxes import extents
from rlmca.transfer.convert.base import ConvertError, Slot, moved
from rlmca.transfer.convert.storage import Files, copy_run, read_box, row_ranges, run_of, same_bytes


@st.composite
def boxes(draw: Any) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...], str]:
    shape = tuple(draw(st.lists(st.integers(1, 9), max_size=4)))
    box = []
    for n in shape:
        start = draw(st.integers(0, n - 1))
        box.append((start, draw(st.integers(start + 1, n))))
    return shape, tuple(box), draw(st.sampled_from(["BF16", "F32", "F8_E4M3", "F64"]))


def write(path: Path, shape: tuple[int, ...], dtype: str, offset: int) -> tuple[Slot, np.ndarray]:
    kind = {"BF16": np.uint16, "F32": np.uint32, "F8_E4M3": np.uint8, "F64": np.uint64}[dtype]
    array = np.random.default_rng(7).integers(0, 255, shape).astype(kind)
    path.write_bytes(bytes(offset) + array.tobytes())
    return Slot(path, offset, shape, dtype), array


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(drawn=boxes(), offset=st.integers(0, 20), spread=st.booleans())
def test_a_box_is_what_numpy_slices(drawn: Any, offset: int, spread: bool, tmp_path: Path) -> None:
    shape, box, dtype = drawn
    slot, array = write(tmp_path / "t", shape, dtype, offset)
    wanted = array[tuple(slice(a, b) for a, b in box)]
    room = np.zeros((*extents(box), 2), array.dtype)  # every other element: an `out` that is not contiguous
    out = room[..., 0] if spread else np.zeros(extents(box), array.dtype)
    files = Files()
    read_box(files, slot, box, out)
    files.close()
    assert np.array_equal(out, wanted)
    if run := run_of(shape, box, array.dtype.itemsize):
        assert array.tobytes()[run.offset : run.offset + run.size] == wanted.tobytes()
    else:
        assert not array[tuple(slice(a, b) for a, b in box)].flags.c_contiguous


@pytest.mark.parametrize("columns", [(0, 10), (7, 5000), (19_000, 20_000)])
def test_a_few_columns_of_wide_rows(columns: tuple[int, int], tmp_path: Path) -> None:
    slot, array = write(tmp_path / "t", (9, 20_000), "BF16", 3)
    files, out = Files(), np.zeros((4, columns[1] - columns[0]), np.uint16)
    read_box(files, slot, ((2, 6), columns), out)
    files.close()
    assert np.array_equal(out, array[2:6, slice(*columns)])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 6), max_size=4), st.integers(1, 200))
def test_row_ranges_are_the_tensor_in_order(shape: list[int], most: int) -> None:
    slot = Slot(Path("t"), 0, tuple(shape), "BF16")
    at = 0
    for box in row_ranges(slot, most):
        run = run_of(slot.shape, box, 2)
        assert run is not None and run.offset == at and run.size <= max(most, 2)
        at += run.size
    assert at == 2 * int(np.prod(shape))


def test_moving_a_box_adds_and_drops_axes_of_length_one() -> None:
    wide, narrow = ((3, 4), (5, 6), (10, 20), (0, 7)), ((40, 50), (2, 9))
    assert moved(((3, 4), (5, 6), (12, 13), (1, 2)), wide, narrow) == ((42, 43), (3, 4))
    assert moved(((42, 43), (3, 4)), narrow, wide) == ((3, 4), (5, 6), (12, 13), (1, 2))


def test_a_file_that_ends_early_is_said(tmp_path: Path) -> None:
    slot, _ = write(tmp_path / "t", (4, 4), "F32", 0)
    (tmp_path / "t").write_bytes(bytes(40))
    files = Files()
    with pytest.raises(ConvertError, match="ends at byte 40"):
        read_box(files, slot, ((0, 4), (0, 4)), np.zeros((4, 4), np.uint32))
    files.close()


def test_runs_and_comparisons_across_files(tmp_path: Path) -> None:
    one, array = write(tmp_path / "a", (5, 7), "BF16", 6)
    (tmp_path / "b").write_bytes(bytes(2 + array.nbytes))
    files = Files()
    two = Slot(tmp_path / "b", 2, (5, 7), "BF16")
    assert not same_bytes(files, one, two)
    copy_run(files.reader(one.path), one.offset, files.writer(two.path), two.offset, array.nbytes)
    assert same_bytes(files, one, two, most=9) and not same_bytes(files, one, two._replace(dtype="F16"))
    files.close()
