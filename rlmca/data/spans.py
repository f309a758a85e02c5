"""Where the replies stand in a conversation that was rendered as a whole.

Nothing is rendered piece by piece. A reply's end is found by rendering the conversation once more with a mark, a
character that no text has, behind every reply: with the marks taken out the rendering must be the whole one again,
else the marks prove nothing and the row is refused. A reply begins where the prompt ends that the model would be given
to write it (the turns before it, with the generation prompt), when that prompt is a prefix of the whole rendering; a
template that writes old turns otherwise than new ones (thinking dropped, for instance) has no such prefix, and then
the reply begins where its first character stands, found with a mark again.
"""

from __future__ import annotations

import os.path
import re
from collections.abc import Callable, Sequence
from typing import Any

from rlmca.data.errors import BadRow

Message = dict[str, Any]
Render = Callable[[Sequence[Message], bool], str]
"""(messages, add_generation_prompt) -> text"""

# Unicode noncharacters: valid in a str, in no interchanged text, and no kind of white space that a template strips.
MARKS = tuple(chr(code) for code in range(0xFDD0, 0xFDF0))
THINK_END = re.compile(r"^.*</think>\s*", re.DOTALL)


def reply_bounds(
    render: Render, whole: str, messages: Sequence[Message], wanted: Sequence[int], *, has_prompt: bool, header: str = ""
) -> list[tuple[int, int]]:
    """(start, end) in characters of each wanted reply, given by its place in `messages`; BadRow when not exact.

    `has_prompt`: the template knows a generation prompt. Without one a reply that calls tools begins behind the turns before
    it and as much of `header`, which stands in front of an ordinary reply, as the template writes there too. `end` excludes
    the end-of-turn marker, save for replies that call tools: their end is the mark behind the last call's name, and the
    caller looks for the marker from there on.
    """
    mark = _free_mark(whole)
    ends = _marked(render, whole, messages, wanted, mark, (_mark_end, _mark_end_inside))
    bounds, before = [], 0
    for place, end in zip(wanted, ends, strict=True):
        start = _prompt_end(render, whole, messages, place) if has_prompt or messages[place].get("tool_calls") else None
        if start is not None and not has_prompt:
            start += len(os.path.commonprefix([header, whole[start:end]]))
        if start is None or not before <= start <= end:
            start = _marked(render, whole, messages, [place], mark, (_mark_start, _mark_start_inside, _mark_answer))[0]
        if not before <= start <= end:
            raise BadRow("the reply cannot be located in the rendered conversation")
        bounds.append((start, end))
        before = end
    return bounds


def content_start(render: Render, whole: str, messages: Sequence[Message], place: int) -> int:
    """Where the content of the message at `place` begins in `whole`; BadRow when it cannot be located."""
    return _marked(render, whole, messages, [place], _free_mark(whole), (_mark_start, _mark_start_inside))[0]


def _free_mark(whole: str) -> str:
    mark = next((mark for mark in MARKS if mark not in whole), None)
    if mark is None:
        raise BadRow("the text holds every noncharacter")
    return mark


def _prompt_end(render: Render, whole: str, messages: Sequence[Message], place: int) -> int | None:
    try:
        prompt = render(messages[:place], True)
    except BadRow:
        return None
    return len(prompt) if whole.startswith(prompt) else None


def _marked(
    render: Render,
    whole: str,
    messages: Sequence[Message],
    places: Sequence[int],
    mark: str,
    ways: Sequence[Callable[[Message, str], Message]],
) -> list[int]:
    """Offset in `whole` of one mark per place, by the first way of marking that changes nothing but the marks."""
    pattern = re.compile(f"{mark}([0-9]+){mark}")
    for way in ways:
        marked = list(messages)
        for place in places:
            marked[place] = way(messages[place], f"{mark}{place}{mark}")
        try:
            text = render(marked, False)
        except BadRow:
            continue
        found = list(pattern.finditer(text))
        if [int(match[1]) for match in found] != list(places) or pattern.sub("", text) != whole:
            continue
        offsets, taken = [], 0
        for match in found:
            offsets.append(match.start() - taken)
            taken += len(match[0])
        return offsets
    raise BadRow("the reply cannot be located in the rendered conversation")


def _mark_end(message: Message, mark: str) -> Message:
    calls = message.get("tool_calls")
    if not calls:
        return {**message, "content": message["content"] + mark}
    last = calls[-1]
    function = {**last["function"], "name": last["function"]["name"] + mark}
    return {**message, "tool_calls": [*calls[:-1], {**last, "function": function}]}


def _mark_end_inside(message: Message, mark: str) -> Message:
    """For templates that strip white space: the mark goes before the reply's own trailing white space."""
    if message.get("tool_calls"):
        return _mark_end(message, mark)
    text = message["content"]
    kept = len(text.rstrip())
    return {**message, "content": text[:kept] + mark + text[kept:]}


def _mark_start(message: Message, mark: str) -> Message:
    return {**message, "content": mark + (message["content"] or "")}


def _mark_start_inside(message: Message, mark: str) -> Message:
    text = message["content"] or ""
    at = len(text) - len(text.lstrip())
    return {**message, "content": text[:at] + mark + text[at:]}


def _mark_answer(message: Message, mark: str) -> Message:
    """For templates that drop the thinking of old turns: the mark goes behind it."""
    text = message["content"] or ""
    match = THINK_END.match(text)
    at = match.end() if match else 0
    return {**message, "content": text[:at] + mark + text[at:]}
