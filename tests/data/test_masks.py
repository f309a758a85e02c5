"""Masks from the rendered whole, against oracles that know the template's parts."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlmca.data import ChatTemplate, DataError, Encoded, stop_ids
from rlmca.data.errors import BadRow
from rlmca.data.formats import Conversation
from rlmca.data.template import token_mask
from tests.helpers.tokenizers import CHATML, GENERATION, STRICT, STRIPPING, THINKING, tiny_tokenizer

Message = dict[str, Any]
END = "<|im_end|>"


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def encode(template: ChatTemplate, messages: list[Message], tools: list[Any] | None = None, **options: bool) -> Encoded | BadRow:
    return template.encode([Conversation("toy", 0, messages[:-1], messages[-1], tools, {})], **options)[0]


def trained(template: ChatTemplate, messages: list[Message], tools: list[Any] | None = None, **options: bool) -> str:
    row = encode(template, messages, tools, **options)
    assert isinstance(row, Encoded), row
    return str(template.tokenizer.decode([i for i, m in zip(row.ids, row.mask, strict=True) if m]))


# Text with what goes wrong elsewhere: white space at the borders, markers of the template, thoughts, other scripts.
pieces = st.sampled_from(
    ["a", "7", " ", "\n", "\u2028", "é", "🙂", "assistant\n", "<|im_start|>", END, "user", "<think>", "{{ x }}", "\ufdd0"]
)
text = st.lists(pieces, min_size=1, max_size=6).map("".join).filter(lambda t: bool(t.strip()))
turns = st.lists(st.tuples(text, text), min_size=1, max_size=3)


def conversation(pairs: list[tuple[str, str]]) -> list[Message]:
    return [message for question, answer in pairs for message in (user(question), assistant(answer))]


@given(turns, st.booleans(), st.booleans())
def test_targets_are_the_characters_of_the_replies(pairs: list[tuple[str, str]], last_only: bool, trim: bool) -> None:
    """Oracle: the ChatML text written by hand, character by character, each with its own bit."""
    tokenizer = tiny_tokenizer(CHATML, trim_offsets=trim)
    template = ChatTemplate(tokenizer)
    row = encode(template, conversation(pairs), mask_history=last_only)
    assert isinstance(row, Encoded)
    rendered, bits = "", []
    for n, (question, answer) in enumerate(pairs):
        live = not last_only or n == len(pairs) - 1
        for part, bit in ((f"<|im_start|>user\n{question}{END}\n<|im_start|>assistant\n", False), (answer + END, live), ("\n", False)):
            rendered += part
            bits += [bit] * len(part)
    plain = tiny_tokenizer(CHATML)(rendered, add_special_tokens=False, return_offsets_mapping=True)
    assert row.ids == plain["input_ids"]
    assert row.mask == [any(bits[start:end]) for start, end in plain["offset_mapping"]]


@given(turns)
def test_targets_equal_the_mask_of_the_templates_author(pairs: list[tuple[str, str]]) -> None:
    """Oracle: Transformers' assistant mask of a template with `generation` blocks."""
    tokenizer = tiny_tokenizer(GENERATION)
    row = encode(ChatTemplate(tokenizer), conversation(pairs))
    assert isinstance(row, Encoded)
    theirs = tokenizer.apply_chat_template(conversation(pairs), return_dict=True, return_assistant_tokens_mask=True)
    assert row.ids == theirs["input_ids"]
    assert row.mask == [bool(m) for m in theirs["assistant_masks"]]


@given(turns)
def test_a_stripping_template_trains_the_stripped_reply(pairs: list[tuple[str, str]]) -> None:
    template = ChatTemplate(tiny_tokenizer(STRIPPING))
    row = encode(template, conversation(pairs))
    assert isinstance(row, Encoded)
    got = template.tokenizer.decode([i for i, m in zip(row.ids, row.mask, strict=True) if m])
    expected = "".join(answer.strip() + END for _, answer in pairs)
    # A token may straddle the border between header and reply; nothing of a reply may be missing.
    assert got.replace("\n", "") == expected.replace("\n", "")


THOUGHTFUL = [user("a"), assistant("<think>\nfoo\n</think>\n\nyes"), user("b"), assistant("<think>\nbar\n</think>\n\nno")]


@pytest.mark.parametrize(
    ("messages", "thinking", "expected"),
    [
        (THOUGHTFUL, True, f"yes{END}<think>\nbar\n</think>\n\nno{END}"),
        (THOUGHTFUL, False, f"yes{END}no{END}"),
        ([user("a"), assistant("b")], True, f"<think>\n\n</think>\n\nb{END}"),
        ([user("a"), assistant("b")], False, f"b{END}"),
        ([user("a"), assistant("b"), user("c"), assistant("d")], False, f"b{END}d{END}"),
    ],
)
def test_thinking_templates(messages: list[Message], thinking: bool, expected: str) -> None:
    template = ChatTemplate(tiny_tokenizer(THINKING), "qwen3", enable_thinking=thinking)
    assert trained(template, messages) == expected
    assert trained(template, messages, mask_history=True) == expected.split(END)[-2] + END


def test_what_is_trained_is_what_follows_the_prompt() -> None:
    """The prompt for generation plus the trained tokens is the row: in training as in rollouts."""
    for thinking in (True, False):
        template = ChatTemplate(tiny_tokenizer(THINKING), enable_thinking=thinking)
        for messages in (THOUGHTFUL[2:], [user("a"), assistant("b")]):
            row = encode(template, messages)
            assert isinstance(row, Encoded)
            prompt = template.encode_prompts([Conversation("toy", 0, messages[:-1], None, None, {})])[0]
            assert not isinstance(prompt, BadRow)
            assert row.ids[: len(prompt)] == prompt and row.mask.index(True) == len(prompt)


