"""New weights on a real server: what it says afterwards against Transformers with the same weights."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from rlmca.config.sglang import SyncOptions
from rlmca.rollout.base import Request, RolloutError, SamplingParams
from rlmca.rollout.sglang.client import open_clients, together
from rlmca.rollout.sglang.engine import SglangEngine
from rlmca.rollout.sglang.weights import SHARED_MEMORY
from tests.helpers.models import make_model
from tests.rollout.sglang.conftest import named_weights
from tests.rollout.sglang.oracle import logp_gap

pytestmark = pytest.mark.serial
PARAMS = SamplingParams(max_new_tokens=12)
DISK, TENSOR = SyncOptions(), SyncOptions(method="tensor")


@pytest.fixture(scope="module")
def new_model() -> PreTrainedModel:
    return make_model("qwen3_tied", seed=5)


def sample(engine: SglangEngine) -> list[tuple[list[int], object]]:
    prompts = [[3], [9, 8, 7, 6], [40] * 9]
    return [
        (ids, reply)
        for ids, group in zip(prompts, engine.generate([Request(p, [1, 2]) for p in prompts], PARAMS), strict=True)
        for reply in group
    ]


@pytest.mark.parametrize(
    "sync",
    [DISK, TENSOR, SyncOptions(method="tensor", bucket_mb=0.02), SyncOptions(method="tensor", bucket_mb=1e-6)],
    ids=["disk", "one bucket", "small buckets", "buckets smaller than a tensor"],
)
def test_replies_come_from_the_new_weights(
    engine: SglangEngine, start_model: PreTrainedModel, new_model: PreTrainedModel, sync: SyncOptions
) -> None:
    assert all(logp_gap(start_model, ids, reply) < 1e-5 for ids, reply in sample(engine))
    engine.sync = sync
    engine.update_weights(named_weights(new_model), 7)
    assert engine.version == 7
    for ids, reply in sample(engine):
        assert logp_gap(new_model, ids, reply) < 1e-5 < logp_gap(start_model, ids, reply)
        assert reply.versions == [7] * len(reply.ids)
    assert not list(SHARED_MEMORY.glob("*rlmca-weights-*"))


@pytest.mark.parametrize("sync", [DISK, TENSOR], ids=["disk", "tensor"])
def test_a_stream_may_be_bfloat16_or_views_of_one_reused_buffer(
    engine: SglangEngine, new_model: PreTrainedModel, sync: SyncOptions
) -> None:
    engine.sync = sync
    rounded = make_model("qwen3_tied", seed=5)
    with torch.no_grad():
        for parameter in rounded.parameters():
            parameter.copy_(parameter.bfloat16())

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        buffer = torch.empty(10**5, dtype=torch.bfloat16)
        for name, value in named_weights(rounded):
            view = buffer[3 : 3 + value.numel()].view(value.shape)
            view.copy_(value)
            yield name, view

    engine.update_weights(stream(), 3)
    assert all(logp_gap(rounded, ids, reply) < 1e-5 for ids, reply in sample(engine))


def test_a_tied_head_may_come_too(engine: SglangEngine, new_model: PreTrainedModel) -> None:
    engine.update_weights([*named_weights(new_model), ("lm_head.weight", new_model.lm_head.weight.detach())], 4)
    assert all(logp_gap(new_model, ids, reply) < 1e-5 for ids, reply in sample(engine))


def faulty(kind: str, good: list[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    name, value = good[3]
    return {
        "missing": good[:3] + good[4:],
        "twice": good + [good[3]],
        "unknown": [(name + "x" if n == name else n, v) for n, v in good],
        "misshapen": [(n, v[..., :-1] if n == name else v) for n, v in good],
        "empty": [],
    }[kind]


@pytest.mark.parametrize("sync", [DISK, SyncOptions(method="tensor", bucket_mb=0.02)], ids=["disk", "tensor"])
@pytest.mark.parametrize(
    ("kind", "match"),
    [
        ("missing", "nothing came for"),
        ("twice", "came twice"),
        ("unknown", "is not a tensor of the model"),
        ("misshapen", "has shape"),
        ("empty", "nothing came"),
    ],
)
def test_a_faulty_stream_is_an_error_and_nothing_is_generated_until_it_is_repaired(
    engine: SglangEngine, new_model: PreTrainedModel, sync: SyncOptions, kind: str, match: str
) -> None:
    engine.sync = sync
    with pytest.raises(RolloutError, match=match):
        engine.update_weights(faulty(kind, named_weights(new_model)), 5)
    assert engine.version == -1
    with pytest.raises(RolloutError, match="update_weights"):
        engine.generate([Request([3], [1])], PARAMS)
    engine.update_weights(named_weights(new_model), 6)
    assert all(logp_gap(new_model, ids, reply) < 1e-5 for ids, reply in sample(engine))


@pytest.mark.parametrize("sync", [DISK, SyncOptions(method="tensor", bucket_mb=0.02)], ids=["disk", "tensor"])
def test_a_trainer_that_fails_in_the_middle_leaves_no_open_update(
    engine: SglangEngine, new_model: PreTrainedModel, sync: SyncOptions
) -> None:
    engine.sync = sync

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        yield from named_weights(new_model)[:9]
        raise ArithmeticError("the trainer's own trouble")

    with pytest.raises(ArithmeticError, match="own trouble"):
        engine.update_weights(stream(), 5)
    assert engine.version == -1 and not list(SHARED_MEMORY.glob("*rlmca-weights-*"))
    engine.sync = TENSOR
    engine.update_weights(named_weights(new_model), 6)
    assert engine.version == 6


def test_an_update_that_a_killed_client_left_open_is_ended(engine: SglangEngine, new_model: PreTrainedModel) -> None:
    async def leave_open() -> None:
        async with open_clients(engine.servers, 60) as (client,):
            await client.post("/begin_weight_update", {})

    asyncio.run(leave_open())
    engine.sync = TENSOR
    engine.update_weights(named_weights(new_model), 8)
    assert all(logp_gap(new_model, ids, reply) < 1e-5 for ids, reply in sample(engine))


def test_known_fault_r3_a_new_version_aborts_no_request(engine: SglangEngine) -> None:
    """The endpoint's own default would abort everything that runs."""

    async def bump() -> list[object]:
        async with open_clients(engine.servers, 60) as (client,):
            running = asyncio.ensure_future(together(client.generate([3, 4], k, SamplingParams(max_new_tokens=100)) for k in range(10)))
            await asyncio.sleep(0.3)
            assert not running.done()
            await client.set_version(1)
            return await running

    replies = asyncio.run(bump())
    assert [(r.finish, len(r.ids)) for r in replies] == [("length", 100)] * 10
    assert {v for r in replies for v in r.versions} == {0, 1}, "the change fell into no reply"
    assert all(r.versions == sorted(r.versions) for r in replies)


def test_replies_of_other_weights_than_the_engines_are_refused(engine: SglangEngine) -> None:
    async def someone_else() -> None:
        async with open_clients(engine.servers, 60) as (client,):
            await client.set_version(41)

    asyncio.run(someone_else())
    with pytest.raises(RolloutError, match="tokens of version 41, and the weights are version 0"):
        engine.generate([Request([3], [1])], PARAMS)
    engine.update_weights(named_weights(make_model("qwen3_tied")), 0)


def test_another_key_is_refused_and_the_log_is_private(engine: SglangEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    server = engine.servers[0]
    key = server.api_key
    assert key and oct(os.stat(server.options.log).st_mode)[-3:] == "600"
    assert key not in " ".join(Path(f"/proc/{server.process.pid}/cmdline").read_text().split("\0"))
    assert key not in server.log_tail(10**6)
    monkeypatch.setattr(server, "api_key", "wrong")
    with pytest.raises(RolloutError, match="status 401.*api_key"):
        engine.generate([Request([3], [1])], PARAMS)
