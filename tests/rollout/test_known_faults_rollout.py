"""Faults that users of comparable systems reported, as tests of this room (J3 and R3 are in sglang/)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tokenizers import Tokenizer, decoders, models
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from rlmca.rollout.base import Reply, Request, SamplingParams
from rlmca.rollout.samples import sample_replies
from rlmca.rollout.sglang.reply import generate_request, read_reply
from rlmca.types import Sample, batch_of_samples

HE, LLO, HELLO, END = 0, 1, 2, 3


def tokenizer() -> PreTrainedTokenizerFast:
    """`he` and `llo` together are also one token, which encoding prefers."""
    bpe = models.BPE(vocab={"he": 0, "llo": 1, "hello": 2, "<e>": 3, "h": 4, "e": 5, "l": 6, "o": 7, "lo": 8},
                     merges=[("h", "e"), ("l", "o"), ("l", "lo"), ("he", "llo")])  # fmt: skip
    made = Tokenizer(bpe)
    made.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<e>")


class Samples:
    """An engine whose sampler drew [he, llo], end."""

    version = 3
    form = None

    def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[list[Reply]]:
        return [[Reply([HE, LLO, END], [-0.5, -0.25, -0.125], [3, 3, 3], "stop") for _ in r.seeds] for r in requests]

    def update_weights(self, stream: Iterable[tuple[str, Tensor]], version: int) -> None: ...

    def close(self) -> None: ...


@dataclass
class Prompt:
    ids: list[int]
    row: dict = field(default_factory=dict)


def sampled() -> list[Sample]:
    return sample_replies(Samples(), [Prompt([HELLO])], tokenizer(), SamplingParams(stop_ids=(END,)), n=2, seed=0, step=0)


def test_f2_the_vocabulary_has_two_spellings_of_the_text() -> None:
    assert tokenizer().encode("hello") == [HELLO] and tokenizer().decode([HE, LLO]) == "hello"


def test_f2_trained_ids_are_the_sampled_ids() -> None:
    for sample in sampled():
        assert sample.reply == "hello" and sample.reply_ids == [HE, LLO, END], "the text was tokenised again"
        assert len(sample.reply_ids) == len(sample.reply_logp) == len(sample.versions)
    batch = batch_of_samples(sampled())
    assert batch.ids_BT.tolist() == [[HELLO, HE, LLO, END]] * 2
    assert batch.mask_BT.sum(-1).tolist() == [3, 3] and batch.rollout_logp_BT[0, 1:].tolist() == [-0.5, -0.25, -0.125]


def test_f2_the_prompt_of_the_next_turn_goes_on_from_the_sampled_ids() -> None:
    """Prompt, reply and a tool's tokens are one list of ids on their way to the next request."""
    (first, _), tool = sampled(), [HELLO, END]
    turn_2 = [*first.prompt_ids, *first.reply_ids, *tool]
    assert generate_request(turn_2, 1, SamplingParams())["input_ids"] == [HELLO, HE, LLO, END, HELLO, END]


def test_f2_what_a_server_answers_in_ids_is_not_read_from_its_text() -> None:
    params = SamplingParams(max_new_tokens=9, stop_ids=(END,))
    asked = generate_request([HELLO, HE, LLO], 1, params)
    assert asked["input_ids"] == [HELLO, HE, LLO] and "text" not in asked
    answer = {
        "text": "hello",
        "output_ids": [HE, LLO, END],
        "meta_info": {
            "finish_reason": {"type": "stop", "matched": END},
            "output_token_logprobs": [[-0.5, HE, "he"], [-0.25, LLO, "llo"], [-0.125, END, "<e>"]],
            "weight_versions": [{"version": "3", "start": 0, "end": 3}],
        },
    }
    assert read_reply(answer, params) == Reply([HE, LLO, END], [-0.5, -0.25, -0.125], [3, 3, 3], "stop")
