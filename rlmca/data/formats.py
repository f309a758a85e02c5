"""Rows of the three formats become conversations; a row that does not fit is dropped whole, with the reason.

A conversation is a list of messages as chat templates take them: an optional `system`, then turns that alternate
between `user` (or `tool`) and `assistant`. Content is text as it stands in the row, byte for byte.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlmca.data.errors import BadRow, Dropped
from rlmca.data.info import DatasetEntry
from rlmca.data.sources import is_text

Message = dict[str, Any]
PASSED_ON = ("name", "tool_call_id", "reasoning_content")


@dataclass
class Conversation:
    """One row, read: the prompt, the reply (None where the row has none) and everything else of the row."""

    dataset: str
    index: int
    prompt: list[Message]
    reply: Message | None
    tools: list[Any] | None
    row: Mapping[str, Any]
    missing: str = "no reply"
    """Why `reply` is None, where it is."""

    @property
    def messages(self) -> list[Message]:
        return [*self.prompt, self.reply] if self.reply is not None else self.prompt


def convert_rows(entry: DatasetEntry, rows: Sequence[tuple[int, Any]], *, need_reply: bool, dropped: Dropped) -> list[Conversation]:
    """Conversations of (position, record) pairs; those that do not fit go to `dropped`."""
    out = []
    for index, raw in rows:
        try:
            conversation = _convert(entry, index, raw)
            if need_reply and conversation.reply is None:
                raise BadRow(conversation.missing)
            out.append(conversation)
        except BadRow as bad:
            dropped.add(entry.name, index, bad.reason)
    return out


def _convert(entry: DatasetEntry, index: int, raw: Any) -> Conversation:
    if isinstance(raw, BadRow):
        raise raw
    if not isinstance(raw, Mapping):
        raise BadRow(f"the row is {_kind(raw)}, not an object")
    if entry.formatting == "procedural":
        prompt: list[Message] = [{"role": "user", "content": _text(raw, "question")}]
        reply = _assistant(raw["answer"]) if _filled(raw.get("answer")) else None
        return Conversation(entry.name, index, prompt, reply, None, raw)
    tools = _tools(entry, raw)
    if entry.formatting == "alpaca":
        prompt = _alpaca_prompt(entry.columns, raw)
        reply, missing = _alpaca_reply(raw, entry.columns["response"])
    else:
        prompt, reply = _turns(entry, raw)
        missing = "the last turn has no reply (odd number of turns)"
    return Conversation(entry.name, index, prompt, reply, tools, raw, missing)


def _alpaca_prompt(columns: Mapping[str, str | None], raw: Mapping[str, Any]) -> list[Message]:
    messages: list[Message] = []
    system = _optional_text(raw, columns["system"])
    if system:
        messages.append({"role": "system", "content": system})
    for pair in _history(raw, columns["history"]):
        messages += [{"role": "user", "content": pair[0]}, _assistant(pair[1])]
    parts = [_text(raw, columns["prompt"], empty=True), _optional_text(raw, columns["query"])]
    content = "\n".join(part for part in parts if part)
    if not content.strip():
        raise BadRow("empty prompt")
    messages.append({"role": "user", "content": content})
    return messages


def _alpaca_reply(raw: Mapping[str, Any], column: str | None) -> tuple[Message | None, str]:
    """The reply or why there is none; something that is neither text nor absent makes the whole row bad."""
    if column is None or column not in raw:
        return None, f"no column {column!r}"
    if raw[column] is None:
        return None, f"column {column!r} is null"
    text = _text(raw, column, empty=True)
    return (_assistant(text), "") if text.strip() else (None, "empty reply")


def _history(raw: Mapping[str, Any], column: str | None) -> list[tuple[str, str]]:
    value = raw.get(column) if column is not None else None
    if value is None or value == "":
        return []
    if not isinstance(value, list):
        raise BadRow(f"column {column!r} is {_kind(value)}, not a list of pairs")
    for pair in value:
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise BadRow(f"column {column!r} holds something that is not a pair of turns")
        if not all(map(is_text, pair)) or not all(turn.strip() for turn in pair):
            raise BadRow(f"column {column!r} holds an empty turn or one that is not text")
    return [(pair[0], pair[1]) for pair in value]


def _turns(entry: DatasetEntry, raw: Mapping[str, Any]) -> tuple[list[Message], Message | None]:
    """sharegpt and openai: user and tool turns at even places, assistant and function turns at odd ones."""
    column = entry.columns["messages"]
    assert column is not None
    if column not in raw:
        raise BadRow(f"no column {column!r}")
    turns = raw[column]
    if isinstance(turns, str):  # CSV, and parquet files that keep the turns as JSON text
        turns = _json_text(turns, column)
    if not isinstance(turns, list):
        raise BadRow(f"column {column!r} is {_kind(turns)}, not a list of messages")
    messages: list[Message] = []
    system = _optional_text(raw, entry.columns["system"])
    for place, turn in enumerate(turns):
        message = _message(entry, turn)
        if message["role"] != "system":
            messages.append(message)
        elif place > 0:
            raise BadRow("a system message that is not the first")
        else:
            system = message["content"] or system
    if not messages:
        raise BadRow("no messages")
    _check_order(messages, openai=entry.formatting == "openai")
    reply = messages.pop() if messages[-1]["role"] == "assistant" else None
    if system:
        messages.insert(0, {"role": "system", "content": system})
    return messages, reply


def _message(entry: DatasetEntry, turn: Any) -> Message:
    tags = entry.tags
    if not isinstance(turn, Mapping):
        raise BadRow(f"a message is {_kind(turn)}, not an object")
    roles = {
        tags["user_tag"]: "user",
        tags["assistant_tag"]: "assistant",
        tags["observation_tag"]: "tool",
        tags["function_tag"]: "function",
        tags["system_tag"]: "system",
    }
    tag = turn.get(tags["role_tag"])
    role = roles.get(tag) if isinstance(tag, str) else None
    if role is None:
        raise BadRow(f"unknown role {tag!r}" if isinstance(tag, str) else f"a message without {tags['role_tag']!r}")
    content = _content(turn.get(tags["content_tag"]), tags["content_tag"])
    if role == "function":
        return {"role": "assistant", "content": "", "tool_calls": _function_calls(content)}
    message: Message = {"role": role, "content": content}
    if entry.formatting == "openai":
        calls = turn.get("tool_calls")
        if role == "assistant" and calls:
            message["tool_calls"] = _openai_calls(calls)
        for key in PASSED_ON:
            if isinstance(turn.get(key), str):
                message[key] = turn[key]
    elif turn.get(tags["content_tag"]) is None:
        raise BadRow(f"a message without {tags['content_tag']!r}")
    if role in ("user", "assistant") and not content.strip() and "tool_calls" not in message:
        raise BadRow("empty reply" if role == "assistant" else "empty prompt")
    return message


def _content(value: Any, name: str) -> str:
    """Text, or OpenAI's list of text parts joined; None is empty (a message that only calls tools)."""
    if value is None:
        return ""
    if isinstance(value, list):
        for part in value:
            if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise BadRow(f"{name!r} holds a part that is not text")
        value = "".join(part["text"] for part in value)
    if not isinstance(value, str):
        raise BadRow(f"{name!r} is {_kind(value)}, not text")
    if not is_text(value):
        raise BadRow("not valid Unicode")
    return value


