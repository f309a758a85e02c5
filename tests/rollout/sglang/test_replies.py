"""Replies of a real server against Transformers and the local engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from rlmca.rollout.base import Request, RolloutError, SamplingParams
from rlmca.rollout.local import LocalEngine
from rlmca.rollout.seeds import reply_seed
from rlmca.rollout.sglang.engine import SglangEngine
from tests.rollout.sglang.oracle import distributions, logp_gap

pytestmark = pytest.mark.serial
VOCAB, END = 67, 2


def prompts(count: int, longest: int = 12) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    lengths = torch.randint(1, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in lengths]


@pytest.mark.parametrize("stop_ids", [(), (END,), (END, 9, 33, 5, 40)], ids=["none", "end", "several"])
def test_greedy_replies_are_those_of_the_local_engine(engine: SglangEngine, model_folder: Path, stop_ids: tuple[int, ...]) -> None:
    params = SamplingParams(temperature=0, max_new_tokens=24, stop_ids=stop_ids)
    requests = [Request(ids, [k]) for k, ids in enumerate(prompts(12))]
    want, got = LocalEngine(model_folder).generate(requests, params), engine.generate(requests, params)
    assert [[reply.ids for reply in group] for group in got] == [[reply.ids for reply in group] for group in want]
    for (a,), (b,) in zip(got, want, strict=True):
        assert a.finish == b.finish and a.versions == b.versions == [0] * len(a.ids)
        assert torch.tensor(a.logp).sub(torch.tensor(b.logp)).abs().max() < 1e-5


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), [(1.0, -1, 1.0), (0.7, -1, 1.0), (0.7, 5, 1.0), (1.0, -1, 0.6), (1.3, 8, 0.9)])
def test_log_probs_are_at_the_temperature_and_before_the_filters(
    engine: SglangEngine, start_model: PreTrainedModel, temperature: float, top_k: int, top_p: float
) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, max_new_tokens=20, stop_ids=(END,))
    asked = prompts(6)
    requests = [Request(ids, [reply_seed(1, 2, i, k) for k in range(3)]) for i, ids in enumerate(asked)]
    drawn = 0
    for ids, group in zip(asked, engine.generate(requests, params), strict=True):
        for reply in group:
            assert logp_gap(start_model, ids, reply, temperature) < 1e-5
            logp_TV = distributions(start_model, ids, reply.ids, temperature)
            rank_T = (logp_TV > torch.tensor(reply.logp)[:, None] + 1e-5).sum(-1)
            likelier_T = torch.where(logp_TV > torch.tensor(reply.logp)[:, None] + 1e-5, logp_TV.exp(), 0.0).sum(-1)
            assert top_k < 0 or int(rank_T.max()) < top_k
            assert float(likelier_T.max()) <= top_p + 1e-5
            drawn += int((rank_T > 0).sum())
    assert drawn, "nothing but the likeliest token came"


def test_a_reply_follows_from_its_seed_whatever_is_beside_it(engine: SglangEngine) -> None:
    params = SamplingParams(max_new_tokens=16)
    asked = prompts(8)
    seeds = [[reply_seed(3, 1, i, k) for k in range(4)] for i in range(8)]
    together = engine.generate([Request(ids, s) for ids, s in zip(asked, seeds, strict=True)], params)
    alone = engine.generate([Request(asked[5], seeds[5][2:3])], params)
    assert alone[0][0].ids == together[5][2].ids
    engine.in_flight = 3
    again = engine.generate([Request(asked[6], seeds[6]), Request(asked[1], seeds[1])], params)
    assert [r.ids for r in again[0]] == [r.ids for r in together[6]] and [r.ids for r in again[1]] == [r.ids for r in together[1]]
    assert len({tuple(r.ids) for r in together[5]}) == 4


def test_replies_end_at_the_stop_ids_and_nowhere_else(engine: SglangEngine, model_folder: Path) -> None:
    """The model's own end token (config and generation_config say 2) is an ordinary token unless the request says so."""
    assert f'"eos_token_id": {END}' in (model_folder / "generation_config.json").read_text()
    seeds = [reply_seed(0, 0, 0, k) for k in range(12)]
    free = engine.generate([Request([3, 4, 5], seeds)], SamplingParams(max_new_tokens=100))[0]
    assert {(len(r.ids), r.finish) for r in free} == {(100, "length")}
    assert any(END in r.ids[:-1] for r in free)
    ended = engine.generate([Request([3, 4, 5], seeds)], SamplingParams(max_new_tokens=100, stop_ids=(END, 17)))[0]
    for whole, reply in zip(free, ended, strict=True):
        at = next((t for t, token in enumerate(whole.ids) if token in (END, 17)), None)
        assert reply.ids == (whole.ids if at is None else whole.ids[: at + 1])
        assert reply.finish == ("length" if at is None else "stop")
    assert any(r.finish == "stop" for r in ended)


def test_the_whole_context_may_be_used(engine: SglangEngine, start_model: PreTrainedModel) -> None:
    prompt = [3 + i % 50 for i in range(60)]
    ((reply,), (short,)) = engine.generate([Request(prompt, [5]), Request(prompt[:1], [5])], SamplingParams(max_new_tokens=68))
    assert len(reply.ids) == len(short.ids) == 68 and logp_gap(start_model, prompt, reply) < 1e-5
    ((one,),) = engine.generate([Request([3] * 127, [5])], SamplingParams(max_new_tokens=1))
    assert len(one.ids) == 1


@pytest.mark.parametrize(
    ("prompt", "max_new", "match"),
    [([], 4, "empty prompt"), ([1] * 120, 9, "exceed the servers' context_length 128"), ([VOCAB], 4, "outside"), ([-1], 4, "outside")],
)
def test_requests_that_cannot_be_served_are_named(engine: SglangEngine, prompt: list[int], max_new: int, match: str) -> None:
    with pytest.raises(RolloutError, match=match):
        engine.generate([Request([3], [0]), Request(prompt, [0])], SamplingParams(max_new_tokens=max_new))


def test_requests_without_seeds_and_no_requests(engine: SglangEngine) -> None:
    assert engine.generate([], SamplingParams()) == []
    got = engine.generate([Request([3], []), Request([4, 5], [1])], SamplingParams(max_new_tokens=2))
    assert [len(group) for group in got] == [0, 1]


def test_many_more_replies_than_may_be_in_flight_come_in_order(engine: SglangEngine, start_model: PreTrainedModel) -> None:
    engine.in_flight = 16
    asked = prompts(50)
    groups = engine.generate(
        [Request(ids, [reply_seed(9, 9, i, k) for k in range(2)]) for i, ids in enumerate(asked)], SamplingParams(max_new_tokens=3)
    )
    assert all(logp_gap(start_model, ids, reply) < 1e-5 for ids, group in zip(asked, groups, strict=True) for reply in group)


def test_known_fault_j3_proxy_variables_do_not_matter(
    engine: SglangEngine, start_model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cluster's proxy does not know our servers (fault J3)."""
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    assert len(engine.generate([Request([3], [1])], SamplingParams(max_new_tokens=2))[0][0].ids) == 2
    engine.servers[0].wait_until_ready()