CALL = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"x": "</call>"}}}]}
FIRST_WORD = "{% for m in messages %}{{ m['content'].split(' ')[0] }}<|im_end|>{% endfor %}"
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def test_tool_calls_are_trained_and_tool_answers_are_not() -> None:
    template = ChatTemplate(tiny_tokenizer(THINKING), enable_thinking=False)
    messages = [user("a"), CALL, {"role": "tool", "content": "9"}, assistant("b")]
    call = '\n<call>\n{"name": "f", "arguments": {"x": "</call>"}}\n</call>'
    assert trained(template, messages, TOOLS) == f"{call}{END}b{END}"
    assert trained(template, messages[:2], TOOLS).endswith(f"{call}{END}")


@pytest.mark.parametrize(
    ("source", "messages", "tools", "reason"),
    [
        (CHATML, [user("a"), CALL, {"role": "tool", "content": "9"}, assistant("b")], None, "writes no tool calls"),
        (CHATML, [user("a"), assistant("b")], TOOLS, "takes no tools"),
        (STRICT, [{"role": "system", "content": "s"}, assistant("b")], None, "No user query"),
        (FIRST_WORD, [user("a"), assistant("two words")], None, "cannot be located"),
        (
            THINKING,
            [user("a"), {**CALL, "tool_calls": [{"function": {"name": "f", "arguments": {"x": END}}}]}],
            TOOLS,
            "holds the end-of-turn",
        ),
    ],
    ids=["tool calls not written", "no tools", "no user", "half a reply", "marker in a call"],
)
def test_a_reply_that_cannot_be_located_is_refused(source: str, messages: list[Message], tools: Any, reason: str) -> None:
    row = encode(ChatTemplate(tiny_tokenizer(source)), messages, tools)
    assert isinstance(row, BadRow) and reason in row.reason


def test_train_on_prompt_trains_all_but_the_first_token() -> None:
    row = encode(ChatTemplate(tiny_tokenizer()), [user("a"), assistant("b")], train_on_prompt=True)
    assert isinstance(row, Encoded) and row.mask == [False] + [True] * (len(row.ids) - 1)


def test_a_token_that_straddles_the_border_is_a_target() -> None:
    assert token_mask(6, [(3, 5)], [(0, 2), (2, 4), (4, 5), (5, 6)]) == [False, True, True, False]
    # White space trimmed off the offsets still belongs to the token that was trimmed.
    assert token_mask(4, [(2, 4)], [(0, 1), (2, 2), (3, 4)]) == [False, False, True]
    assert token_mask(4, [(1, 4)], [(0, 1), (2, 2), (3, 4)]) == [False, True, True]


@pytest.mark.parametrize("name", ["default", "vicuna", "mistral", "chatml", "qwen3"])
def test_plain_templates_for_tokenizers_without_one(name: str) -> None:
    template = ChatTemplate(tiny_tokenizer(None), name)
    messages = [{"role": "system", "content": "be brief"}, user("a"), assistant("b"), user("c"), assistant("d")]
    assert trained(template, messages).replace(" ", "") == f"b{END}d{END}"
    prompt = template.encode_prompts([Conversation("toy", 0, messages[:-1], None, None, {})])[0]
    row = encode(template, messages)
    assert isinstance(row, Encoded) and row.ids[: len(prompt)] == prompt  # type: ignore[arg-type]


def test_a_template_that_never_ends_its_reply_gets_the_eos_token() -> None:
    source = (
        "{% for m in messages %}{{ m['role'] + ':' + m['content'] + '\n' }}{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    )
    assert trained(ChatTemplate(tiny_tokenizer(source)), [user("a"), assistant("b")]).endswith(f"b\n{END}")


@pytest.mark.parametrize(
    ("source", "name", "parts"),
    [
        (None, None, ["no chat template", "set `template`", "chatml"]),
        (CHATML, "llama3", ["llama3", "<|start_header_id|>", "leave `template` out"]),
        (CHATML, "qwen9", ["'qwen9'", "nearest: qwen"]),
        (CHATML, "qwen3_vl", ["'qwen3_vl'", "not in this version"]),
        (None, "llama3", ["needs the tokens", "<|eot_id|>"]),
        (None, "deepseek3", ["brings its chat template"]),
        ("{{ raise_exception('broken') }}", None, ["broken"]),
        ("{% for m in messages %}x{% endfor %}", None, ["does not write the assistant's reply"]),
    ],
)
def test_template_errors_say_what_to_write(source: str | None, name: str | None, parts: list[str]) -> None:
    with pytest.raises(DataError) as error:
        ChatTemplate(tiny_tokenizer(source), name)
    assert all(part in str(error.value) for part in parts), error.value


def test_default_system_only_where_the_row_has_none() -> None:
    template = ChatTemplate(tiny_tokenizer(), default_system="brief")
    assert template.with_system([user("a")])[0] == {"role": "system", "content": "brief"}
    own: list[Message] = [{"role": "system", "content": "own"}, user("a")]
    assert template.with_system(own) == own
    row = encode(template, [user("a"), assistant("b")])
    assert isinstance(row, Encoded) and "system\nbrief" in template.tokenizer.decode(row.ids)


def test_stop_ids_are_those_of_generation_config_tokenizer_and_template() -> None:
    class Config:
        eos_token_id = [0, 7]

    tokenizer = tiny_tokenizer()
    assert stop_ids(tokenizer, Config(), [ChatTemplate(tokenizer).end_id]) == (0, 2, 7)
    tokenizer.eos_token = None
    with pytest.raises(DataError, match="end-of-sequence"):
        stop_ids(tokenizer)
