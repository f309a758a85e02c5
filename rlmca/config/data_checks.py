"""What must hold between the keys of mixing, streaming and tokenised rows, and which of them a run does not use."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rlmca.config.schema import ROW_STAGES, RunConfig

Finding = tuple[tuple[str, ...], str]

KEYS = (
    "mix_strategy",
    "interleave_probs",
    "streaming",
    "buffer_size",
    "tokenized_path",
    "overwrite_cache",
    "preprocessing_batch_size",
    "data_shared_file_system",
)
"""Keys of rows that are tokenised for training; prompts of stage grpo are not."""
IDLE_FOR_PAIRS = ("buffer_size", "overwrite_cache", "preprocessing_batch_size", "data_shared_file_system")
_TEXTS = "stage pt trains on every token of a text"


def findings(cfg: RunConfig, command: str) -> Iterator[Finding]:
    """Contradictions, for every stage and command that reads the keys."""
    data = cfg.data
    if data.interleave_probs:
        yield from _probabilities(cfg)
    if command != "train":
        return
    if cfg.stage not in ROW_STAGES:
        for name in ("streaming", "tokenized_path"):
            if getattr(data, name):
                yield ("stage", name), f"{name} is for stages {' and '.join(ROW_STAGES)}, and stage is {cfg.stage}: leave it out"
        if data.mix_strategy != "concat":
            yield ("stage", "mix_strategy"), f"mix_strategy is for stages {' and '.join(ROW_STAGES)}: stage {cfg.stage} takes concat"
    elif data.streaming:
        yield from _streaming(cfg)


def _probabilities(cfg: RunConfig) -> Iterator[Finding]:
    data = cfg.data
    chances, sets = data.interleave_probs, len(data.dataset)
    if data.mix_strategy == "concat":
        yield (
            ("interleave_probs", "mix_strategy"),
            "interleave_probs needs mix_strategy: interleave_under, interleave_over or interleave_once",
        )
    elif len(chances) != sets:
        yield (
            ("interleave_probs", "dataset"),
            f"interleave_probs has {len(chances)} numbers, and dataset names {sets} sets: write one for each",
        )
    elif not math.isclose(sum(chances), 1, abs_tol=1e-6):
        yield ("interleave_probs",), f"interleave_probs: {', '.join(map(str, chances))} sum to {sum(chances):g}, not to 1"
    elif 0 in chances:
        yield ("interleave_probs", "dataset"), f"interleave_probs: {data.dataset[chances.index(0)]} is never drawn; leave the set out"


def _streaming(cfg: RunConfig) -> Iterator[Finding]:
    data, train = cfg.data, cfg.train
    if train.max_steps < 1:
        yield ("streaming", "max_steps"), "streaming: the length of the data is not known: write max_steps"
    if data.tokenized_path:
        yield (
            ("streaming", "tokenized_path"),
            "streaming and tokenized_path contradict each other: rows are tokenised as they are needed, or once",
        )
    if 0 < data.val_size < 1:
        yield (
            ("streaming", "val_size"),
            f"val_size: {data.val_size} is a share of data whose length streaming does not know; write a number of rows",
        )
    if data.val_size and data.mix_strategy == "interleave_over":
        yield (
            ("streaming", "val_size", "mix_strategy"),
            "val_size: interleave_over reads sets again, rows that were held out too; write eval_dataset",
        )
    for name in ("eval_strategy", "save_strategy"):
        if getattr(train, name) == "epoch":
            yield ("streaming", name), f"{name}: epoch needs a known length, and streaming has none; write steps"


def notes(cfg: RunConfig) -> Iterator[str]:
    """One sentence for each of these keys that the run does not use."""
    data, given = cfg.data, cfg.given
    if cfg.stage == "dpo":
        yield from (f"{name} has no effect: stage dpo reads its pairs into memory in every run" for name in IDLE_FOR_PAIRS if name in given)
    if cfg.stage not in ROW_STAGES:
        return
    if cfg.stage == "pt":
        for name in ("train_on_prompt", "mask_history", "default_system", "enable_thinking"):
            if name in given:
                yield f"{name} has no effect: {_TEXTS}"
    if not data.streaming and "buffer_size" in given:
        yield "buffer_size has no effect: streaming is false"
    if data.streaming and data.disable_shuffling and "buffer_size" in given:
        yield "buffer_size has no effect: disable_shuffling keeps the order of the files"
    if data.overwrite_cache and not data.tokenized_path:
        yield "overwrite_cache has no effect: without tokenized_path the sources are read anew in every run"
    if data.streaming and "preprocessing_batch_size" in given:
        yield "preprocessing_batch_size has no effect: streaming tokenises rows as they are needed, one by one"
    if data.streaming and data.data_shared_file_system:
        yield "data_shared_file_system has no effect: with streaming every process reads the data by itself"
    if len(data.dataset) == 1 and data.mix_strategy != "concat":
        yield "mix_strategy has no effect: there is one data set"
