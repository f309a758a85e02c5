"""Masks under the chat templates of published models (written down here as their tokenizers carry them)."""

# ruff: noqa: E501  (the templates keep their own lines)

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from rlmca.data import ChatTemplate, Encoded, stop_ids
from rlmca.data.errors import BadRow, Dropped
from rlmca.data.formats import Conversation, convert_rows
from rlmca.data.info import DatasetEntry, default_columns, default_tags

QWEN25 = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0]['role'] == 'system' %}
        {{- messages[0]['content'] }}
    {%- else %}
        {{- 'You are Qwen, created by Alibaba Cloud. You are a helpful assistant.' }}
    {%- endif %}
    {{- "\\n\\n# Tools\\n\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- else %}
    {%- if messages[0]['role'] == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>system\\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}
            {{- '\\n' + message.content }}
        {%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}
                {%- set tool_call = tool_call.function %}
            {%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' }}
            {{- tool_call.name }}
            {{- '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' }}
        {{- message.content }}
        {{- '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

QWEN3 = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- else %}
    {%- if messages[0].role == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set content = message.content %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is defined and message.reasoning_content is not none %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- else %}
            {%- if '</think>' in message.content %}
                {%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}
                {%- set reasoning_content = message.content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- endif %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index %}
            {%- if loop.last or (not loop.last and reasoning_content) %}
                {{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
            {%- else %}
                {{- '<|im_start|>' + message.role + '\\n' + content }}
            {%- endif %}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- if (loop.first and content) or (not loop.first) %}
                    {{- '\\n' }}
                {%- endif %}
                {%- if tool_call.function %}
                    {%- set tool_call = tool_call.function %}
                {%- endif %}
                {{- '<tool_call>\\n{"name": "' }}
                {{- tool_call.name }}
                {{- '", "arguments": ' }}
                {%- if tool_call.arguments is string %}
                    {{- tool_call.arguments }}
                {%- else %}
                    {{- tool_call.arguments | tojson }}
                {%- endif %}
                {{- '}\\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' }}
        {{- message.content }}
        {{- '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""

LLAMA31 = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = "26 Jul 2024" %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}
{%- endif %}
{{- "Cutting Knowledge Date: December 2023\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- if tools is not none %}
    {%- if messages | length != 0 %}
        {%- set first_user_message = messages[0]['content']|trim %}
        {%- set messages = messages[1:] %}
    {%- else %}
        {{- raise_exception("Cannot put tools in the first user message when there's no first user message!") }}
    {%- endif %}
    {{- '<|start_header_id|>user<|end_header_id|>\\n\\n' -}}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
    {{- first_user_message + "<|eot_id|>" }}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
        {{- '{"name": "' + tool_call.name + '", ' }}
        {{- '"parameters": ' }}
        {{- tool_call.arguments | tojson }}
        {{- "}" }}
        {{- "<|eot_id|>" }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

MISTRAL_V3 = """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS] " + (tools | tojson) + "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for tool_call in message.tool_calls %}
            {%- set out = tool_call.function|tojson %}
            {{- out[:-1] }}
            {%- if not tool_call.id is defined or tool_call.id|length != 9 %}
                {{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}
            {%- endif %}
            {{- ', "id": "' + tool_call.id + '"}' }}
            {%- if not loop.last %}
                {{- ", " }}
            {%- else %}
                {{- "]" + eos_token }}
            {%- endif %}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"]|trim + eos_token}}
    {%- elif message["role"] == "tool_results" or message["role"] == "tool" %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content|string + ", " }}
        {%- if not message.tool_call_id is defined or message.tool_call_id|length != 9 %}
            {{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}
        {%- endif %}
        {{- '"call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- else %}
        {{- raise_exception("Only user and assistant roles are supported, with the exception of an initial optional system message!") }}
    {%- endif %}
{%- endfor %}
"""

_V3_CALL = (
    "'<｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + tool['function']['name'] + '\\n' + '```json' + '\\n' "
    "+ tool['function']['arguments'] + '\\n' + '```' + '<｜tool▁call▁end｜>'"
)
DEEPSEEK_V3 = (
    "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}"
    "{% set ns = namespace(is_first=false, is_tool=false, is_output_first=true, system_prompt='') %}"
    "{%- for message in messages %}{%- if message['role'] == 'system' %}{% set ns.system_prompt = message['content'] %}{%- endif %}{%- endfor %}"
    "{{bos_token}}{{ns.system_prompt}}"
    "{%- for message in messages %}"
    "{%- if message['role'] == 'user' %}{%- set ns.is_tool = false -%}{{'<｜User｜>' + message['content']}}{%- endif %}"
    "{%- if message['role'] == 'assistant' and message['content'] is none %}{%- set ns.is_tool = false -%}"
    "{%- for tool in message['tool_calls']%}{%- if not ns.is_first %}"
    "{{'<｜Assistant｜><｜tool▁calls▁begin｜>' + " + _V3_CALL + "}}{%- set ns.is_first = true -%}"
    "{%- else %}{{'\\n' + " + _V3_CALL + "}}{{'<｜tool▁calls▁end｜><｜end▁of▁sentence｜>'}}{%- endif %}{%- endfor %}{%- endif %}"
    "{%- if message['role'] == 'assistant' and message['content'] is not none %}{%- if ns.is_tool %}"
    "{{'<｜tool▁outputs▁end｜>' + message['content'] + '<｜end▁of▁sentence｜>'}}{%- set ns.is_tool = false -%}"
    "{%- else %}{{'<｜Assistant｜>' + message['content'] + '<｜end▁of▁sentence｜>'}}{%- endif %}{%- endif %}"
    "{%- if message['role'] == 'tool' %}{%- set ns.is_tool = true -%}{%- if ns.is_output_first %}"
    "{{'<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>' + message['content'] + '<｜tool▁output▁end｜>'}}{%- set ns.is_output_first = false %}"
    "{%- else %}{{'\\n<｜tool▁output▁begin｜>' + message['content'] + '<｜tool▁output▁end｜>'}}{%- endif %}{%- endif %}"
    "{%- endfor -%}{% if ns.is_tool %}{{'<｜tool▁outputs▁end｜>'}}{% endif %}"
    "{% if add_generation_prompt and not ns.is_tool %}{{'<｜Assistant｜>'}}{% endif %}"
)

SPECIAL = {
    "qwen2.5": (None, "<|im_end|>", ["<|im_start|>"]),
    "qwen3": (None, "<|im_end|>", ["<|im_start|>"]),
    "llama3.1": ("<|begin_of_text|>", "<|eot_id|>", ["<|start_header_id|>", "<|end_header_id|>"]),
    "mistral": ("<s>", "</s>", ["[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"]),
    "deepseek": ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", ["<｜User｜>", "<｜Assistant｜>"]),
}  # fmt: skip
SOURCE = {"qwen2.5": QWEN25, "qwen3": QWEN3, "llama3.1": LLAMA31, "mistral": MISTRAL_V3, "deepseek": DEEPSEEK_V3}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "sum", "parameters": {"type": "object", "properties": {}}}}]


def template(family: str, **options: Any) -> ChatTemplate:
    """Byte-level characters as tokens; like Llama's tokenizer it puts the bos token in front whenever it is asked to add tokens."""
    bos, eos, more = SPECIAL[family]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    extra = {"bos_token": bos} if bos else {}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=eos, pad_token=eos, additional_special_tokens=more, **extra)
    if bos:
        backend = tokenizer.backend_tokenizer
        backend.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))])
        assert tokenizer("x")["input_ids"][0] == tokenizer.bos_token_id
    tokenizer.chat_template = SOURCE[family]
    return ChatTemplate(tokenizer, **options)


def turn(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def call(*numbers: int, text: str = "") -> dict[str, Any]:
    calls = [{"type": "function", "id": f"call0000{n}", "function": {"name": "add", "arguments": {"a": n}}} for n in numbers]
    return {"role": "assistant", "content": text, "tool_calls": calls}


def result(n: int) -> dict[str, Any]:
    return {"role": "tool", "content": str(n), "tool_call_id": f"call0000{n}"}


def encode(chat: ChatTemplate, messages: list[dict[str, Any]], tools: Any = None, **options: bool) -> Encoded | BadRow:
    return chat.encode([Conversation("toy", 0, messages[:-1], messages[-1], tools, {})], **options)[0]


def trained(chat: ChatTemplate, messages: list[dict[str, Any]], tools: Any = None, **options: bool) -> list[str]:
    """The stretches of trained tokens, decoded."""
    row = encode(chat, messages, tools, **options)
    assert isinstance(row, Encoded), row
    stretches: list[list[int]] = []
    before = False
    for token, live in zip(row.ids, row.mask, strict=True):
        if live and not before:
            stretches.append([])
        if live:
            stretches[-1].append(token)
        before = live
    return [str(chat.tokenizer.decode(stretch)) for stretch in stretches]


TWO_TURNS = [turn("system", "S"), turn("user", "a"), turn("assistant", "one"), turn("user", "b"), turn("assistant", "two\n\nlines")]
NO_THOUGHT = "<think>\n\n</think>\n\n"
END = {family: eos for family, (_, eos, _) in SPECIAL.items()}


@pytest.mark.parametrize("family", SOURCE)
@pytest.mark.parametrize("last_only", [False, True])
def test_two_turns_train_the_replies_and_their_ends(family: str, last_only: bool) -> None:
    chat = template(family)
    lead = NO_THOUGHT if family == "qwen3" else ""
    expected = [f"one{END[family]}", f"{lead}two\n\nlines{END[family]}"]
    # Mistral's template writes the system message into a last user turn alone, so a whole conversation has none
    assert trained(chat, TWO_TURNS, mask_history=last_only) == (expected[1:] if last_only else expected)


@pytest.mark.parametrize("family", SOURCE)
def test_a_row_has_one_bos_and_it_is_no_target(family: str) -> None:
    chat = template(family)
    bos = chat.tokenizer.bos_token_id
    row = encode(chat, TWO_TURNS)
    assert isinstance(row, Encoded)
    (prompt,) = chat.encode_prompts([Conversation("toy", 0, TWO_TURNS[:-1], None, None, {})])
    assert not isinstance(prompt, BadRow)
    for ids in (row.ids, prompt):
        assert ids.count(bos) == 1 and ids[0] == bos if bos is not None else True
    assert not row.mask[0] and chat.end_id in stop_ids(chat.tokenizer)


@pytest.mark.parametrize("family", ["qwen2.5", "qwen3", "llama3.1", "mistral"])
def test_tool_calls_are_trained_and_their_results_are_not(family: str) -> None:
    chat = template(family)
    messages = [turn("user", "1 + 1?"), call(1), result(1), turn("assistant", "two")]
    first, second = trained(chat, messages, TOOLS)
    assert '"name": "add"' in first and first.endswith(END[family]) and first.count(END[family]) == 1
    assert second == (NO_THOUGHT if family == "qwen3" else "") + f"two{END[family]}"
    assert trained(chat, messages[:2], TOOLS) == [first] or family == "qwen3"


def test_several_calls_reach_a_template_that_wants_null_content_and_arguments_as_text() -> None:
    chat = template("deepseek")
    messages = [turn("user", "sums"), call(1, 2), result(1), result(2), turn("assistant", "done")]
    first, second = trained(chat, messages)
    assert first.count("<｜tool▁call▁begin｜>") == 2 and '{"a": 1}' in first and '{"a": 2}' in first and first.endswith(END["deepseek"])
    assert second == f"done{END['deepseek']}"
    assert trained(chat, messages, mask_history=True) == [second]
    (prompt,) = chat.encode_prompts([Conversation("toy", 0, messages[:-1], None, None, {})])
    assert not isinstance(prompt, BadRow) and '{"a": 2}' in chat.tokenizer.decode(prompt)


def test_a_call_without_an_end_of_turn_is_refused_instead_of_training_the_tools_results() -> None:
    """DeepSeek-V3's template closes several calls and forgets to close a single one."""
    row = encode(template("deepseek"), [turn("user", "sum"), call(1), result(1), turn("assistant", "done")])
    assert isinstance(row, BadRow) and "no end-of-turn marker" in row.reason


def test_a_template_that_leaves_tool_calls_out_refuses_the_row() -> None:
    chat = template("qwen2.5")
    chat.tokenizer.chat_template = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    chat = ChatTemplate(chat.tokenizer)
    messages = [turn("user", "1 + 1?"), call(1), result(1), turn("assistant", "two")]
    row = encode(chat, messages, mask_history=True)
    assert isinstance(row, BadRow) and "writes no tool calls" in row.reason
    (prompt,) = chat.encode_prompts([Conversation("toy", 0, messages[:-1], None, None, {})])
    assert isinstance(prompt, BadRow)


def test_ids_of_openai_calls_reach_the_template() -> None:
    entry = DatasetEntry("toy", formatting="openai", columns=default_columns("openai"), tags=default_tags("openai"))
    calls = [{"id": "a1b2c3d4e", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}]
    messages = [turn("user", "q"), {"role": "assistant", "content": None, "tool_calls": calls}]
    messages += [{"role": "tool", "content": "1", "tool_call_id": "a1b2c3d4e"}, turn("assistant", "one")]
    dropped = Dropped()
    (conversation,) = convert_rows(entry, [(0, {"messages": messages})], need_reply=True, dropped=dropped)
    assert not len(dropped)
    row = template("mistral").encode([conversation])[0]
    assert isinstance(row, Encoded), row


def test_thoughts_of_old_turns_are_dropped_and_the_last_one_is_trained() -> None:
    thought = "<think>\nhm\n</think>\n\n"
    messages = [turn("user", "a"), turn("assistant", thought + "one"), turn("user", "b"), turn("assistant", thought + "two")]
    assert trained(template("qwen3"), messages) == ["one<|im_end|>", thought + "two<|im_end|>"]
    assert trained(template("qwen3", enable_thinking=False), messages) == ["one<|im_end|>", "two<|im_end|>"]
    apart = [turn("user", "a"), {**turn("assistant", "one"), "reasoning_content": "hm"}]
    assert trained(template("qwen3"), apart) == [thought + "one<|im_end|>"]
