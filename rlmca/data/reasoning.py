"""Procedural data sets: `reasoning_gym:TASK?size=…&seed=…&option=value`, with their own verifier."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qsl

from rlmca.data.errors import DataError

PREFIX = "reasoning_gym:"


def parse_reasoning(source: str) -> tuple[str, dict[str, Any]]:
    """(task, options) of a source; an option's value is read as JSON (`2`, `true`, `[1,2]`), else as text."""
    task, _, query = source.removeprefix(PREFIX).partition("?")
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
    except ValueError:
        raise DataError(f"{source!r}: after the ? write name=value pairs with & between them") from None
    options: dict[str, Any] = {}
    for name, text in pairs:
        if name in options:
            raise DataError(f"{source!r}: {name} is given twice")
        try:
            options[name] = json.loads(text)
        except ValueError:
            options[name] = text
    return task, options


def make_reasoning(source: str) -> tuple[str, dict[str, Any], Any]:
    """(task, options, the reasoning_gym data set). DataError when the task or an option is unknown or refused."""
    # Imported here because it takes seconds and most runs have no procedural data set.
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    from rlmca.data.info import nearest

    task, options = parse_reasoning(source)
    if task not in DATASETS:
        raise DataError(f"{source!r}: reasoning_gym has no task {task!r}{nearest(task, list(DATASETS))}")
    try:
        return task, options, reasoning_gym.create_dataset(task, **options)
    except Exception as error:
        raise DataError(f"{source!r}: reasoning_gym refuses the options {options}: {type(error).__name__}: {error}") from None


def reasoning_rows(source: str) -> Iterator[dict[str, Any]]:
    """Rows with `question`, `answer`, `verifier`, and under `reasoning_gym` what the verifier needs: task, config, entry."""
    task, options, made = make_reasoning(source)
    for i in range(len(made)):
        entry = made[i]
        yield {
            "question": entry["question"],
            "answer": entry["answer"],
            "ability": task,
            "verifier": "reasoning_gym",
            "reasoning_gym": {"task": task, "config": options, "entry": entry},
        }
