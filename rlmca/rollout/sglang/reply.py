"""What is asked of `/generate`, and what its answer must hold to become a `Reply`."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rlmca.rollout.base import Reply, SamplingParams
from rlmca.types import Finish

_FINISH: Mapping[str, Finish] = {"stop": "stop", "length": "length", "abort": "abort"}
UNTOLD = -(2**62)
"""Version of a token for which an older server gives none."""


class BadAnswer(ValueError):
    """An answer that is no reply; the text says what is wrong with it."""


def generate_request(prompt_ids: Sequence[int], seed: int, params: SamplingParams) -> dict[str, Any]:
    """The JSON body of one reply. Token ids go in and out; no text is sent, so nothing is tokenised on the way."""
    return {
        "input_ids": list(prompt_ids),
        "sampling_params": {
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k if params.top_k > 0 else -1,
            "max_new_tokens": params.max_new_tokens,
            "stop_token_ids": list(params.stop_ids),
            "sampling_seed": seed,
            "skip_special_tokens": False,
        },
        "return_logprob": True,
        "stream": False,
    }


def read_reply(answer: Any, params: SamplingParams) -> Reply:
    """The reply in an answer of `/generate`. Raises BadAnswer unless ids, log-probs and versions agree and end as asked."""
    try:
        ids, meta = [int(token) for token in answer["output_ids"]], answer["meta_info"]
        finish, pairs = _FINISH[meta["finish_reason"]["type"]], [(float(p[0]), int(p[1])) for p in meta["output_token_logprobs"]]
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise BadAnswer(f"it lacks output_ids, finish_reason or output_token_logprobs ({type(error).__name__}: {error})") from error
    if [token for _, token in pairs] != ids:
        raise BadAnswer(f"its {len(ids)} output_ids and the ids of its {len(pairs)} log-probs differ")
    bad = [t for t, (logp, _) in enumerate(pairs) if not math.isfinite(logp)]
    if bad:
        raise BadAnswer(f"the log-prob at reply position {bad[0]} is not finite")
    _check_end(ids, finish, params)
    return Reply(ids, [logp for logp, _ in pairs], _versions(meta, len(ids)), finish)


def _check_end(ids: list[int], finish: Finish, params: SamplingParams) -> None:
    stops: Collection[int] = set(params.stop_ids)
    if finish == "length" and len(ids) != params.max_new_tokens:
        raise BadAnswer(
            f"it was cut at {len(ids)} of {params.max_new_tokens} tokens: the server's context_length or max-total-tokens is too small"
        )
    if finish == "stop" and (not ids or ids[-1] not in stops):
        last = ids[-1] if ids else "nothing"
        raise BadAnswer(
            f"it stopped at {last}, which is not among the stop ids {sorted(stops)}: the server knows further end tokens; "
            "add the text of this one to stop, or take eos_token_id out of its config.json and generation_config.json"
        )
    early = next((t for t, token in enumerate(ids[:-1]) if token in stops), None)
    if early is not None or len(ids) > params.max_new_tokens:
        raise BadAnswer(f"it goes on behind {'the stop id at position ' + str(early) if early is not None else 'max_new_tokens'}")


def _versions(meta: Mapping[str, Any], count: int) -> list[int]:
    """One version a token from the spans of `weight_versions`; UNTOLD where the server has none (before 0.5.10)."""
    spans = meta.get("weight_versions")
    if spans is None:
        return [UNTOLD] * count
    versions: list[int] = []
    try:
        for span in spans:
            if int(span["start"]) != len(versions):
                raise BadAnswer(f"its weight_versions {spans} have a gap")
            versions += [read_version(span["version"])] * (int(span["end"]) - int(span["start"]))
    except (KeyError, TypeError, ValueError) as error:
        raise error if isinstance(error, BadAnswer) else BadAnswer(f"its weight_versions {spans} cannot be read") from error
    if len(versions) != count:
        raise BadAnswer(f"its weight_versions {spans} cover {len(versions)} of {count} tokens")
    return versions


def read_version(text: Any) -> int:
    """The version that a server's text means; -1 for any text that is not ours (a fresh server says `default`)."""
    try:
        return int(text)
    except (TypeError, ValueError):
        return -1
