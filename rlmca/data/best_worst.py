"""Preference pairs out of scored replies: of each prompt's replies a better and a worse one, under rules.

Pure functions on plain rows, and the files around them: replies as `eval` writes them (`eval_predictions.jsonl`) in, a
ranking set in LLaMA-Factory's form and its entry in `dataset_info.json` out.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlmca.data.errors import DataError
from rlmca.data.info import INFO_FILE

COLUMNS = {"messages": "messages", "chosen": "chosen", "rejected": "rejected"}
ENTRY = {
    "ranking": True,
    "formatting": "sharegpt",
    "columns": COLUMNS,
    "tags": {
        "role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant", "observation_tag": "tool",
        "function_tag": "function_call", "system_tag": "system",
    },
}  # fmt: skip
"""What the entry says besides the file: OpenAI's messages, in a form that every version of LLaMA-Factory reads."""


@dataclass(frozen=True)
class Reply:
    """One reply to a prompt and its score; `score` None: invalid, never part of a pair."""

    text: str
    score: float | None
    truncated: bool = False
    tokens: int | None = None
    """None: its length is counted in characters."""

    @property
    def length(self) -> int:
        return len(self.text) if self.tokens is None else self.tokens


@dataclass(frozen=True)
class PairRules:
    """Which pairs are made. A pair's chosen reply always scores higher than its rejected one.

    ValueError for rules that no pair can fulfil.
    """

    min_margin: float = 0.0
    """The scores differ by at least this much."""
    max_length_ratio: float | None = None
    """The longer of the two is at most so many times as long: otherwise a model learns length."""
    min_length: int = 1
    max_length: int | None = None
    min_chosen_score: float | None = None
    max_rejected_score: float | None = None
    keep_truncated: bool = False
    """Replies that ran into the length limit may be rejected ones; chosen they are never."""
    pairs_per_prompt: int = 1

    def __post_init__(self) -> None:
        wrong = []
        if self.min_margin < 0:
            wrong.append(f"min_margin {self.min_margin} must not be negative")
        if self.max_length_ratio is not None and self.max_length_ratio < 1:
            wrong.append(f"max_length_ratio {self.max_length_ratio} must be at least 1: longer over shorter")
        if self.max_length is not None and self.max_length < self.min_length:
            wrong.append(f"max_length {self.max_length} is below min_length {self.min_length}")
        if self.pairs_per_prompt < 1:
            wrong.append(f"pairs_per_prompt {self.pairs_per_prompt} must be at least 1")
        if wrong:
            raise ValueError("; ".join(wrong))


def best_and_worst(replies: Sequence[Reply], rules: PairRules) -> tuple[list[tuple[Reply, Reply]], str]:
    """((chosen, rejected), …) of one prompt's replies, and why there is none where there is none.

    Of all pairs that the rules allow, the one of the widest margin first (of equal ones, the one that comes first); each
    further pair shares no text with those before it. Replies of equal text count once.
    """
    once: dict[str, Reply] = {}
    for reply in replies:
        once.setdefault(reply.text, reply)
    valid = [reply for reply in once.values() if reply.score is not None and reply.text.strip() and _length_fits(reply, rules)]
    if len(valid) < 2:
        return [], "fewer than two different valid replies"
    scored = [(float(reply.score or 0.0), reply) for reply in valid]
    wide = [(a - b, chosen, rejected) for a, chosen in scored for b, rejected in scored if a > b and a - b >= rules.min_margin]
    if not wide:
        return [], "all scores equal" if len({score for score, _ in scored}) == 1 else "margin below min_margin"
    allowed = [(margin, chosen, rejected) for margin, chosen, rejected in wide if _allowed(chosen, rejected, rules)]
    if not allowed:
        return [], "no pair within the rules of scores, length and truncation"
    found: list[tuple[Reply, Reply]] = []
    used: set[str] = set()
    for _, chosen, rejected in sorted(allowed, key=lambda pair: -pair[0]):
        if len(found) < rules.pairs_per_prompt and not used & {chosen.text, rejected.text}:
            found.append((chosen, rejected))
            used |= {chosen.text, rejected.text}
    return found, ""


