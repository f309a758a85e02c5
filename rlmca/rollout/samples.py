"""From prompts to samples: requests with their seeds, replies, and the text that reward functions read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from rlmca.rollout.base import Request, RolloutEngine, SamplingParams
from rlmca.rollout.decode import decode_replies
from rlmca.rollout.seeds import reply_seed
from rlmca.types import Sample


class PromptRow(Protocol):
    """A prompt as the data room hands it out."""

    @property
    def ids(self) -> list[int]:
        """Tokens of the rendered prompt."""
        ...

    @property
    def row(self) -> Mapping[str, Any]:
        """The data row, for reward functions."""
        ...


def sample_replies(
    engine: RolloutEngine,
    prompts: Sequence[PromptRow],
    tokenizer: PreTrainedTokenizerBase,
    params: SamplingParams,
    *,
    n: int,
    seed: int,
    step: int,
    index: Sequence[int] | None = None,
) -> list[Sample]:
    """`n` samples of every prompt, group by group: sample p * n + k is reply k to `prompts[p]`, of group p.

    `index` names the prompts (their row in the data set; by default their place in the list): a reply's seed is that of
    (seed, step, index, k), so the same prompt gets other replies in another step.
    """
    names = range(len(prompts)) if index is None else index
    requests = [
        Request(prompt.ids, [reply_seed(seed, step, name, k) for k in range(n)]) for name, prompt in zip(names, prompts, strict=True)
    ]
    groups = engine.generate(requests, params)
    texts = iter(decode_replies(tokenizer, [reply for group in groups for reply in group]))
    return [
        Sample(
            prompt_ids=prompt.ids,
            reply_ids=reply.ids,
            reply_logp=reply.logp,
            versions=reply.versions,
            finish=reply.finish,
            reply=next(texts),
            row=prompt.row,
            group=p,
            k=k,
        )
        for p, (prompt, group) in enumerate(zip(prompts, groups, strict=True))
        for k, reply in enumerate(group)
    ]


def stop_text_ids(tokenizer: PreTrainedTokenizerBase, stop: Sequence[str]) -> tuple[int, ...]:
    """The ids of the texts that end a reply.

    A text of several tokens is an error: the engine stops at tokens, and the reply's ids must end where it does.
    """
    found = []
    for text in stop:
        ids = tokenizer.encode(text, add_special_tokens=False)
        if len(ids) != 1:
            raise ValueError(f"stop: {text!r} is {len(ids)} tokens for this tokenizer; write texts that are one token each")
        found += ids
    return tuple(dict.fromkeys(found))
