"""Prompts of reinforcement learning: token ids to continue, and the row that the reward functions read."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rlmca.data.errors import BadRow, DataError, Dropped
from rlmca.data.formats import Conversation
from rlmca.data.info import RL_COLUMNS, DatasetEntry
from rlmca.data.loading import nothing_left, read_conversations, report
from rlmca.data.options import DataOptions, Hub, Log, no_log
from rlmca.data.template import ChatTemplate


class Prompt(NamedTuple):
    """One prompt: its ids, generation prompt included, and its row.

    `row` holds every column of the source, and `messages` (the prompt as chat messages), `answer` (ground truth, None
    when unknown), `dataset`, and where there are any `response` (a reference reply), `ability`, `verifier`, `shown_tools` (those
    that the prompt lists).
    """

    ids: list[int]
    row: dict[str, Any]
    other_ids: list[int] | None = None
    """The prompt as a second template renders it, where there is one."""


class Prompts(list[Prompt]):
    """A list of prompts that knows what was left out of it."""

    def __init__(self, prompts: Iterable[Prompt] = (), dropped: Dropped | None = None) -> None:
        super().__init__(prompts)
        self.dropped = dropped if dropped is not None else Dropped()

    @property
    def fingerprint(self) -> str:
        """Changes with any prompt's ids: tells a resumed run that it reads the same data."""
        digest = hashlib.blake2b(digest_size=16)
        for prompt in self:
            for ids in (prompt.ids, prompt.other_ids):
                if ids is not None:
                    digest.update(np.asarray([len(ids), *ids], dtype=np.int32).tobytes())
        return digest.hexdigest()


def load_prompts(
    options: DataOptions,
    template: ChatTemplate,
    max_prompt_len: int,
    names: Sequence[str] | None = None,
    log: Log = no_log,
    *,
    seed: int = 42,
    hub: Hub | None = None,
    keep: Callable[[Mapping[str, Any]], str | None] | None = None,
    other: ChatTemplate | None = None,
) -> Prompts:
    """The prompts of all named data sets (`options.dataset` unless `names` says otherwise), one after the other.

    A prompt longer than `max_prompt_len` tokens is dropped and counted, never cut. Rows need no answer. `keep` gives the
    reason to drop a row, or None. `other` renders every prompt a second time, into `other_ids`.
    DataError when a source cannot be read or nothing of a data set is usable.
    """
    if max_prompt_len < 1:
        raise DataError(f"max_prompt_len must be at least 1, not {max_prompt_len}")
    prompts = Prompts()
    for name in options.dataset if names is None else names:
        dropped = Dropped()
        entry, conversations, first = read_conversations(name, options, need_reply=False, dropped=dropped, seed=seed, hub=hub)
        before = len(prompts)
        others = [None] * len(conversations) if other is None else other.encode_prompts(conversations)
        for conversation, ids, second in zip(conversations, template.encode_prompts(conversations), others, strict=True):
            if isinstance(ids, BadRow):
                dropped.add(name, conversation.index, ids.reason)
            elif isinstance(second, BadRow):
                dropped.add(name, conversation.index, second.reason)
            elif max(len(ids), len(second or ())) > max_prompt_len:
                dropped.add(name, conversation.index, f"prompt longer than max_prompt_len {max_prompt_len}")
            else:
                row = _row(entry, conversation, template)
                reason = None if keep is None else keep(row)
                if reason is None:
                    prompts.append(Prompt(ids, row, second))
                else:
                    dropped.add(name, conversation.index, reason)
        if len(prompts) == before:
            raise nothing_left(entry, first, dropped)
        log(report(entry, len(prompts) - before, dropped))
        prompts.dropped.extend(dropped)
    if not prompts:
        raise DataError("no data set is named: set dataset")
    return prompts


def _row(entry: DatasetEntry, conversation: Conversation, template: ChatTemplate) -> dict[str, Any]:
    row = {"dataset": entry.name, **conversation.row, "messages": template.with_system(conversation.prompt)}
    for key in RL_COLUMNS:
        column = entry.columns.get(key)
        if column is not None and column != key and column in conversation.row:
            row[key] = conversation.row[column]
    if conversation.tools:
        row["shown_tools"] = conversation.tools
    if conversation.reply is not None:
        row.setdefault("response", conversation.reply["content"])
    if row.get("answer") is None:
        # A data set made for supervised training has its ground truth as the reply.
        row["answer"] = conversation.reply["content"] if conversation.reply is not None else None
    return row