def _length_fits(reply: Reply, rules: PairRules) -> bool:
    return rules.min_length <= reply.length and (rules.max_length is None or reply.length <= rules.max_length)


def _allowed(chosen: Reply, rejected: Reply, rules: PairRules) -> bool:
    if chosen.truncated or (rejected.truncated and not rules.keep_truncated):
        return False
    if rules.min_chosen_score is not None and float(chosen.score or 0.0) < rules.min_chosen_score:
        return False
    if rules.max_rejected_score is not None and float(rejected.score or 0.0) > rules.max_rejected_score:
        return False
    short, long = sorted((chosen.length, rejected.length))
    return rules.max_length_ratio is None or long <= rules.max_length_ratio * max(short, 1)


def pairs_of_rows(rows: Iterable[Mapping[str, Any]], rules: PairRules) -> tuple[list[dict[str, Any]], Counter[str]]:
    """(rows of a ranking set, prompts without a pair by reason) of rows with `messages`, `predict`, `reward`, and, where they
    are there, `finish`, `ids` and `tools`. Rows with the same messages and tools are replies to one prompt. DataError for a row of
    another form."""
    prompts: dict[str, tuple[list[Any], Any, list[Reply]]] = {}
    for number, row in enumerate(rows, start=1):
        messages = row.get("messages")
        if not isinstance(messages, list) or not isinstance(row.get("predict"), str) or "reward" not in row:
            raise DataError(
                f"row {number} has no messages, predict and reward: the rows of eval_predictions.jsonl have them, which "
                "rlmca-cli eval writes (do_sample: true and num_generations: 8 for several replies a prompt)"
            )
        ids, score = row.get("ids"), row["reward"]
        reply = Reply(row["predict"], score, row.get("finish") == "length", len(ids) if isinstance(ids, list) else None)
        tools = row.get("tools")
        prompts.setdefault(json.dumps([messages, tools], ensure_ascii=False), (messages, tools, []))[2].append(reply)
    out: list[dict[str, Any]] = []
    without: Counter[str] = Counter()
    listed = any(tools for _, tools, _ in prompts.values())
    for messages, tools, replies in prompts.values():
        if any(message.get("tool_calls") for message in messages):
            without["the prompt holds tool calls"] += 1
            continue
        found, why = best_and_worst(replies, rules)
        if not found:
            without[why] += 1
        turns = [{"role": message["role"], "content": message["content"]} for message in messages]
        for chosen, rejected in found:
            sides = {name: {"role": "assistant", "content": reply.text} for name, reply in (("chosen", chosen), ("rejected", rejected))}
            shown = {"tools": json.dumps(tools, ensure_ascii=False) if tools else ""} if listed else {}
            out.append({"messages": turns, **shown, **sides, "chosen_score": chosen.score, "rejected_score": rejected.score})
    return out, without


def write_ranking_set(path: Path, rows: Sequence[Mapping[str, Any]], name: str) -> Path:
    """Write the rows as JSON lines and name them in the folder's `dataset_info.json`, whose other entries stay; that file's path.

    DataError when there is no row, or the name is taken by another file.
    """
    if not rows:
        raise DataError(f"no pair is left for {path}: loosen the rules")
    info_path = path.parent / INFO_FILE
    info = json.loads(info_path.read_text(encoding="utf-8-sig")) if info_path.exists() else {}
    if name in info and info[name].get("file_name") != path.name:
        raise DataError(f"{info_path} has a data set {name!r} of another file already: choose another name")
    path.parent.mkdir(parents=True, exist_ok=True)
    _write(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    columns = {**COLUMNS, **({"tools": "tools"} if "tools" in rows[0] else {})}
    entry = {"file_name": path.name, **ENTRY, "columns": columns}
    _write(info_path, json.dumps({**info, name: entry}, ensure_ascii=False, indent=2) + "\n")
    return info_path


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
