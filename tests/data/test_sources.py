"""Names, files and formats: what is read, what is refused, and what an error says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import reasoning_gym

from rlmca.data import ChatTemplate, DataError, check_sources, load_prompts, load_supervised
from rlmca.data.errors import BadRow, Dropped
from rlmca.data.formats import Conversation, convert_rows
from rlmca.data.info import resolve
from rlmca.data.sources import read_file, read_rows
from tests.helpers.datafiles import Options, write_set
from tests.helpers.tokenizers import CHATML, THINKING, tiny_tokenizer

ROWS = [{"instruction": "a\u2028b", "input": 'q"uo,te\nd', "output": "ü"}, {"instruction": "c", "input": "", "output": "d"}]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    table = pyarrow.Table.from_pylist(rows)
    match path.suffix:
        case ".json":
            path.write_text(json.dumps(rows, indent=1), encoding="utf-8-sig")
        case ".jsonl":
            path.write_bytes(b"\r\n".join(json.dumps(row, ensure_ascii=False).encode() for row in rows))
        case ".csv":
            quote = lambda text: '"' + text.replace('"', '""') + '"'  # noqa: E731
            lines = [",".join(rows[0]), *(",".join(map(quote, row.values())) for row in rows)]
            path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
        case ".parquet":
            pyarrow.parquet.write_table(table, path)
        case ".arrow":
            with pyarrow.ipc.new_stream(str(path), table.schema) as writer:
                writer.write_table(table)


@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".csv", ".parquet", ".arrow"])
def test_every_kind_of_file_gives_the_rows_exactly(tmp_path: Path, suffix: str) -> None:
    write_rows(tmp_path / f"x{suffix}", ROWS)
    assert read_file(tmp_path / f"x{suffix}") == ROWS


def test_arrow_file_format_and_a_folder_of_files(tmp_path: Path) -> None:
    table = pyarrow.Table.from_pylist(ROWS)
    (tmp_path / "set").mkdir()
    with pyarrow.ipc.new_file(str(tmp_path / "set" / "1.arrow"), table.schema) as writer:
        writer.write_table(table)
    write_rows(tmp_path / "set" / "2.json", ROWS[:1])
    (tmp_path / "set" / ".hidden").write_text("not data")
    (tmp_path / "dataset_info.json").write_text(json.dumps({"toy": {"file_name": "set"}}))
    assert read_rows(resolve(["toy"], tmp_path)[0]) == [*ROWS, ROWS[0]]


@pytest.mark.parametrize(
    ("file", "content", "part"),
    [
        ("toy.json", b'[{"instruction": "a"}, {"instr', "not one whole JSON list"),
        ("toy.json", b'[{"instruction": "\xff"}]', "not one whole JSON list"),
        ("toy.json", b'{"instruction":\n "a"}', "neither a JSON list"),
        ("toy.json", b"", "is empty"),
        ("toy.jsonl", b"\xef\xbb\xbf\r\n \n", "is empty"),
        ("toy.csv", b"instruction,output\n", "is empty"),
        ("toy.csv", b'instruction,output\n"a,b\nc,d\n', "quotes of a CSV"),
        ("toy.csv", b"a,a\n1,2\n", "names a column twice"),
        ("toy.parquet", b"PAR1 is not enough", "cannot be read as parquet"),
        ("toy.arrow", b"ARROW1 and nothing", "cannot be read as arrow"),
        ("toy.doc", b"text", "a data file is one of"),
    ],
)
def test_unreadable_files_are_errors_that_name_the_file(tmp_path: Path, file: str, content: bytes, part: str) -> None:
    write_set(tmp_path, content, file=file)
    with pytest.raises(DataError) as error:
        read_rows(resolve(["toy"], tmp_path)[0])
    assert part in str(error.value) and file in str(error.value)


def test_bad_csv_records_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_bytes(b"a,b\n1,2\n1\n1,2,3\n\xff,2\n\n3,4\n")
    rows = read_file(tmp_path / "x.csv")
    assert [row.reason if isinstance(row, BadRow) else row for row in rows] == [
        {"a": "1", "b": "2"},
        "number of fields differs from the header",
        "number of fields differs from the header",
        "not UTF-8",
        {"a": "3", "b": "4"},
    ]


@pytest.mark.parametrize(
    ("entry", "part"),
    [
        ({"ms_hub_url": "a/b"}, "ms_hub_url (ModelScope) is not in this version"),
        ({"script_url": "a"}, "script_url"),
        ({"cloud_file_name": "a"}, "cloud_file_name"),
        ({"file_name": "toy.jsonl", "ranking": 1}, "ranking"),
        ({"file_name": "toy.jsonl", "colums": {}}, "nearest: columns"),
        ({"file_name": "toy.jsonl", "formatting": "alpacca"}, "alpaca, sharegpt, openai"),
        ({"file_name": "toy.jsonl", "columns": {"images": "images"}}, "columns.images is not in this version"),
        ({"file_name": "toy.jsonl", "columns": {"promt": "q"}}, "nearest: prompt"),
        ({"file_name": "toy.jsonl", "formatting": "sharegpt", "tags": {"rol_tag": "q"}}, "nearest: role_tag"),
        ({"file_name": "toy.jsonl", "formatting": "sharegpt", "tags": {"user_tag": "gpt"}}, "same tag"),
        ({"file_name": "toy.jsonl", "num_samples": 0}, "num_samples"),
        ({"file_name": "toy.jsonl", "subset": "a"}, "belongs to hf_hub_url"),
        ({"file_name": "absent.jsonl"}, "does not exist"),
        ({}, "no source"),
        ([], "must be an object"),
    ],
)
def test_entries_that_cannot_be_honoured_are_refused_by_name(tmp_path: Path, entry: Any, part: str) -> None:
    (tmp_path / "toy.jsonl").write_text("{}")
    (tmp_path / "dataset_info.json").write_text(json.dumps({"toy": entry, "fine": {"file_name": "toy.jsonl"}}))
    with pytest.raises(DataError) as error:
        resolve(["toy"], tmp_path)
    assert part in str(error.value) and "'toy'" in str(error.value)
    assert resolve(["fine"], tmp_path)[0].path == tmp_path / "toy.jsonl"


def test_all_problems_of_the_names_at_once(tmp_path: Path) -> None:
    write_set(tmp_path, [{}], name="alpaca_en")
    options = Options(
        dataset=["alpaca_em", "reasoning_gym:chain_sun", "alpaca_en"],
        eval_dataset=["reasoning_gym:chain_sum?sise=3"],
        dataset_dir=str(tmp_path),
    )
    errors = check_sources(options)
    assert len(errors) == 3
    assert "nearest: alpaca_en" in errors[0] and "nearest: chain_sum" in errors[1] and "sise" in errors[2]
    assert check_sources(Options(dataset=["alpaca_en"], dataset_dir=str(tmp_path))) == []
    assert "dataset_dir" in check_sources(Options(dataset=["x"], dataset_dir=str(tmp_path / "no")))[0]


def convert(rows: list[Any], tmp_path: Path, **entry: Any) -> tuple[list[Conversation], list[str]]:
    write_set(tmp_path, [{}], **entry)
    dropped = Dropped()
    found = convert_rows(resolve(["toy"], tmp_path)[0], list(enumerate(rows)), need_reply=True, dropped=dropped)
    return found, [row.reason for row in dropped]


def test_alpaca_columns(tmp_path: Path) -> None:
    names = {"prompt": "p", "query": "q", "response": "r", "history": "h", "system": "s", "tools": "t"}
    row = {"p": "do", "q": "this", "r": "done", "h": [["a", "b"]], "s": "sys", "t": '[{"name": "f"}]'}
    found, _ = convert([row], tmp_path, columns=names)
    assert [(m["role"], m["content"]) for m in found[0].messages] == [
        ("system", "sys"), ("user", "a"), ("assistant", "b"), ("user", "do\nthis"), ("assistant", "done")]  # fmt: skip
    assert found[0].tools == [{"type": "function", "function": {"name": "f"}}]
    # A column that `columns` leaves out is not read, as in LLaMA-Factory.
    found, _ = convert([{"p": "do", "input": "this", "r": "done"}], tmp_path, columns={"prompt": "p", "response": "r"})
    assert found[0].messages[0]["content"] == "do"


def test_sharegpt_tags_and_function_turns(tmp_path: Path) -> None:
    roles = {"user_tag": "u", "assistant_tag": "a", "observation_tag": "o", "function_tag": "f", "system_tag": "s"}
    tags = {"role_tag": "who", "content_tag": "says", **roles}
    say = lambda who, text: {"who": who, "says": text}  # noqa: E731
    turns = [say("s", "sys"), say("u", "hi"), say("f", '{"name": "f", "arguments": {"x": 1}}'), say("o", "9"), say("a", "nine")]
    found, _ = convert([{"c": turns}], tmp_path, formatting="sharegpt", columns={"messages": "c"}, tags=tags)
    assert [m["role"] for m in found[0].messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert found[0].messages[2]["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]


def test_openai_messages_with_parts_and_parallel_tools(tmp_path: Path) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]},
        {"role": "assistant", "content": None, "tool_calls": [call, call]},
        {"role": "tool", "content": "1", "tool_call_id": "1"},
        {"role": "tool", "content": "2", "tool_call_id": "1"},
        {"role": "assistant", "content": "ok"},
    ]
    found, reasons = convert([{"messages": turns}], tmp_path, formatting="openai")
    assert not reasons
    assert found[0].messages[0]["content"] == "hi" and len(found[0].messages[1]["tool_calls"]) == 2
    assert found[0].messages[3] == {"role": "tool", "content": "2", "tool_call_id": "1"}


@pytest.mark.parametrize(
    ("turns", "reason"),
    [
        ([{"from": "human", "value": "a"}, {"from": "robot", "value": "b"}], "unknown role 'robot'"),
        ([{"from": "human", "value": "a"}, {"value": "b"}], "a message without 'from'"),
        ([{"from": "human", "value": "a"}, {"from": "gpt"}], "a message without 'value'"),
        ([{"from": "human", "value": "a"}, {"from": "gpt", "value": " "}], "empty reply"),
        ([{"from": "human", "value": ""}, {"from": "gpt", "value": "b"}], "empty prompt"),
        ([{"from": "human", "value": "a"}, {"from": "human", "value": "b"}, {"from": "gpt", "value": "c"}], "turns do not alternate"),
        ([{"from": "gpt", "value": "a"}, {"from": "human", "value": "b"}], "the first turn is not the user's"),
        ([{"from": "human", "value": "a"}, {"from": "system", "value": "b"}], "a system message that is not the first"),
        ([{"from": "human", "value": "a"}, {"from": "gpt", "value": {"x": 1}}], "'value' is a dict, not text"),
        ([{"from": "human", "value": "a"}, {"from": "function_call", "value": "f(x)"}], "'function call' is not JSON"),
        (
            [{"from": "human", "value": "a"}, {"from": "function_call", "value": '{"name": "f"}'}],
            "a function call whose arguments are not an object",
        ),
        ([], "no messages"),
        (None, "column 'conversations' is null, not a list of messages"),
        ("hello", "'conversations' is not JSON"),
        (["a", "b"], "a message is a str, not an object"),
    ],
)
def test_bad_conversations_are_dropped_with_the_reason(tmp_path: Path, turns: Any, reason: str) -> None:
    found, reasons = convert([{"conversations": turns}], tmp_path, formatting="sharegpt")
    assert not found and reasons == [reason]


def test_a_path_is_a_data_set_too(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}))
    options = Options(dataset=[str(tmp_path / "x.jsonl")], dataset_dir=str(tmp_path / "none"))
    assert len(load_supervised(options, ChatTemplate(tiny_tokenizer(CHATML)))) == 1


def test_reasoning_gym_rows_carry_what_the_verifier_needs() -> None:
    source = "reasoning_gym:chain_sum?size=5&seed=7&min_terms=2&max_terms=3&allow_negation=false"
    options = Options(dataset=[source], dataset_dir="nowhere")
    template = ChatTemplate(tiny_tokenizer(THINKING))
    made = reasoning_gym.create_dataset("chain_sum", size=5, seed=7, min_terms=2, max_terms=3, allow_negation=False)
    prompts = load_prompts(options, template, 512)
    assert [prompt.row["messages"][0]["content"] for prompt in prompts] == [entry["question"] for entry in made]
    row = prompts[2].row
    assert row["verifier"] == "reasoning_gym" and row["reasoning_gym"]["task"] == "chain_sum" and row["answer"] == made[2]["answer"]
    again = reasoning_gym.create_dataset(row["reasoning_gym"]["task"], **row["reasoning_gym"]["config"])
    assert again.score_answer(row["answer"], row["reasoning_gym"]["entry"]) == 1.0
    assert len(load_supervised(options, template)) == 5


def test_a_value_that_python_cannot_hold_drops_its_row_alone(tmp_path: Path) -> None:
    days = pyarrow.array([0, 10**9, 1], pyarrow.date32())
    pyarrow.parquet.write_table(pyarrow.table({"output": ["a", "b", "c"], "day": days}), tmp_path / "x.parquet")
    first, second, third = read_file(tmp_path / "x.parquet")
    assert (first["output"], third["output"]) == ("a", "c")
    assert isinstance(second, BadRow) and "out of range" in second.reason


def test_a_parquet_column_named_twice_is_an_error(tmp_path: Path) -> None:
    arrays = [pyarrow.array(["a"]), pyarrow.array(["b"])]
    pyarrow.parquet.write_table(pyarrow.Table.from_arrays(arrays, names=["output", "output"]), tmp_path / "x.parquet")
    with pytest.raises(DataError, match="named twice"):
        read_file(tmp_path / "x.parquet")
