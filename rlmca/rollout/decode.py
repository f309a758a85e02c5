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
