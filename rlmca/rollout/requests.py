"""What every rollout engine refuses before it starts."""

from __future__ import annotations

from collections.abc import Sequence

from rlmca.rollout.base import Request, RolloutError, SamplingParams


def check_requests(requests: Sequence[Request], params: SamplingParams, *, vocab_size: int, longest: int | None, limit: str) -> None:
    """Raises RolloutError for the first request that cannot be served.

    Prompt and reply together hold at most `longest` tokens (None: no bound), which is the `limit` that the message names.
    """
    for i, request in enumerate(requests):
        if len(request.prompt_ids) == 0:
            raise RolloutError(f"request {i} has an empty prompt")
        if longest is not None and len(request.prompt_ids) + params.max_new_tokens > longest:
            raise RolloutError(
                f"request {i}: {len(request.prompt_ids)} prompt tokens and max_new_tokens {params.max_new_tokens} exceed "
                f"{limit} {longest}: lower max_prompt_len or max_new_tokens"
            )
        if not (min(request.prompt_ids) >= 0 and max(request.prompt_ids) < vocab_size):
            raise RolloutError(f"request {i} holds a token id outside the model's vocabulary of {vocab_size}")
