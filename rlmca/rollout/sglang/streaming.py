"""One reply of a server, token by token, held to the same conditions as a whole one once it has ended."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from rlmca.rollout.base import RolloutError, SamplingParams
from rlmca.rollout.sglang.client import ServerClient
from rlmca.rollout.sglang.reply import UNTOLD, BadAnswer, generate_request, read_reply


async def stream_tokens(
    client: ServerClient, prompt_ids: Sequence[int], seed: int, params: SamplingParams, version: int
) -> AsyncIterator[int]:
    """The ids of a reply as they come. RolloutError when the whole of it is none that can be trusted, or of another version."""
    name, sent = client.server.name, 0
    last = None
    async for answer in client.events("/generate", {**generate_request(prompt_ids, seed, params), "stream": True}):
        ids = answer.get("output_ids") if isinstance(answer, dict) else None
        if ids is None:
            raise RolloutError(f"{name} refused /generate: {str(answer)[:500]}")
        if len(ids) != answer["meta_info"].get("completion_tokens", len(ids)):
            raise RolloutError(f"{name} streams pieces: start it without --incremental-streaming-output")
        for token in ids[sent:]:
            yield int(token)
        sent, last = max(sent, len(ids)), answer
    try:
        reply = read_reply(last, params)
    except BadAnswer as error:
        raise RolloutError(f"{name}: its answer to /generate cannot be used: {error}") from error
    if stale := sorted(set(reply.versions) - {version, UNTOLD}):
        raise RolloutError(f"{name}: the reply holds tokens of version {stale[0]}, and the weights are version {version}")
