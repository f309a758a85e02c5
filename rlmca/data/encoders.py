"""From raw records to token rows: one encoder for each kind of supervised row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rlmca.data.errors import BadRow, DataError, Dropped
from rlmca.data.formats import convert_rows
from rlmca.data.info import DatasetEntry
from rlmca.data.options import DataOptions
from rlmca.data.template import ChatTemplate, Encoded


@dataclass(frozen=True)
class Outcome:
    """What became of one record: its token rows, or none of them and the reason; `cut` when tokens were left out."""

    index: int
    rows: Sequence[Encoded]
    reason: str = ""
    cut: bool = False


class Encoder(Protocol):
    """Makes token rows of records; holds everything that decides how."""

    def signature(self) -> dict[str, Any]:
        """What the tokens depend on besides the records; plain values, for the key of a cache."""
        ...

    def encode(self, entry: DatasetEntry, records: Sequence[tuple[int, Any]]) -> list[Outcome]:
        """One outcome for each (position, record) pair, in their order. DataError for a set that cannot be such rows."""
        ...


class ConversationEncoder:
    """Rows of stage sft: a conversation, rendered whole, with its replies as targets.

    A row longer than `cutoff_len` keeps its first `cutoff_len` tokens exactly; if no target is among them it is dropped.
    """

    def __init__(self, options: DataOptions, template: ChatTemplate) -> None:
        if options.train_on_prompt and options.mask_history:
            raise DataError("train_on_prompt and mask_history exclude each other: set one of them")
        if options.cutoff_len < 2:
            raise DataError(f"cutoff_len must be at least 2, not {options.cutoff_len}")
        self.options, self.template = options, template

    def signature(self) -> dict[str, Any]:
        template, options = self.template, self.options
        return {
            "kind": "conversations",
            **tokenizer_signature(template.tokenizer),
            "template": template.source,
            "enable_thinking": template.enable_thinking,
            "default_system": template.default_system,
            "cutoff_len": options.cutoff_len,
            "train_on_prompt": options.train_on_prompt,
            "mask_history": options.mask_history,
        }

    def encode(self, entry: DatasetEntry, records: Sequence[tuple[int, Any]]) -> list[Outcome]:
        options, dropped = self.options, Dropped()
        numbered = [(place, raw) for place, (_, raw) in enumerate(records)]
        conversations = convert_rows(entry, numbered, need_reply=True, dropped=dropped)
        outcomes = {row.index: Outcome(records[row.index][0], [], row.reason) for row in dropped}
        rows = self.template.encode(conversations, train_on_prompt=options.train_on_prompt, mask_history=options.mask_history)
        for conversation, row in zip(conversations, rows, strict=True):
            outcomes[conversation.index] = self._outcome(records[conversation.index][0], row)
        return [outcomes[place] for place in range(len(records))]

    def _outcome(self, index: int, row: Encoded | BadRow) -> Outcome:
        most = self.options.cutoff_len
        if isinstance(row, BadRow):
            return Outcome(index, [], row.reason)
        if len(row.ids) <= most:
            return Outcome(index, [row])
        row = Encoded(row.ids[:most], row.mask[:most])
        if not any(row.mask):
            return Outcome(index, [], f"no token of the reply within cutoff_len {most}")
        return Outcome(index, [row], cut=True)


def tokenizer_signature(tokenizer: Any) -> dict[str, Any]:
    """The whole of a fast tokenizer, and its special tokens."""
    return {
        "tokenizer": tokenizer.backend_tokenizer.to_str(),
        "special_tokens": {k: str(v) for k, v in tokenizer.special_tokens_map.items()},
    }
