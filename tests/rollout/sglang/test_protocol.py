"""The double speaks as the real server does: its routes, methods and fields are in the server's own OpenAPI schema."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from rlmca.config.sglang import SyncOptions
from rlmca.rollout.base import Request, SamplingParams
from rlmca.rollout.sglang.client import open_clients
from rlmca.rollout.sglang.engine import SglangEngine
from rlmca.rollout.sglang.reply import generate_request
from tests.rollout.sglang.double import Double
from tests.rollout.sglang.test_faults import WEIGHTS, engine_of

pytestmark = pytest.mark.serial


@pytest.fixture
def schema(engine: SglangEngine) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(engine.servers[0].get("/openapi.json"))
    return found


def properties(schema: dict[str, Any], path: str) -> set[str]:
    body = schema["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    return fields(schema, body)


def fields(schema: dict[str, Any], part: dict[str, Any]) -> set[str]:
    if "$ref" in part:
        part = schema["components"]["schemas"][part["$ref"].rsplit("/", 1)[1]]
    found = set(part.get("properties", {}))
    for choice in (*part.get("anyOf", ()), *part.get("allOf", ())):
        found |= fields(schema, choice)
    return found


def calls_of_a_whole_run(scratch: Path) -> list[tuple[str, dict[str, Any]]]:
    double = Double()
    with double.serving() as server:
        server.wait_until_ready()
        with engine_of([server], scratch) as engine:
            engine.update_weights(WEIGHTS, 1)
            engine.generate([Request([3], [1])], SamplingParams(max_new_tokens=2, stop_ids=(9,)))
            engine.sync = SyncOptions(dir=str(scratch))
            engine.update_weights(WEIGHTS, 2)
    return double.calls


def test_every_route_and_every_field_that_is_sent_exists(schema: dict[str, Any], tmp_path: Path) -> None:
    calls = calls_of_a_whole_run(tmp_path)
    assert {path for path, _ in calls} >= {"/generate", "/update_weights_from_disk", "/update_weights_from_tensor", "/begin_weight_update"}
    for path, body in calls:
        assert path in schema["paths"], f"the server has no {path}"
        assert ("post" if body or "weight" in path else "get") in schema["paths"][path]
        if body:
            unknown = set(body) - properties(schema, path)
            assert not unknown, f"{path} takes no {sorted(unknown)}"


def test_the_double_answers_as_the_server_does(engine: SglangEngine, tmp_path: Path) -> None:
    """Every field of the double's answers that the client reads is in the real answers, with the same type."""
    body = generate_request([3, 4], 7, SamplingParams(max_new_tokens=3))

    async def ask() -> tuple[Any, Any, Any, Any]:
        async with open_clients(engine.servers, 60) as (client,):
            return (
                await client.post("/generate", body),
                await client.ask("POST", "/end_weight_update", {}),
                await client.ask("GET", "/model_info"),
                await client.ask("GET", "/server_info"),
            )

    real, (status, refused), (_, info), (_, server_info) = asyncio.run(ask())
    double = Double(version="0")
    assert shape(double.reply(body), real)
    assert (status, refused["success"]) == double.answer("/end_weight_update", {})[:1] + (False,)
    assert shape({"model_path": "", "weight_version": ""}, info) and shape({"tp_size": 1}, server_info)


def shape(small: Any, large: Any) -> bool:
    """`large` has everything that `small` has, of the same types."""
    if isinstance(small, dict):
        return isinstance(large, dict) and all(name in large and shape(value, large[name]) for name, value in small.items())
    if isinstance(small, list):
        return isinstance(large, list) and len(large) == len(small) and all(shape(a, b) for a, b in zip(small, large, strict=True))
    return type(small) is type(large)


def test_the_older_names_of_routes_are_still_there(schema: dict[str, Any]) -> None:
    """Older servers have only these; a client that falls back to them can be tried here."""
    assert set(schema["paths"]) >= {"/get_model_info", "/get_server_info"}
