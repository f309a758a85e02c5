"""The tokenizer of a run, and the ids that end a reply."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rlmca.data.errors import DataError
from rlmca.data.options import TokenizerOptions


def load_tokenizer(options: TokenizerOptions) -> PreTrainedTokenizerBase:
    """The tokenizer of `model_name_or_path`, with a pad token.

    Where there is none, the end-of-sequence token pads. That loses no stop token: rows are masked and padded by their
    length, never by looking for the pad id. DataError when no tokenizer can be loaded.
    """
    if not options.model_name_or_path:
        raise DataError("no tokenizer without a model: set model_name_or_path")
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            options.model_name_or_path,
            revision=options.model_revision,
            cache_dir=options.cache_dir,
            token=options.hf_hub_token,
            trust_remote_code=options.trust_remote_code,
        )
    except Exception as error:
        raise DataError(f"no tokenizer can be loaded from {options.model_name_or_path!r}: {type(error).__name__}: {error}") from error
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise DataError(f"the tokenizer of {options.model_name_or_path!r} has neither a pad nor an eos token")
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def stop_ids(tokenizer: PreTrainedTokenizerBase, generation_config: Any = None, extra: Iterable[int | None] = ()) -> tuple[int, ...]:
    """All ids that end a reply, ascending: the generation config's eos ids, the tokenizer's, and `extra`.

    `extra` is for the template's `end_id`, which need not be an eos of either (a base model under a chat template).
    DataError when there is none at all.
    """
    given = getattr(generation_config, "eos_token_id", None)
    listed = given if isinstance(given, (list, tuple)) else [given]
    ids = {int(i) for i in (*listed, tokenizer.eos_token_id, *extra) if i is not None}
    if not ids:
        raise DataError("neither the generation config nor the tokenizer names an end-of-sequence token")
    return tuple(sorted(ids))
