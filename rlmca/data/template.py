"""Chat templates: conversations and prompts become token ids, and masks come from the rendered whole.

A conversation is rendered once and tokenized once. Trained characters are the replies and their end-of-turn markers;
a token is a target if it holds at least one trained character (so a token that straddles the border between header and
reply is trained: the model has to write it to write the reply).
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from rlmca.data.errors import BadRow, DataError
from rlmca.data.formats import Conversation, Message
from rlmca.data.info import nearest
from rlmca.data.spans import content_start, reply_bounds
from rlmca.data.template_names import LATER_TEMPLATES, TEMPLATE_NAMES, TemplateName

THOUGHT = re.compile(r"^\s*<think>.*?</think>\s*", re.DOTALL)
PROBE = "zqx"
BATCH = 2048


class Encoded(NamedTuple):
    """Token ids of a row and, for each of them, whether it is a target."""

    ids: list[int]
    mask: list[bool]


@dataclass(frozen=True)
class CallForm:
    """How templates want a message that calls tools: `null_content` None as its empty content, `text_arguments` JSON text."""

    null_content: bool = False
    text_arguments: bool = False

    def apply(self, message: Message) -> Message:
        """The message in this form; it comes with text as content and mappings as arguments."""
        out = dict(message)
        if self.null_content and not out["content"]:
            out["content"] = None
        if self.text_arguments:
            out["tool_calls"] = [{**call, "function": _text_arguments(call["function"])} for call in out["tool_calls"]]
        return out


CALL_FORMS = (CallForm(), CallForm(null_content=True), CallForm(text_arguments=True), CallForm(True, True))
"""In the order in which they are tried."""


class ChatTemplate:
    """A tokenizer's chat template under a `template:` name.

    `enable_thinking` is handed to the template; when it is False, thinking is taken out of the replies of a template
    that knows the switch (the prompt then already holds the closed, empty thought), as LLaMA-Factory does.
    DataError when the name is unknown, does not fit the tokenizer, or there is no template at all.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template_name: str | None = None,
        enable_thinking: bool | None = True,
        default_system: str | None = None,
    ) -> None:
        if not tokenizer.is_fast:
            raise DataError(f"{type(tokenizer).__name__} gives no character offsets: a fast tokenizer (tokenizer.json) is needed")
        self.tokenizer = tokenizer
        self.default_system = default_system or None
        self.source, thinking = _choose(tokenizer, template_name)
        self.enable_thinking = enable_thinking if thinking is None else thinking
        self._has_prompt = "add_generation_prompt" in self.source
        self._drops_thought = "enable_thinking" in self.source and self.enable_thinking is False
        self._options = {} if self.enable_thinking is None else {"enable_thinking": self.enable_thinking}
        special = {token for token in map(str, tokenizer.all_special_tokens) if token}
        special |= {token.content for token in tokenizer.added_tokens_decoder.values() if token.special and token.content}
        self._special = sorted(special, key=len, reverse=True)
        self._header = ""
        self.end_marker, self._lead, self._tail = self._probe()
        ends = [token for token in (self.end_marker, tokenizer.eos_token) if token]
        self._end = re.compile(r"\s*(?:" + "|".join(map(re.escape, ends)) + ")") if ends else None

    @property
    def end_id(self) -> int | None:
        """Id of the token that ends a reply in this template (None when neither template nor tokenizer has one)."""
        token = self.end_marker or self.tokenizer.eos_token
        return None if token is None else int(self.tokenizer.convert_tokens_to_ids(token))

    def render(self, messages: Sequence[Message], tools: list[Any] | None = None, *, add_generation_prompt: bool = False) -> str:
        """The text of a conversation, special tokens written out. BadRow when the template refuses it."""
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    list(messages),
                    tools=tools,
                    chat_template=self.source,
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                    **self._options,
                )
            )
        except Exception as error:
            raise BadRow(f"the chat template refuses the conversation: {error}") from None

    def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of rendered texts; nothing is added, the template has written every special token."""
        if not texts:
            return []
        return self.tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]

    def encode_prompts(self, conversations: Sequence[Conversation]) -> list[list[int] | BadRow]:
        """Ids of each prompt with the generation prompt behind it, or why there are none."""
        texts: list[str | BadRow] = []
        for conversation in conversations:
            try:
                messages = self._prepared(conversation.prompt, conversation.tools)
                texts.append(self.render(messages, conversation.tools, add_generation_prompt=True))
            except BadRow as bad:
                texts.append(bad)
        ids = iter(self.tokenize([text for text in texts if isinstance(text, str)]))
        return [text if isinstance(text, BadRow) else next(ids) for text in texts]

    def encode(
        self, conversations: Sequence[Conversation], *, train_on_prompt: bool = False, mask_history: bool = False
    ) -> list[Encoded | BadRow]:
        """Ids and targets of whole conversations, or why a row has none.

        Targets are all replies with their end-of-turn markers; with `mask_history` only the last one's; with
        `train_on_prompt` every token but the first, which nothing predicts.
        """
        out: list[Encoded | BadRow] = []
        for at in range(0, len(conversations), BATCH):
            out += self._encode_some(conversations[at : at + BATCH], train_on_prompt, mask_history)
        return out

    def _encode_some(self, conversations: Sequence[Conversation], train_on_prompt: bool, mask_history: bool) -> list[Encoded | BadRow]:
        laid: list[tuple[str, list[tuple[int, int]]] | BadRow] = []
        for conversation in conversations:
            try:
                laid.append(self.spans(conversation.messages, conversation.tools, last_only=mask_history))
            except BadRow as bad:
                laid.append(bad)
        good = [item for item in laid if not isinstance(item, BadRow)]
        if not good:
            return [item for item in laid if isinstance(item, BadRow)]
        tokens = self.tokenizer(
            [text for text, _ in good],
            add_special_tokens=False,
            return_attention_mask=False,
            return_offsets_mapping=True,
            verbose=False,
        )
        rows = iter(zip(tokens["input_ids"], tokens["offset_mapping"], strict=True))
        out: list[Encoded | BadRow] = []
        for item in laid:
            if isinstance(item, BadRow):
                out.append(item)
                continue
            ids, offsets = next(rows)
            text, spans = item
            mask = token_mask(len(text), [(0, len(text))] if train_on_prompt else spans, offsets)
            if mask:
                mask[0] = False
            out.append(Encoded(ids, mask) if any(mask) else BadRow("no token of the reply is left"))
        return out

    def spans(
        self, messages: Sequence[Message], tools: list[Any] | None = None, *, last_only: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        """(rendered text, [start, end) in characters of every trained stretch). BadRow when one cannot be located exactly."""
        messages = self._prepared(messages, tools)
        whole = self.render(messages, tools)
        places = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
        wanted = places[-1:] if last_only else places

        def render(some: Sequence[Message], prompt: bool) -> str:
            return self.render(some, tools, add_generation_prompt=prompt)

        bounds = self._plain_bounds(render, whole, messages) if len(wanted) == 1 else None
        if bounds is None:
            bounds = reply_bounds(render, whole, messages, wanted, has_prompt=self._has_prompt, header=self._header)
        spans = []
        for place, (start, end) in zip(wanted, bounds, strict=True):
            if not whole[start:end].strip():
                raise BadRow("the template leaves nothing of a reply")
            calls = messages[place].get("tool_calls")
            # The marker behind a call must not be that of a later turn, which is no target.
            limit = content_start(render, whole, messages, place + 1) if calls and place + 1 < len(messages) else len(whole)
            spans.append((start, self._end_of_turn(whole, end, limit, calls, place == places[-1])))
        if self.end_marker is None and places[-1] == len(messages) - 1 and spans[-1][1] >= len(whole.rstrip()):
            # The template ends its last reply with nothing, so a model trained on it would never stop.
            eos = self.tokenizer.eos_token or ""
            if not whole[spans[-1][0] : spans[-1][1]].endswith(eos):
                whole += eos
                spans[-1] = (spans[-1][0], len(whole))
        return whole, spans

    def _plain_bounds(self, render: Any, whole: str, messages: Sequence[Message]) -> list[tuple[int, int]] | None:
        """The common case without marks: the last prompt, the usual lead, the reply as it stands, and the usual tail.

        The lead (an empty thought, say) belongs to the reply: the model has to write it.
        """
        last = messages[-1]
        if self._lead is None or last["role"] != "assistant" or last.get("tool_calls") or "reasoning_content" in last:
            return None
        try:
            prompt = render(messages[:-1], True)
        except BadRow:
            return None
        if whole != prompt + self._lead + last["content"] + self._tail:
            return None
        return [(len(prompt), len(prompt) + len(self._lead) + len(last["content"]))]

    def _end_of_turn(self, whole: str, end: int, limit: int, calls: Any, last: bool) -> int:
        """End of the trained stretch: behind the end-of-turn marker that follows the reply."""
        if self._end is None:
            return end
        if calls and self._end.search(json.dumps(calls, ensure_ascii=False, default=str)):
            raise BadRow("a function call that holds the end-of-turn marker")
        match = self._end.search(whole, end, limit) if calls else self._end.match(whole, end)
        if match is not None:
            return match.end()
        if self.end_marker is not None or calls:
            raise BadRow("no end-of-turn marker behind a reply")
        return len(whole) if last and not whole[end:].strip() else end

    def with_system(self, messages: Sequence[Message]) -> list[Message]:
        """The messages, behind the default system message when they bring none."""
        if self.default_system is None or (messages and messages[0]["role"] == "system"):
            return list(messages)
        return [{"role": "system", "content": self.default_system}, *messages]

    def _prepared(self, messages: Sequence[Message], tools: list[Any] | None) -> list[Message]:
        if tools and "tools" not in self.source:
            raise BadRow("the chat template takes no tools")
        out = self.with_system(messages)
        if self._drops_thought:
            out = [_without_thought(message) if message["role"] == "assistant" else message for message in out]
        if any(message.get("tool_calls") for message in out):
            form = self._call_form
            if form is None:
                raise BadRow("the chat template writes no tool calls")
            out = [form.apply(message) if message.get("tool_calls") else message for message in out]
        return out

    @functools.cached_property
    def _call_form(self) -> CallForm | None:
        """The form of a tool call that the template writes out; None when it leaves every form out without an error."""
        question: Message = {"role": "user", "content": "a"}
        name, argument, value = f"{PROBE}_name", f"{PROBE}_argument", f"{PROBE}_value"
        function = {"name": name, "arguments": {argument: value}}
        call: Message = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "id": "a1b2c3d4e", "function": function}]}
        refused = False
        for form in CALL_FORMS:
            try:
                text = self.render([question, form.apply(call)])
            except BadRow:
                refused = True
                continue
            if name in text and argument in text and value in text:
                return form
        return CALL_FORMS[0] if refused and not self._call_is_lost([question, call]) else None

    def _call_is_lost(self, messages: Sequence[Message]) -> bool:
        try:
            self.render(messages)
        except BadRow:  # it says so itself, row by row
            return False
        return True

    def _probe(self) -> tuple[str | None, str | None, str]:
        """What the template writes around a reply: (the special token that ends it, what stands between the prompt and
        it (None when the prompt is no prefix), all that follows a last one)."""
        question: Message = {"role": "user", "content": "a"}
        try:
            text = self.render([question, {"role": "assistant", "content": PROBE}])
            prompt = self.render([question], add_generation_prompt=True)
        except BadRow as bad:
            raise DataError(f"the tokenizer's chat template cannot render one question and its answer: {bad.reason}") from None
        if text.count(PROBE) != 1:
            raise DataError("the tokenizer's chat template does not write the assistant's reply; set `template` to another name")
        tail = text[text.index(PROBE) + len(PROBE) :]
        between = text[len(prompt) : text.index(PROBE)] if text.startswith(prompt) else None
        lead = between if self._has_prompt else None
        self._header = "" if self._has_prompt else between or ""
        start = tail.lstrip()
        return next((token for token in self._special if start.startswith(token)), None), lead, tail


def _without_thought(message: Message) -> Message:
    kept = {key: value for key, value in message.items() if key != "reasoning_content"}
    return {**kept, "content": THOUGHT.sub("", message["content"])}


def _text_arguments(function: Mapping[str, Any]) -> dict[str, Any]:
    return {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}


def token_mask(length: int, spans: Sequence[tuple[int, int]], offsets: Sequence[tuple[int, int]]) -> list[bool]:
    """Which tokens hold a character of a span; `offsets` are the tokens' [start, end) in a text of `length` characters.

    Byte-level tokenizers may trim white space off their offsets, so a token is taken to begin where the one before it
    ended: every character belongs to a token.
    """
    if not offsets:
        return []
    inside = np.zeros(length + 1, dtype=np.int64)
    for start, end in spans:
        inside[start + 1 : end + 1] = 1
    before = np.cumsum(inside)  # before[i]: trained characters among the first i
    table = np.asarray(offsets, dtype=np.int64)
    ends = np.maximum.accumulate(table[:, 1])
    starts = np.minimum(table[:, 0], np.concatenate(([0], ends[:-1])))
    return (before[ends] > before[starts]).tolist()


def template_errors(name: str | None) -> list[str]:
    """What is wrong with a `template:` name whatever the tokenizer; [] when nothing is."""
    try:
        if name is not None:
            _known(name)
    except DataError as error:
        return [str(error)]
    return []


def _known(name: str) -> TemplateName:
    if name in LATER_TEMPLATES:
        raise DataError(f"template {name!r} (images and other media) is not in this version")
    if name not in TEMPLATE_NAMES:
        raise DataError(f"template {name!r} is unknown{nearest(name, list(TEMPLATE_NAMES))}")
    return TEMPLATE_NAMES[name]


def _choose(tokenizer: PreTrainedTokenizerBase, name: str | None) -> tuple[str, bool | None]:
    """(jinja source, thinking override) for a name on a tokenizer."""
    own = _tokenizer_template(tokenizer)
    if name is None:
        if own is None:
            raise DataError(f"the tokenizer has no chat template: set `template` (one of {', '.join(_names_with_source())})")
        return own, None
    known = _known(name)
    if own is not None:
        missing = [marker for marker in known.markers if marker not in own]
        if missing:
            raise DataError(
                f"template {name!r} does not fit the tokenizer: its own chat template never writes {', '.join(missing)}; "
                "leave `template` out to use the tokenizer's own"
            )
        return own, known.thinking
    if known.own is None:
        raise DataError(f"template {name!r} needs a tokenizer that brings its chat template; this one has none")
    vocabulary = tokenizer.get_vocab()
    absent = [token for token in known.tokens if token not in vocabulary]
    if absent:
        raise DataError(f"template {name!r} needs the tokens {', '.join(absent)}, which the tokenizer does not have")
    if not known.tokens and tokenizer.eos_token is None:
        raise DataError(f"template {name!r} ends a reply with the eos token, which the tokenizer does not have")
    return known.own, known.thinking


def _tokenizer_template(tokenizer: PreTrainedTokenizerBase) -> str | None:
    template = tokenizer.chat_template
    if isinstance(template, dict):  # several named templates
        template = template.get("default")
    return template or None


def _names_with_source() -> list[str]:
    return sorted(name for name, known in TEMPLATE_NAMES.items() if known.own is not None)
