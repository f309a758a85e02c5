"""The local engine against Transformers' own generation and a full forward."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from rlmca.rollout.base import Reply, Request, RolloutError, SamplingParams
from rlmca.rollout.local import LocalEngine
from rlmca.rollout.seeds import reply_seed
from tests.rollout import tiny

FAMILIES = ("qwen3", "qwen2", "llama")


def engine_of(model: PreTrainedModel, rollout_batch: int | None = None, pad_id: int = 5) -> LocalEngine:
    engine = LocalEngine(model.config, pad_id=pad_id, rollout_batch=rollout_batch)
    engine.update_weights(tiny.weights(model), version=7)
    return engine


def requests(count: int, n: int, step: int = 0) -> list[Request]:
    return [Request(ids, [reply_seed(3, step, p, k) for k in range(n)]) for p, ids in enumerate(tiny.prompts(count))]


def reference_logp(model: PreTrainedModel, prompt: list[int], reply: list[int], temperature: float) -> torch.Tensor:
    """One unpadded row through the whole model, no cache."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *reply]]), use_cache=False).logits[0].double() / temperature
    return torch.log_softmax(logits, -1)[len(prompt) - 1 : -1].gather(1, torch.tensor(reply)[:, None])[:, 0]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_ids_are_those_of_transformers_generate(family: str) -> None:
    model = tiny.oracle(tiny.config(family))
    wanted = requests(24, 1)
    got = engine_of(model).generate(wanted, SamplingParams(temperature=0, max_new_tokens=12, stop_ids=(5,)))
    stopped = 0
    for request, (reply,) in zip(wanted, got, strict=True):
        ids = torch.tensor([request.prompt_ids])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12, eos_token_id=5, pad_token_id=5)
        assert reply.ids == out[0, ids.shape[1] :].tolist()
        assert (reply.finish == "stop") == (reply.ids[-1] == 5)
        assert reply.versions == [7] * len(reply.ids)
        stopped += reply.finish == "stop"
    assert len({tuple(reply.ids) for (reply,) in got}) > 12  # the models do say different things


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("temperature", (1.0, 0.6))
def test_logp_equal_a_full_forward_of_the_sampled_ids(family: str, temperature: float) -> None:
    model = tiny.oracle(tiny.config(family))
    wanted = requests(10, 3)
    params = SamplingParams(temperature=temperature, top_p=0.9, top_k=40, max_new_tokens=8, stop_ids=(5, 9, 11))
    for request, group in zip(wanted, engine_of(model).generate(wanted, params), strict=True):
        for reply in group:
            want = reference_logp(model, list(request.prompt_ids), reply.ids, temperature)
            assert torch.tensor(reply.logp).sub(want).abs().max() < 1e-5


SOME_LAYERS = {
    "use_sliding_window": True,
    "sliding_window": 4,
    "max_window_layers": 1,
    "layer_types": ["full_attention", "sliding_attention"],
}


@pytest.mark.parametrize(("family", "changes"), [("qwen2", SOME_LAYERS), ("mistral", {"sliding_window": 4})])
def test_sliding_window_layers_attend_as_transformers_does(family: str, changes: dict[str, object]) -> None:
    model = tiny.oracle(tiny.config(family, **changes))
    wanted = requests(6, 2)
    for request, group in zip(wanted, engine_of(model).generate(wanted, SamplingParams(max_new_tokens=10)), strict=True):
        for reply in group:
            assert torch.tensor(reply.logp).sub(reference_logp(model, list(request.prompt_ids), reply.ids, 1.0)).abs().max() < 1e-5


def test_replies_do_not_depend_on_batching_or_order() -> None:
    model = tiny.oracle(tiny.config("qwen3"))
    wanted = requests(40, 4)
    params = SamplingParams(max_new_tokens=9, stop_ids=(5, 17))
    want = [[reply.ids for reply in group] for group in engine_of(model).generate(wanted, params)]
    for limit in (1, 3, 7, 64):
        assert [[reply.ids for reply in group] for group in engine_of(model, limit).generate(wanted, params)] == want
    backwards = engine_of(model, 10).generate(wanted[::-1], params)
    assert [[reply.ids for reply in group] for group in backwards[::-1]] == want
    one = engine_of(model).generate([Request(wanted[5].prompt_ids, wanted[5].seeds[2:3])], params)
    assert one[0][0].ids == want[5][2]


def test_two_runs_agree_bit_for_bit_and_steps_differ() -> None:
    model = tiny.oracle(tiny.config("qwen3"))
    params = SamplingParams(max_new_tokens=9, stop_ids=(5,))
    first, again = (engine_of(model).generate(requests(12, 4), params) for _ in range(2))
    assert first == again
    assert engine_of(model).generate(requests(12, 4, step=1), params) != first


def test_replies_of_a_group_differ_and_carry_no_generator_state() -> None:
    model = tiny.oracle(tiny.config("qwen3"))
    torch.manual_seed(0)
    before = torch.get_rng_state()
    engine = engine_of(model)
    groups = engine.generate(requests(6, 8), SamplingParams(max_new_tokens=9))
    assert all(len({tuple(reply.ids) for reply in group}) > 4 for group in groups)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("pad_id", (0, 5))
