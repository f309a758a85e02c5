"""Servers that fail, played by a double: each fault gives one clear RolloutError and no reply that cannot be trusted."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web

from rlmca.config.sglang import SyncOptions
from rlmca.rollout.base import Request, RolloutError, SamplingParams
from rlmca.rollout.sglang.engine import ServedModel, SglangEngine
from rlmca.rollout.sglang.expected import ExpectedTensors
from tests.rollout.sglang.double import Double

PARAMS = SamplingParams(max_new_tokens=4)
SHAPES = {"a.weight": (4, 3), "b.weight": (5,), "c.weight": (2, 2)}
WEIGHTS = [(name, torch.ones(shape)) for name, shape in SHAPES.items()]
TENSOR = SyncOptions(method="tensor", bucket_mb=1e-6)


@pytest.fixture
def double() -> Double:
    return Double()


@pytest.fixture
def engine(double: Double, tmp_path: Path) -> Iterator[SglangEngine]:
    with double.serving() as server, engine_of([server], tmp_path) as engine:
        yield engine


def engine_of(servers: list[Any], scratch: Path, **options: Any) -> SglangEngine:
    model = ServedModel({"vocab_size": 60}, ExpectedTensors(SHAPES), 100)
    return SglangEngine(servers, model, **{"scratch": scratch, "sync": TENSOR, "timeout": 5.0, "version": 0, **options})


def meta(**changes: Any) -> Callable[[str, dict[str, Any]], dict[str, Any] | None]:
    """A fault that changes meta_info of every reply; None takes a field out."""

    def fault(path: str, body: dict[str, Any]) -> dict[str, Any] | None:
        if path != "/generate":
            return None
        right = Double(version="0").reply(body)["meta_info"] | changes
        return {"meta_info": {name: value for name, value in right.items() if value is not None}}

    return fault


def at(path: str, answer: Callable[[], Any]) -> Callable[[str, dict[str, Any]], Any]:
    return lambda called, body: answer() if called == path else None


IDS = [3, 4, 5, 6]
LOGPROBS = [[-1.5, i, None] for i in IDS]


@pytest.mark.parametrize(
    ("fault", "match"),
    [
        (at("/generate", lambda: web.json_response({"error": "out of memory"}, status=500)), "status 500: out of memory"),
        (at("/generate", lambda: web.Response(text="<html>", status=503)), "status 503: <html>"),
        (at("/generate", lambda: web.Response(text='{"output_ids": [1, 2')), "not JSON"),
        (at("/generate", lambda: web.json_response([1])), "lacks output_ids"),
        (at("/generate", lambda: {"output_ids": [9, 9, 9, 9]}), "output_ids and the ids of its 4 log-probs differ"),
        (at("/generate", lambda: {"output_ids": IDS[:2]}), "2 output_ids and the ids of its 4 log-probs differ"),
        (meta(output_token_logprobs=None), "lacks output_ids, finish_reason or output_token_logprobs"),
        (meta(output_token_logprobs=LOGPROBS[:3]), "differ"),
        (meta(output_token_logprobs=[[None, i, None] for i in IDS]), "lacks"),
        (meta(output_token_logprobs=[*LOGPROBS[:2], [-math.inf, 5, None], LOGPROBS[3]]), "position 2 is not finite"),
        (meta(finish_reason=None), "lacks"),
        (meta(finish_reason={"type": "tired"}), "lacks"),
        (meta(finish_reason={"type": "stop", "matched": 6}), "stopped at 6, which is not among the stop ids"),
        (meta(finish_reason={"type": "abort", "message": "x"}), "aborted a reply after 4 tokens"),
        (meta(weight_versions=[{"version": "0", "start": 0, "end": 3}]), "cover 3 of 4"),
        (meta(weight_versions=[{"version": "0", "start": 0, "end": 1}, {"version": "0", "start": 2, "end": 4}]), "gap"),
        (meta(weight_versions=[{"version": "0", "start": 0, "end": 2}, {"version": "1", "start": 2, "end": 4}]), "version 1"),
        (meta(weight_versions=[{"version": "default", "start": 0, "end": 4}]), "tokens of version -1"),
        (meta(weight_versions=[{"start": 0}]), "cannot be read"),
    ],
)  # fmt: skip
def test_an_answer_that_cannot_be_trusted_is_an_error(engine: SglangEngine, double: Double, fault: Any, match: str) -> None:
    ask = [Request([1, 3], [7])]
    assert engine.generate(ask, PARAMS)[0][0].ids == IDS
    double.fault = fault
    with pytest.raises(RolloutError, match=match) as caught:
        engine.generate(ask, PARAMS)
    assert double.url in str(caught.value) or "request 0" in str(caught.value)
    double.fault = None
    assert engine.generate(ask, PARAMS)[0][0].ids == IDS


def test_a_reply_that_is_cut_or_goes_on_is_an_error(engine: SglangEngine, double: Double) -> None:
    double.fault = lambda path, body: (
        Double(version="0").reply({**body, "sampling_params": {"max_new_tokens": 3}}) if path == "/generate" else None
    )
    with pytest.raises(RolloutError, match="cut at 3 of 4 tokens"):
        engine.generate([Request([3], [1])], PARAMS)
    double.fault = None
    with pytest.raises(RolloutError, match="goes on behind the stop id at position 1"):
        engine.generate([Request([3], [1])], SamplingParams(max_new_tokens=4, stop_ids=(4,)))


@pytest.mark.parametrize("how", ["before the answer", "in the answer"])
def test_a_dropped_connection_is_an_error_and_ends_the_others(engine: SglangEngine, double: Double, how: str) -> None:
    class Cut(web.Response):
        async def prepare(self, request: Any) -> Any:
            if how == "in the answer":
                request.transport.write(b'HTTP/1.1 200 OK\r\nContent-Length: 10000\r\n\r\n{"output_ids": [1,')
            request.transport.close()
            return await super().prepare(request)

    double.fault = lambda path, body: Cut() if path == "/generate" and body["input_ids"] == [7] else None
    with pytest.raises(RolloutError, match="broke off at /generate"):
        engine.generate([Request([k], [1]) for k in range(20)], PARAMS)


def test_a_slow_server_is_given_up_after_the_timeout(engine: SglangEngine, double: Double) -> None:
    async def slow() -> None:
        await asyncio.sleep(30)

    double.fault = at("/generate", slow)
    engine.timeout = 0.3
    with pytest.raises(RolloutError, match=r"did not answer /generate within 0.3 s"):
        engine.generate([Request([3], [1])], PARAMS)


def test_no_more_requests_are_under_way_than_allowed(engine: SglangEngine, double: Double) -> None:
    engine.in_flight = 3
    engine.generate([Request([k], [1, 2]) for k in range(10)], PARAMS)
    assert double.busiest == 3


def test_older_servers_give_one_version_to_all_tokens(engine: SglangEngine, double: Double) -> None:
    double.older = True
    engine.update_weights(WEIGHTS, 6)
    assert "/end_weight_update" not in double.paths()
    assert engine.generate([Request([3], [1])], PARAMS)[0][0].versions == [6] * 4

    def change(path: str, body: dict[str, Any]) -> None:
        if path == "/generate":
            double.version = "7"

    double.fault = change
    with pytest.raises(RolloutError, match="went from version 6 to 7 meanwhile"):
        engine.generate([Request([3], [1])], PARAMS)


def test_updates_by_tensor_are_begun_ended_named_and_read_back(engine: SglangEngine, double: Double) -> None:
    double.calls.clear()
    engine.update_weights(WEIGHTS, 3)
    assert double.received() == [["a.weight"], ["b.weight"], ["c.weight"]]
    named, bucket = ["/update_weight_version", "/model_info"], "/update_weights_from_tensor"
    assert double.paths() == [*named, "/begin_weight_update", bucket, bucket, bucket, "/end_weight_update", *named]
    assert [body for path, body in double.calls if path == named[0]] == [
        {"new_version": v, "abort_all_requests": False} for v in ("-1", "3")
    ]


@pytest.mark.parametrize(
    ("path", "answer", "match"),
    [
        ("/update_weights_from_tensor", {"success": False, "message": "no such tensor"}, "no such tensor"),
        ("/update_weights_from_tensor", 500, "status 500"),
        ("/begin_weight_update", 500, "status 500"),
        ("/end_weight_update", 500, "status 500"),
        ("/end_weight_update", {"success": False, "message": "post-load failed"}, "post-load failed"),
        ("/update_weight_version", 500, "status 500"),
        ("/model_info", {"weight_version": "12"}, "have version 12, after it was told"),
    ],
)
def test_every_answer_of_an_update_counts(engine: SglangEngine, double: Double, path: str, answer: Any, match: str) -> None:
    double.fault = at(path, lambda: answer if isinstance(answer, dict) else web.json_response({"message": "no"}, status=answer))
    with pytest.raises(RolloutError, match=match):
        engine.update_weights(WEIGHTS, 3)
    assert engine.version == -1
    double.fault = None
    engine.update_weights(WEIGHTS, 4)
    assert engine.version == 4 and double.version == "4" and not double.open_update


def test_a_failing_update_by_disk_is_an_error(engine: SglangEngine, double: Double, tmp_path: Path) -> None:
    engine.sync = SyncOptions(dir=str(tmp_path / "files"))
    double.fault = at("/update_weights_from_disk", lambda: web.json_response({"success": False, "message": "cannot read"}, status=400))
    with pytest.raises(RolloutError, match="cannot read"):
        engine.update_weights(WEIGHTS, 3)
    assert engine.version == -1 and list((tmp_path / "files").iterdir()) == []


def test_one_of_two_servers_that_fails_spoils_the_update_of_both(tmp_path: Path) -> None:
    one, two = Double(), Double()
    with one.serving() as a, two.serving() as b, engine_of([a, b], tmp_path) as engine:
        two.fault = at("/update_weights_from_tensor", lambda: web.json_response({"message": "disk on fire"}, status=500))
        with pytest.raises(RolloutError, match="disk on fire") as caught:
            engine.update_weights(WEIGHTS, 1)
        assert two.url in str(caught.value) and one.version == two.version == "-1"
        two.fault = None
        engine.update_weights(WEIGHTS, 2)
        assert one.received()[-3:] == two.received()[-3:] and one.version == two.version == "2"


def test_requests_are_shared_out_and_come_back_in_order(tmp_path: Path) -> None:
    one, two = Double(), Double()
    with one.serving() as a, two.serving() as b, engine_of([a, b], tmp_path) as engine:
        groups = engine.generate([Request([k], [5, 6]) for k in range(7)], PARAMS)
        assert [[reply.ids[0] for reply in group] for group in groups] == [[k, k] for k in range(7)]
        asked = [sorted(body["input_ids"][0] for path, body in d.calls if path == "/generate") for d in (one, two)]
        assert asked == [[0, 0, 2, 2, 4, 4, 6, 6], [1, 1, 3, 3, 5, 5]]
        assert sorted(body["sampling_params"]["sampling_seed"] for path, body in one.calls if path == "/generate") == [5] * 4 + [6] * 4


def test_every_tp_rank_gets_a_payload_of_its_own(tmp_path: Path) -> None:
    double = Double(tp=3)
    with double.serving() as server:
        server.wait_until_ready()
        with engine_of([server], tmp_path) as engine:
            engine.update_weights(WEIGHTS, 1)
    sent = [body["serialized_named_tensors"] for path, body in double.calls if path == "/update_weights_from_tensor"]
    assert [len(payloads) for payloads in sent] == [3, 3, 3]


def test_nobody_listens_there(tmp_path: Path) -> None:
    with Double().serving() as server:
        pass
    with pytest.raises(RolloutError, match=rf"SGLang server {server.url} broke off at /update_weight_version"):
        engine_of([server], tmp_path)


def test_a_closed_engine_says_so(engine: SglangEngine) -> None:
    engine.close()
    engine.close()
    assert engine.version == -1
    for call in (lambda: engine.generate([], PARAMS), lambda: engine.update_weights(WEIGHTS, 1)):
        with pytest.raises(RolloutError, match="is closed"):
            call()
