"""Streamed rows: bounded memory, every row once a pass, and a position that is taken up exactly."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlmca.data import ChatTemplate, DataError, load_supervised
from rlmca.data.encoders import ConversationEncoder
from rlmca.data.sources import iter_file
from rlmca.data.streaming import RowStream
from rlmca.data.texts import TextEncoder
from tests.helpers.datafiles import Options, write_set
from tests.helpers.tokenizers import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
TEMPLATE = ChatTemplate(TOKENIZER)


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> Options:
    folder = tmp_path_factory.mktemp("data")
    bad: list[Any] = [{"instruction": "a", "output": ""}, "x"]
    write_set(folder, [{"instruction": f"b {i}", "output": "9" * (i % 4 + 1)} for i in range(5)], name="b", file="b.jsonl")
    return write_set(folder, [*({"instruction": f"a {i}", "output": str(i)} for i in range(11)), *bad], name="a", file="a.jsonl")


def stream(options: Options, **changes: Any) -> RowStream:
    return RowStream(options, ConversationEncoder(options, TEMPLATE), **{"batch_size": 3, "buffer_size": 4, "seed": 5, **changes})


def key(row: Any) -> tuple[int, ...]:
    return tuple(row.ids)


def test_every_row_once_a_pass_in_a_new_order_each(options: Options) -> None:
    whole = sorted(map(key, load_supervised(options, TEMPLATE)))
    said: list[str] = []
    rows = stream(options, batch_size=11, log=said.append)
    passes = [list(map(key, rows.next_rows())) for _ in range(3)]
    assert all(sorted(part) == whole for part in passes) and passes[0] != passes[1] != passes[2]
    assert "pass 1 read, 11 rows, 2 dropped: " in said[0] and "1 × empty reply (row 11)" in said[0]
    plain = stream(options, batch_size=11, buffer_size=1)
    assert list(map(key, plain.next_rows())) == [key(row) for row in load_supervised(options, TEMPLATE)]
    assert [key(r) for r in stream(options).next_rows()] == [key(r) for r in stream(options).next_rows()]
    assert [key(r) for r in stream(options, seed=6, batch_size=11).next_rows()] != passes[0]


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 9), st.integers(1, 6), st.sampled_from([None, 70]), st.booleans())
def test_a_position_is_taken_up_exactly(options: Options, stop: int, buffer_size: int, capacity: int | None, texts: bool) -> None:
    both = dataclasses.replace(options, dataset=["a", "b"], mix_strategy="interleave_over", cutoff_len=9 if texts else 2048)

    def fresh() -> RowStream:
        encoder = TextEncoder(both, TOKENIZER) if texts else ConversationEncoder(both, TEMPLATE)
        return RowStream(both, encoder, batch_size=3, capacity=capacity, buffer_size=buffer_size, seed=2)

    whole = fresh()
    steps = [list(map(key, whole.next_rows())) for _ in range(12)]
    part = fresh()
    for _ in range(stop):
        part.next_rows()
    resumed = fresh()
    assert resumed.load_state_dict(json.loads(json.dumps(part.state_dict())))
    assert [list(map(key, resumed.next_rows())) for _ in range(12 - stop)] == steps[stop:]
    if capacity is not None:
        assert all(0 < sum(map(len, step)) <= capacity for step in steps) and max(map(len, steps)) > 1


@pytest.mark.parametrize("changes", [{"seed": 6}, {"buffer_size": 9}, {"held": 2}])
def test_a_position_in_another_order_or_other_data_starts_at_zero_with_a_warning(options: Options, changes: dict[str, Any]) -> None:
    saved = stream(options)
    saved.next_rows()
    other, fresh = stream(options, **changes), stream(options, **changes)
    with pytest.warns(UserWarning, match="starts at 0"):
        assert not other.load_state_dict(saved.state_dict())
    assert other.next_rows() == fresh.next_rows()
    with pytest.warns(UserWarning, match="stream was"):
        assert not stream(dataclasses.replace(options, dataset=["b"])).load_state_dict(saved.state_dict())


def test_the_first_rows_are_held_out_of_every_pass(options: Options) -> None:
    rows = stream(options, held=3, batch_size=8)
    whole = [key(row) for row in load_supervised(options, TEMPLATE)]
    assert rows.held_out is not None and [key(row) for row in rows.held_out] == whole[:3]
    for _ in range(2):
        assert sorted(map(key, rows.next_rows())) == sorted(whole[3:])
    with pytest.raises(DataError, match="holds out more rows than the 11 usable"):
        stream(options, held=12)
    with pytest.raises(DataError, match="holds out every row"):
        stream(dataclasses.replace(options, max_samples=11), held=11).next_rows()


def test_limits_and_data_of_which_nothing_is_usable(options: Options, tmp_path: Path) -> None:
    few = stream(dataclasses.replace(options, max_samples=2), batch_size=2)
    assert {key(row) for row in few.next_rows()} == {key(row) for row in load_supervised(options, TEMPLATE)[:2]}
    bad = write_set(tmp_path, [{"question": "a"}, {"question": "b"}])
    with pytest.raises(DataError, match="2 × no column 'instruction'"):
        stream(bad).next_rows()


def test_no_more_of_a_file_is_read_than_is_needed(options: Options, tmp_path: Path) -> None:
    """Rows are read as they are asked for."""
    path = tmp_path / "big.jsonl"
    path.write_text("".join(f'{{"instruction": "{i}", "output": "1"}}\n' for i in range(50)))
    rows = iter_file(path)
    assert next(rows)["instruction"] == "0"
    with path.open("a") as file:  # a list of all rows would not see what is written after the first was read
        file.write("".join(f'{{"instruction": "{i}", "output": "1"}}\n' for i in range(50, 20_000)))
    assert sum(1 for _ in rows) == 19_999


def test_another_part_of_the_source_is_other_data(tmp_path: Path) -> None:
    rows = [{"instruction": f"a {i}", "output": str(i)} for i in range(6)]
    mine = write_set(tmp_path, rows, name="a", file="a.jsonl")
    before = stream(mine)
    before.next_rows()
    state = json.loads(json.dumps(before.state_dict()))
    info = json.loads((tmp_path / "dataset_info.json").read_text())
    info["a"]["num_samples"] = 4
    (tmp_path / "dataset_info.json").write_text(json.dumps(info))
    with pytest.warns(UserWarning, match="data starts at 0"):
        assert not stream(mine).load_state_dict(state)


def test_a_source_that_is_emptied_while_it_is_read_ends_the_run(tmp_path: Path) -> None:
    mine = write_set(tmp_path, [{"instruction": "a", "output": "1"}] * 3, name="a", file="a.jsonl")
    rows = stream(mine)
    rows.next_rows()
    (tmp_path / "a.jsonl").write_text('{"instruction": "a", "output": ""}\n')
    with pytest.raises(DataError, match="no usable row"):
        rows.next_rows()
