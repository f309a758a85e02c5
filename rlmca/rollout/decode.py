"""Replies to text."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from rlmca.rollout.base import Reply


def decode_replies(tokenizer: PreTrainedTokenizerBase, replies: Sequence[Reply]) -> list[str]:
    """The text of every reply, without its stop token, otherwise exactly as sampled (other special tokens stay).

    Equal replies are decoded once: the replies of a group often are.
    """
    keys = [tuple(reply.ids[:-1] if reply.finish == "stop" else reply.ids) for reply in replies]
    if not keys:
        return []  # an empty list decodes to one empty text
    distinct = list(dict.fromkeys(keys))
    texts = tokenizer.batch_decode([list(key) for key in distinct], skip_special_tokens=False, clean_up_tokenization_spaces=False)
    text_of = dict(zip(distinct, texts, strict=True))
    return [text_of[key] for key in keys]


class TextStream:
    """Token by token to text, never in the middle of a character; all pieces together are what decoding all ids gives.

    Only the last few tokens are decoded again for each new one: from the place before the last piece, since some tokenizers
    write a token differently at the start of a text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._start, self._told = 0, 0
        """Where the window begins, and how many ids are in pieces that were given."""

    def add(self, token: int) -> str:
        """The text that one more token brings; "" while it is the beginning of a character."""
        self._ids.append(token)
        new = self._new()
        if not new or new.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        self._start, self._told = self._told, len(self._ids)
        return new

    def rest(self) -> str:
        """What was held back, at the end of a reply."""
        new = self._new()
        self._start, self._told = self._told, len(self._ids)
        return new

    def _new(self) -> str:
        known, now = (self._text(self._ids[self._start : end]) for end in (self._told, len(self._ids)))
        return now[len(known) :]

    def _text(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