def _check_order(messages: Sequence[Message], *, openai: bool) -> None:
    """Turns alternate, beginning with the user; OpenAI rows may answer several tool calls in a row."""
    expect_reply = False
    for place, message in enumerate(messages):
        role = message["role"]
        several_tools = openai and role == "tool" and place > 0 and messages[place - 1]["role"] == "tool"
        if (role == "assistant") != expect_reply and not several_tools:
            raise BadRow("turns do not alternate" if place else "the first turn is not the user's")
        if role == "tool" and place == 0:
            raise BadRow("the first turn is not the user's")
        expect_reply = role != "assistant"


def _function_calls(content: str) -> list[Any]:
    """sharegpt's function turn: JSON of one call {name, arguments} or a list of them."""
    value = _json_text(content, "function call")
    return [_call(call) for call in (value if isinstance(value, list) else [value])] or _fail("a function call without a call")


def _openai_calls(calls: Any) -> list[Any]:
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise BadRow("'tool_calls' is not a list of objects")
    # Some templates write a call's id, and refuse calls without one.
    return [{**_call(call.get("function", call)), **({"id": call["id"]} if is_text(call.get("id")) else {})} for call in calls]


def _call(call: Any) -> Any:
    if not isinstance(call, Mapping) or not isinstance(call.get("name"), str) or not call["name"]:
        raise BadRow("a function call without a name")
    arguments = call.get("arguments")
    if isinstance(arguments, str):
        arguments = _json_text(arguments, "arguments")
    if not isinstance(arguments, Mapping):
        raise BadRow("a function call whose arguments are not an object")
    if not is_text(json.dumps([call["name"], arguments], ensure_ascii=False, default=str)):
        raise BadRow("not valid Unicode")
    return {"type": "function", "function": {"name": call["name"], "arguments": dict(arguments)}}


def _tools(entry: DatasetEntry, raw: Mapping[str, Any]) -> list[Any] | None:
    """The tool list of a row: a list, or JSON text of one; bare functions are wrapped as templates expect them."""
    column = entry.columns["tools"]
    value = raw.get(column) if column is not None else None
    if value is None or value == "" or value == []:
        return None
    if isinstance(value, str):
        value = _json_text(value, str(column))
    value = value if isinstance(value, list) else [value]
    if not all(isinstance(tool, Mapping) for tool in value):
        raise BadRow(f"column {column!r} is not a list of tools")
    if not is_text(json.dumps(value, ensure_ascii=False, default=str)):
        raise BadRow("not valid Unicode")
    return [dict(tool) if "function" in tool else {"type": "function", "function": dict(tool)} for tool in value] or None


def _json_text(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise BadRow(f"{what!r} is not JSON") from None


def _text(raw: Mapping[str, Any], column: str | None, *, empty: bool = False) -> str:
    if column is None or column not in raw:
        raise BadRow(f"no column {column!r}")
    value = raw[column]
    if not isinstance(value, str):
        raise BadRow(f"column {column!r} is {_kind(value)}, not text")
    if not is_text(value):
        raise BadRow("not valid Unicode")
    if not empty and not value.strip():
        raise BadRow(f"column {column!r} is empty")
    return value


def _optional_text(raw: Mapping[str, Any], column: str | None) -> str:
    if column is None or raw.get(column) is None:
        return ""
    return _text(raw, column, empty=True)


def _assistant(content: Any) -> Message:
    return {"role": "assistant", "content": str(content)}


def _filled(value: Any) -> bool:
    return value is not None and bool(str(value).strip())


def _fail(reason: str) -> Any:
    raise BadRow(reason)


def _kind(value: Any) -> str:
    return "null" if value is None else f"a {type(value).__name__}"
