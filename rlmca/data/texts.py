"""Rows of stage pt: plain texts, every token of which is a target.

A text is tokenized as it stands and ends with the eos token; a bos token stands before it where the tokenizer itself
puts one. One longer than `cutoff_len` becomes several rows, each of which begins with the last token of the one before:
so every token of the text but the first is a target exactly once, and none is lost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlmca.data.encoders import Outcome, tokenizer_signature
from rlmca.data.errors import BadRow, DataError
from rlmca.data.info import DatasetEntry
from rlmca.data.options import DataOptions
from rlmca.data.sources import is_text
from rlmca.data.template import Encoded

LLAMA3_END = "<|end_of_text|>"
"""Instruct models of Llama 3 name the end of a turn as their eos token; texts end with this one, as in LLaMA-Factory."""


class TextEncoder:
    """Texts of alpaca's prompt column (and query, where `columns` names one, on a line of its own)."""

    def __init__(self, options: DataOptions, tokenizer: Any, template_name: str | None = None) -> None:
        if options.cutoff_len < 2:
            raise DataError(f"cutoff_len must be at least 2, not {options.cutoff_len}")
        self.tokenizer, self.cutoff_len = tokenizer, options.cutoff_len
        end = LLAMA3_END if template_name == "llama3" and LLAMA3_END in tokenizer.get_vocab() else tokenizer.eos_token
        if end is None:
            raise DataError("the tokenizer has no eos token, and texts of stage pt end with one")
        self.end_id = int(tokenizer.convert_tokens_to_ids(end))
        first = tokenizer("a")["input_ids"][:1]
        self.start = first if tokenizer.bos_token_id is not None and first == [tokenizer.bos_token_id] else []

    def signature(self) -> dict[str, Any]:
        return {
            "kind": "texts",
            **tokenizer_signature(self.tokenizer),
            "start": self.start,
            "end": self.end_id,
            "cutoff_len": self.cutoff_len,
        }

    def encode(self, entry: DatasetEntry, records: Sequence[tuple[int, Any]]) -> list[Outcome]:
        texts = read_texts(entry, records)
        good = [text for text in texts if isinstance(text, str)]
        ids = iter(self.tokenizer(good, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"] if good else [])
        return [
            Outcome(index, [], text.reason) if isinstance(text, BadRow) else self._outcome(index, next(ids))
            for (index, _), text in zip(records, texts, strict=True)
        ]

    def _outcome(self, index: int, ids: list[int]) -> Outcome:
        return Outcome(index, self.pieces(ids)) if ids else Outcome(index, [], "no token in the text")  # some tokenizers drop characters

    def pieces(self, ids: list[int]) -> list[Encoded]:
        """The rows of a text's tokens."""
        ids = [*self.start, *ids, self.end_id]
        stride = self.cutoff_len - 1
        cuts = [ids[at : at + self.cutoff_len] for at in range(0, max(1, len(ids) - 1), stride)]
        return [Encoded(cut, [place > 0 for place in range(len(cut))]) for cut in cuts]


def read_texts(entry: DatasetEntry, records: Sequence[tuple[int, Any]]) -> list[str | BadRow]:
    """The text of each (position, record) pair, or why there is none. DataError for a set of conversations."""
    if entry.formatting not in ("alpaca", "procedural"):
        raise DataError(
            f"data set {entry.name!r} has formatting {entry.formatting}: stage pt reads texts; "
            "write formatting: alpaca with the text's column as columns.prompt, or stage: sft"
        )
    return [_text(entry, raw) for _, raw in records]


def _text(entry: DatasetEntry, raw: Any) -> str | BadRow:
    if isinstance(raw, BadRow):
        return raw
    if not isinstance(raw, Mapping):
        return BadRow(f"the row is a {type(raw).__name__}, not an object")
    parts = []
    names = ("question",) if entry.formatting == "procedural" else (entry.columns["prompt"], entry.columns["query"])
    for place, column in enumerate(names):
        value = raw.get(column) if column is not None else None
        if place == 0 and (column is None or column not in raw):
            return BadRow(f"no column {column!r}")
        if value is None and place > 0:
            continue
        if not isinstance(value, str):
            return BadRow(f"column {column!r} is {'null' if value is None else f'a {type(value).__name__}'}, not text")
        if not is_text(value):
            return BadRow("not valid Unicode")
        parts.append(value)
    text = "\n".join(part for part in parts if part)
    return text if text.strip() else BadRow("empty text")
