"""Which prompts are trained on, and how they are rendered: a filter of the user's, and a share with thinking on."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlmca.config import RunConfig
from rlmca.data import ChatTemplate, DataError, Prompt
from rlmca.data.errors import BadRow
from rlmca.rewards.user import load_function


def row_filter(name: str) -> Callable[[Mapping[str, Any]], str | None]:
    """The user's function `name` as what `load_prompts` wants: the reason to drop a row, or None.

    DataError when there is no such function, when it raises, and when it returns neither true nor false.
    """
    try:
        function = load_function(name, "prompt_filter")
    except ValueError as error:
        raise DataError(str(error)) from None
    reason = f"prompt_filter {name.rpartition(':')[2]} says no"

    def why_not(row: Mapping[str, Any]) -> str | None:
        try:
            value = function(row)
        except Exception as error:
            raise DataError(f"prompt_filter {name!r} raised {type(error).__name__} for the row {_short(row)}: {error}") from error
        if type(value).__name__ not in ("bool", "bool_"):  # NumPy's is none of Python's
            raise DataError(f"prompt_filter {name!r} returned {value!r} for the row {_short(row)}; it must return True (keep) or False")
        return None if value else reason

    return why_not


def _short(row: Mapping[str, Any]) -> str:
    text = repr(dict(row))
    return text if len(text) <= 200 else text[:200] + "…"


def thinking_templates(cfg: RunConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[ChatTemplate, ChatTemplate]:
    """(with thinking on, with thinking off). DataError when the template makes the same prompt of both."""
    system = cfg.data.default_system
    on, off = (ChatTemplate(tokenizer, cfg.model.template, thinking, system) for thinking in (True, False))
    question = [{"role": "user", "content": "a"}]
    try:
        same = on.render(question, add_generation_prompt=True) == off.render(question, add_generation_prompt=True)
    except BadRow as bad:
        raise DataError(f"thinking_ratio: {bad.reason}") from None
    if same:
        which = "the tokenizer's chat template" if cfg.model.template is None else f"template {cfg.model.template!r}"
        raise DataError(f"thinking_ratio: {which} has no switch for thinking, its prompts are the same with and without: leave it out")
    return on, off


def choose_thinking(prompts: Sequence[Prompt], rows: Sequence[int], ratio: float | None, *, seed: int, step: int) -> list[Prompt]:
    """The prompts as rendered in rollout `step`: with thinking on for a share of `ratio`, drawn for each row number by itself.

    The choice depends on (seed, step, row) alone. The row that reward functions see gets `enable_thinking`.
    """
    if ratio is None:
        return list(prompts)
    chosen = []
    for prompt, number in zip(prompts, rows, strict=True):
        assert prompt.other_ids is not None
        on = random.Random(f"thinking/{seed}/{step}/{number}").random() < ratio
        chosen.append(Prompt(prompt.ids if on else prompt.other_ids, {**prompt.row, "enable_thinking": on}))
    return chosen


def other_renderings(prompts: Sequence[Prompt]) -> list[Prompt]:
    """The prompts as their second template renders them, where they have one."""
    return [Prompt(prompt.other_ids, prompt.row) for prompt in prompts if prompt.other_ids is not None]
