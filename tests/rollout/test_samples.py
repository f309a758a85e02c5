"""From prompts to samples: order, seeds, texts, stop texts."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from rlmca.rollout.base import Reply, SamplingParams
from rlmca.rollout.decode import decode_replies
from rlmca.rollout.local import LocalEngine
from rlmca.rollout.samples import sample_replies, stop_text_ids
from tests.helpers.tokenizers import tiny_tokenizer
from tests.rollout import tiny


@dataclass
class Prompt:
    ids: list[int]
    row: dict = field(default_factory=dict)


@pytest.fixture(scope="module")
def engine() -> LocalEngine:
    model = tiny.oracle(tiny.config("qwen3", vocab_size=len(tiny_tokenizer()), eos_token_id=2))
    engine = LocalEngine(model.config, pad_id=0)
    engine.update_weights(tiny.weights(model), 4)
    return engine


def test_samples_come_group_by_group_with_the_text_of_their_own_ids(engine: LocalEngine) -> None:
    tokenizer, params = tiny_tokenizer(), SamplingParams(max_new_tokens=6, stop_ids=(2, 9, 30, 31, 32, 33))
    prompts = [Prompt(ids, {"answer": str(p)}) for p, ids in enumerate(tiny.prompts(5))]
    samples = sample_replies(engine, prompts, tokenizer, params, n=3, seed=1, step=2)
    assert [(s.group, s.k, s.row["answer"], s.prompt_ids) for s in samples] == [
        (p, k, str(p), prompts[p].ids) for p in range(5) for k in range(3)
    ]
    for s in samples:
        assert s.reply == tokenizer.decode(s.reply_ids[:-1] if s.finish == "stop" else s.reply_ids)
        assert s.versions == [4] * len(s.reply_ids) and s.reward is None
    assert {s.finish for s in samples} == {"stop", "length"}


def test_a_prompt_keeps_its_replies_wherever_it_stands(engine: LocalEngine) -> None:
    tokenizer, params = tiny_tokenizer(), SamplingParams(max_new_tokens=6)
    prompts = [Prompt(ids) for ids in tiny.prompts(6)]
    whole = sample_replies(engine, prompts, tokenizer, params, n=2, seed=1, step=2)
    part = sample_replies(engine, [prompts[4], prompts[1]], tokenizer, params, n=2, seed=1, step=2, index=[4, 1])
    assert [s.reply_ids for s in part] == [s.reply_ids for s in whole[8:10] + whole[2:4]]
    again = sample_replies(engine, prompts, tokenizer, params, n=2, seed=1, step=3)
    assert [s.reply_ids for s in again] != [s.reply_ids for s in whole]


def test_texts_lose_the_stop_token_and_nothing_else() -> None:
    tokenizer = tiny_tokenizer()
    body = tokenizer.encode(" 3 + 4\n", add_special_tokens=False)
    start, end = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])

    def reply(ids: list[int], finish: str) -> Reply:
        return Reply(ids, [0.0] * len(ids), [0] * len(ids), finish)  # type: ignore[arg-type]

    replies = [
        reply([*body, end], "stop"),
        reply(body, "length"),
        reply([end], "stop"),
        reply([start, *body, end], "stop"),
        reply([*body, end], "stop"),
    ]
    assert decode_replies(tokenizer, replies) == [" 3 + 4\n", " 3 + 4\n", "", "<|im_start|> 3 + 4\n", " 3 + 4\n"]
    assert decode_replies(tokenizer, []) == []


def test_stop_texts_must_be_one_token() -> None:
    tokenizer = tiny_tokenizer()
    assert stop_text_ids(tokenizer, ["<|endoftext|>", "<|im_start|>"]) == (0, 1)
    several = len(tokenizer.encode("3 + 4", add_special_tokens=False))
    with pytest.raises(ValueError, match=rf"'3 \+ 4' is {several} tokens"):
        stop_text_ids(tokenizer, ["<|im_start|>", "3 + 4"])


def test_the_engine_is_the_same_under_the_cpu_platform_of_training() -> None:
    """The training side replaces torch constructors on a CPU; a model built afterwards must not notice (rotary buffers!)."""
    import rlmca.parallel.megatron  # noqa: F401  installs the platform

    model = tiny.oracle(tiny.config("llama"))
    engine = LocalEngine(model.config, pad_id=0)
    engine.update_weights(tiny.weights(model), 1)
    ids = torch.tensor([[3, 4, 5, 6]])
    with torch.no_grad():
        assert torch.allclose(engine.module(ids).logits, model(ids).logits, atol=1e-5)


@pytest.mark.parametrize(("dtype", "accuracy"), [(torch.bfloat16, 0.1), (torch.float16, 0.02)], ids=str)
def test_half_precision_weights_report_float32_log_probs(dtype: torch.dtype, accuracy: float) -> None:
    from rlmca.rollout.base import Request

    model = tiny.oracle(tiny.config("qwen2"))
    engine = LocalEngine(model.config, pad_id=0, dtype=dtype)
    engine.update_weights(tiny.weights(model), 1)
    assert {param.dtype for param in engine.module.parameters()} == {dtype}
    ((reply,),) = engine.generate([Request([3, 4], [1])], SamplingParams(max_new_tokens=4))
    with torch.no_grad():
        logits = engine.module(torch.tensor([[3, 4, *reply.ids]])).logits[0].float()
    want = torch.log_softmax(logits, -1)[1:-1].gather(1, torch.tensor(reply.ids)[:, None])[:, 0]
    assert torch.tensor(reply.logp).sub(want).abs().max() < accuracy  # the two paths round in different places
