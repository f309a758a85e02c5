"""The comparison that runs in a checking process; math-verify is imported there only."""

from __future__ import annotations

import logging


def equal(gold: str, found: str) -> bool:
    """Whether two answers are equal as mathematics. Raises ValueError when `gold` cannot be read.

    No time limit of its own: math-verify's limits are SIGALRM, which works in a main thread only and does
    not stop C code. The caller bounds the whole check.
    """
    import math_verify

    # it warns, once a process, that its own limits are off
    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.ERROR)
    wanted = math_verify.parse(f"\\boxed{{{gold}}}", fallback_mode="no_fallback", parsing_timeout=None)
    if not wanted:
        raise ValueError(f"reward math: the row's answer {gold!r} cannot be read as mathematics; the reward `exact` compares texts")
    given = math_verify.parse(f"\\boxed{{{found}}}", fallback_mode="no_fallback", parsing_timeout=None)
    return bool(math_verify.verify(wanted, given, timeout_seconds=None))
