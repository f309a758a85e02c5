"""Streams of a server: every token once, and no reply that breaks off, is refused or is of other weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from rlmca.rollout.base import RolloutError, SamplingParams
from rlmca.rollout.sglang.engine import ServedModel, SglangEngine
from rlmca.rollout.sglang.expected import ExpectedTensors
from tests.rollout.sglang.double import Double

PARAMS = SamplingParams(max_new_tokens=5)


def answers(double: Double, body: dict[str, Any], **changes: Any) -> Iterator[dict[str, Any]]:
    whole = double.reply(body)
    for n in range(1, len(whole["output_ids"]) + 1):
        meta = {**whole["meta_info"], "completion_tokens": n, "finish_reason": whole["meta_info"]["finish_reason"] if n == 5 else None}
        yield {"output_ids": whole["output_ids"][:n], "meta_info": {**meta, **changes}}


def streamed(tmp_path: Path, *, ends: bool = True, status: int = 200, **changes: Any) -> list[int]:
    double = Double()

    def fault(path: str, body: dict[str, Any]) -> web.Response | None:
        if path != "/generate":
            return None
        assert body["stream"] is True
        lines = [f"data: {json.dumps(answer)}\n\n" for answer in answers(double, body, **changes)]
        return web.Response(text="".join([*lines, "data: [DONE]\n\n"] if ends else lines[:3]), status=status)

    double.fault = fault
    with double.serving() as server:
        engine = SglangEngine(
            [server], ServedModel({"vocab_size": 64}, ExpectedTensors(None), None), scratch=tmp_path, timeout=30, version=0
        )
        return list(engine.stream([3, 7], 1, PARAMS))


def test_every_token_comes_once(tmp_path: Path) -> None:
    assert streamed(tmp_path) == [7, 8, 9, 10, 11]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ends": False}, "ended its answer to /generate before it was whole"),
        ({"status": 500}, "refused /generate with status 500"),
        ({"weight_versions": [{"version": "3", "start": 0, "end": 5}]}, "tokens of version 3, and the weights are version 0"),
        ({"completion_tokens": 5}, "start it without --incremental-streaming-output"),
        ({"output_token_logprobs": []}, "cannot be used"),
    ],
)
def test_what_cannot_be_trusted_is_an_error(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(RolloutError, match=words):
        streamed(tmp_path, **changes)