def test_pad_id_may_be_the_stop_token_or_a_token_of_the_prompt(pad_id: int) -> None:
    """Padding is by length: whatever id fills the places, the ids and log-probs are those of the unpadded rows."""
    model = tiny.oracle(tiny.config("llama"))
    wanted = [Request([5, 0, 3], [1, 2]), Request([0], [3, 4]), Request([5, 5, 0, 0, 9, 5], [5, 6]), Request([8, 0], [7, 8])]
    for request, group in zip(
        wanted, engine_of(model, pad_id=pad_id).generate(wanted, SamplingParams(max_new_tokens=6, stop_ids=(5,))), strict=True
    ):
        for reply in group:
            assert torch.tensor(reply.logp).sub(reference_logp(model, list(request.prompt_ids), reply.ids, 1.0)).abs().max() < 1e-5
            assert 5 not in reply.ids[:-1]


def test_any_stop_id_ends_a_reply_and_is_its_last_token() -> None:
    model = tiny.oracle(tiny.config("qwen3"))
    wanted = requests(20, 4)
    free = engine_of(model).generate(wanted, SamplingParams(max_new_tokens=10))
    stops = (5, 17, 40, 41, 42, 43, 44, 45)
    got = engine_of(model).generate(wanted, SamplingParams(max_new_tokens=10, stop_ids=stops))

    def cut(reply: Reply) -> tuple[list[int], str]:
        at = [t for t, token in enumerate(reply.ids) if token in stops]
        return (reply.ids[: at[0] + 1], "stop") if at else (reply.ids, "length")

    assert [[(r.ids, r.finish) for r in group] for group in got] == [[cut(r) for r in group] for group in free]
    finishes = [r.finish for group in got for r in group]
    assert "stop" in finishes and "length" in finishes
    assert all(len(r.logp) == len(r.ids) == len(r.versions) for group in got for r in group)


def test_new_weights_take_effect_and_a_tied_head_follows() -> None:
    one, two = tiny.oracle(tiny.config("qwen3"), 0), tiny.oracle(tiny.config("qwen3"), 1)
    engine = engine_of(one)
    engine.update_weights(tiny.weights(two), version=8)
    got = engine.generate(requests(5, 2), SamplingParams(max_new_tokens=5))
    assert got == [
        [Reply(r.ids, r.logp, [8] * len(r.ids), r.finish) for r in g]
        for g in engine_of(two).generate(requests(5, 2), SamplingParams(max_new_tokens=5))
    ]
    assert engine.module.lm_head.weight.data_ptr() == engine.module.model.embed_tokens.weight.data_ptr()


def test_from_a_folder_without_a_stream(tmp_path: object) -> None:
    model = tiny.oracle(tiny.config("qwen2"))
    model.save_pretrained(str(tmp_path))
    engine = LocalEngine(str(tmp_path), pad_id=5)
    assert engine.version == 0
    params = SamplingParams(temperature=0, max_new_tokens=5)
    assert [r.ids for g in engine.generate(requests(4, 1), params) for r in g] == [
        r.ids for g in engine_of(model).generate(requests(4, 1), params) for r in g
    ]


def test_without_weights_or_after_half_an_update_nothing_is_generated() -> None:
    model = tiny.oracle(tiny.config("qwen3"))
    engine = LocalEngine(model.config, pad_id=5)
    with pytest.raises(RolloutError, match="update_weights"):
        engine.generate(requests(1, 1), SamplingParams())
    engine.update_weights(tiny.weights(model), 1)
    with pytest.raises(ValueError):
        engine.update_weights(tiny.weights(model)[:-1], 2)
    assert engine.version == -1
    with pytest.raises(RolloutError, match="update_weights"):
        engine.generate(requests(1, 1), SamplingParams(max_new_tokens=4))


def test_weights_that_are_not_finite_are_reported() -> None:
    model = tiny.oracle(tiny.config("qwen3"))
    engine = engine_of(model)
    engine.update_weights([(n, torch.full_like(w, torch.nan) if n == "model.norm.weight" else w) for n, w in tiny.weights(model)], 9)
    with pytest.raises(RolloutError, match="not finite with the weights of version 9"):
        engine.generate(requests(1, 1), SamplingParams(max_new_tokens=4))


@pytest.mark.parametrize(
    ("prompt", "max_new", "match"),
    [([], 4, "empty prompt"), ([1] * 120, 9, "max_position_embeddings 128"), ([97], 4, "outside"), ([-1], 4, "outside")],
)
def test_requests_that_cannot_be_served_are_named(prompt: list[int], max_new: int, match: str) -> None:
    engine = engine_of(tiny.oracle(tiny.config("qwen3")))
    with pytest.raises(RolloutError, match=match):
        engine.generate([Request([3], [0]), Request(prompt, [0])], SamplingParams(max_new_tokens=max_new))


def test_requests_without_seeds_and_no_requests() -> None:
    engine = engine_of(tiny.oracle(tiny.config("qwen3")))
    assert engine.generate([], SamplingParams()) == []
    got = engine.generate([Request([3], []), Request([4, 5], [1])], SamplingParams(max_new_tokens=2))
    assert [len(group) for group in got] == [0, 1]
