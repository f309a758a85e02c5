"""What a rollout engine is: requests in, replies out, weights streamed in.

An engine answers every request with exactly one reply per seed, in the order of the request. Replies carry
the sampled ids themselves (never re-tokenised text), the log-probabilities the sampler saw and the policy
version of every token, so that a trainer never has to guess what was sampled, from what, and when.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from rlmca.layouts import Form
from rlmca.types import Finish


class RolloutError(RuntimeError):
    """A rollout that cannot be carried out, or whose numbers cannot be trusted."""


@dataclass(frozen=True)
class SamplingParams:
    """How replies are drawn.

    `temperature` 0 is greedy decoding. `top_k` <= 0 and `top_p` 1 switch the filters off; with both, top-k comes
    first and top-p is taken on what it leaves, as in Transformers. Any id of `stop_ids` ends a reply and is part
    of it. `max_new_tokens` counts the stop token.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_new_tokens: int = 512
    stop_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        problems = []
        if not self.temperature >= 0:
            problems.append(f"temperature is {self.temperature}: write 0 (greedy) or a positive number")
        if not 0 < self.top_p <= 1:
            problems.append(f"top_p is {self.top_p}: write a number in (0, 1], 1 keeps every token")
        if self.max_new_tokens < 1:
            problems.append(f"max_new_tokens is {self.max_new_tokens}: write 1 or more")
        if problems:
            raise ValueError("; ".join(problems))

    @property
    def greedy(self) -> bool:
        """True when the most likely token is taken instead of a drawn one."""
        return self.temperature == 0

    @property
    def filtered(self) -> bool:
        """True when top-k or top-p cut the distribution that the reported log-probs belong to."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1)


@dataclass(frozen=True)
class Request:
    """One prompt and the seeds of the replies wanted: as many replies as seeds (see `rollout.seeds.reply_seed`)."""

    prompt_ids: Sequence[int]
    seeds: Sequence[int]


@dataclass
class Reply:
    """One sampled reply.

    `ids` holds the sampled tokens, the stop token included; `logp[t]` is the natural log-probability of `ids[t]` in
    fp32, at the sampling temperature, over the model's whole vocabulary before top-k and top-p (greedy: at
    temperature 1); `versions[t]` is the weights' version that sampled it. `finish` is "stop" or "length".
    """

    ids: list[int]
    logp: list[float]
    versions: list[int]
    finish: Finish


class RolloutEngine(Protocol):
    """A policy that generates. Weights arrive as a stream of (Hugging Face name, tensor)."""

    @property
    def version(self) -> int:
        """Version of the weights in use; -1 before the first."""
        ...

    @property
    def form(self) -> Form | None:
        """How the experts of a mixture must come in `update_weights`; None: as the model's files hold them."""
        ...

    def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[list[Reply]]:
        """Replies to every request, `result[i][k]` for `requests[i].seeds[k]`."""
        ...

    def stream(self, prompt_ids: Sequence[int], seed: int, params: SamplingParams) -> Iterator[int]:
        """The ids that `generate` gives for this prompt and seed, each as soon as it is there, the stop token included.

        Closing the iterator ends the reply.
        """
        ...

    def update_weights(self, stream: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Takes over new weights; every parameter must come exactly once."""
        ...

    def close(self) -> None:
        """Gives up memory and processes. The engine cannot be used afterwards."""
        ...
