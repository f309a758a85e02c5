"""`rollouts/step-N.jsonl.zst`: every sample of a rollout step, one JSON object a line, zstandard-compressed.

A line has: step, group, k, prompt, prompt_ids, reply, reply_ids, logp (as sampled), versions (one policy version a
token), finish, reward (null: invalid), reward_parts, advantage, advantages (one a token, where they differ), raw_reward (where
rewards are shaped: before that), and answer where the data row has one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import orjson
import zstandard

from rlmca.types import Sample

FOLDER = "rollouts"


class RolloutWriter:
    """Writes rollout files in a thread of its own. Ranks other than the main one write nothing.

    `prompt_text` turns prompt ids into text, once a group. What is written is the samples as they are when `write` is
    called. A failure of an earlier write is raised by the next `write` or by `close`, which waits for the last one.
    """

    def __init__(self, output_dir: str | Path, is_main: bool = True, prompt_text: Callable[[list[int]], str] | None = None) -> None:
        self.folder = Path(output_dir) / FOLDER
        self._prompt_text = prompt_text
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="rollouts") if is_main else None
        self._pending: Future[None] | None = None

    def write(self, step: int, samples: Sequence[Sample]) -> None:
        """Queues the file of `step`."""
        if self._pool is None:
            return
        self._wait()
        rows = [_row(step, sample) for sample in samples]  # a shallow copy now: the loop goes on with these samples
        self._pending = self._pool.submit(self._write, step, rows)

    def close(self) -> None:
        """Waits for what is queued and raises what went wrong."""
        try:
            self._wait()
        finally:
            if self._pool is not None:
                self._pool.shutdown()
                self._pool = None

    def __enter__(self) -> RolloutWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _wait(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _write(self, step: int, rows: list[dict[str, Any]]) -> None:
        texts: dict[int, str] = {}
        for row in rows:
            if self._prompt_text is not None:
                if row["group"] not in texts:
                    texts[row["group"]] = self._prompt_text(row["prompt_ids"])
                row["prompt"] = texts[row["group"]]
        write_rollout(self.folder / f"step-{step}.jsonl.zst", rows)


def write_rollout(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Rows to a compressed file, whole or not at all; non-finite numbers become null."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    try:
        lines = (orjson.dumps(row, default=str, option=orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY) for row in rows)
        temporary.write_bytes(zstandard.ZstdCompressor(level=3).compress(b"".join(line + b"\n" for line in lines)))
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_rollout(path: str | Path) -> Iterator[dict[str, Any]]:
    """The rows of one file, in the order of the samples."""
    with open(path, "rb") as file:
        data = zstandard.ZstdDecompressor().stream_reader(file).read()
    for line in data.split(b"\n"):
        if line:
            yield orjson.loads(line)


def _row(step: int, sample: Sample) -> dict[str, Any]:
    row = {
        "step": step,
        "group": sample.group,
        "k": sample.k,
        "prompt": None,
        "prompt_ids": sample.prompt_ids,
        "reply": sample.reply,
        "reply_ids": sample.reply_ids,
        "logp": sample.reply_logp,
        "versions": sample.versions,
        "finish": sample.finish,
        "reward": sample.reward,
        "reward_parts": dict(sample.reward_parts),
        "advantage": sample.advantage,
    }
    if sample.raw_reward is not None:
        row["raw_reward"] = sample.raw_reward
    if sample.advantages is not None:
        row["advantages"] = sample.advantages
    if "answer" in sample.row:
        row["answer"] = sample.row["answer"]
    return row
