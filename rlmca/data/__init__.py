"""Data: sources, formats, templates, masks and a resumable order.

`load_train_eval` / `load_supervised` give token rows with targets, `load_train_eval_pairs` pairs of them,
`load_prompts` gives prompts with their rows.
"""

from __future__ import annotations

from rlmca.data.errors import DataError, Dropped, DroppedRow
from rlmca.data.loading import check_sources
from rlmca.data.options import Hub
from rlmca.data.order import ShuffledOrder
from rlmca.data.packing import pack_rows
from rlmca.data.pairs import Pair, Pairs, batch_of_pairs, load_train_eval_pairs
from rlmca.data.prompts import Prompt, Prompts, load_prompts
from rlmca.data.supervised import Dataset, load_supervised, load_train_eval
from rlmca.data.template import ChatTemplate, Encoded, template_errors
from rlmca.data.tokenizer import load_tokenizer, stop_ids

__all__ = [
    "ChatTemplate",
    "DataError",
    "Dataset",
    "Dropped",
    "DroppedRow",
    "Encoded",
    "Hub",
    "Pair",
    "Pairs",
    "Prompt",
    "Prompts",
    "ShuffledOrder",
    "batch_of_pairs",
    "check_sources",
    "load_prompts",
    "load_supervised",
    "load_tokenizer",
    "load_train_eval",
    "load_train_eval_pairs",
    "pack_rows",
    "stop_ids",
    "template_errors",
]
