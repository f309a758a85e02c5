"""Scores of a policy on held-out prompts: accuracy, pass@k, reward parts, lengths."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from rlmca.observe.progress import progress
from rlmca.rollout.base import RolloutEngine, SamplingParams
from rlmca.rollout.samples import PromptRow, sample_replies
from rlmca.types import Sample

_RIGHT = 1.0 - 1e-6
_REPLIES_AT_ONCE = 1024
"""Replies between two movements of the progress bar; memory is bounded by the engine's own `rollout_batch`."""


class Scorer(Protocol):
    """Fills in `reward` and `reward_parts` of samples."""

    def score(self, samples: list[Sample]) -> None:
        """Scores every sample, each exactly once."""
        ...


def evaluate_policy(
    rollout: RolloutEngine,
    prompts: Sequence[PromptRow],
    rewards: Scorer,
    params: SamplingParams,
    n: int = 1,
    *,
    tokenizer: PreTrainedTokenizerBase,
    seed: int = 0,
    judge: str | None = None,
) -> dict[str, float]:
    """Generates `n` replies to every prompt, scores them and returns `summarise`'s metrics."""
    samples = sample_all(rollout, prompts, params, n, tokenizer=tokenizer, seed=seed)
    rewards.score(samples)
    return summarise(samples, judge=judge)


def sample_all(
    rollout: RolloutEngine,
    prompts: Sequence[PromptRow],
    params: SamplingParams,
    n: int = 1,
    *,
    tokenizer: PreTrainedTokenizerBase,
    seed: int = 0,
    description: str = "evaluating",
    is_main: bool = True,
) -> list[Sample]:
    """`n` samples of every prompt, group by group, under a progress bar.

    The seeds are those of step -1, which no training step has: the same weights give the same replies at any time.
    """
    samples: list[Sample] = []
    at_once = max(1, _REPLIES_AT_ONCE // n)
    with progress(len(prompts), description, is_main=is_main) as bar:
        for first in range(0, len(prompts), at_once):
            part = prompts[first : first + at_once]
            new = sample_replies(rollout, part, tokenizer, params, n=n, seed=seed, step=-1, index=range(first, first + len(part)))
            for sample in new:
                sample.group += first
            samples += new
            bar.advance(len(part))
    return samples


def summarise(samples: Sequence[Sample], *, judge: str | None = None) -> dict[str, float]:
    """Metrics of scored samples, grouped by `Sample.group`.

    A reply is *right* when the reward part `judge` (by default the first part) is at least 1; a reply without a valid
    score is not right, and is counted in `invalid`. `accuracy` is the mean over prompts of the share of right replies;
    `pass@k`, for k = 1, 2, 4, ... up to the smallest group, the unbiased estimate over prompts. `reward` and
    `reward/<part>` are means over valid values. `length_*` are in tokens, `truncated` is the share that ran into the limit.
    """
    if not samples:
        raise ValueError("nothing to evaluate: no samples")
    groups: dict[int, list[bool]] = defaultdict(list)
    for sample in samples:
        groups[sample.group].append(is_right(sample, judge))
    smallest = min(len(group) for group in groups.values())
    out = {"accuracy": _mean([sum(group) / len(group) for group in groups.values()])}
    for k in [1 << i for i in range(smallest.bit_length()) if 1 << i <= smallest] + ([smallest] if smallest & (smallest - 1) else []):
        if smallest > 1:
            out[f"pass@{k}"] = _mean([pass_at_k(len(group), sum(group), k) for group in groups.values()])
    valid = [sample.reward for sample in samples if sample.reward is not None]
    out["reward"] = _mean(valid)
    for part in dict.fromkeys(name for sample in samples for name in sample.reward_parts):
        out[f"reward/{part}"] = _mean([value for s in samples if (value := s.reward_parts.get(part)) is not None])
    lengths = [len(sample.reply_ids) for sample in samples]
    out |= {
        "invalid": float(len(samples) - len(valid)),
        "length_mean": _mean(lengths),
        "length_max": float(max(lengths)),
        "truncated": _mean([float(sample.truncated) for sample in samples]),
        "prompts": float(len(groups)),
        "replies": float(len(samples)),
    }
    return out


def summarise_sets(samples: Sequence[Sample], sets: Mapping[str, int]) -> dict[str, float]:
    """`summarise`'s metrics of every data set by itself, as `<set>_<metric>`; `sets` says how many of the groups, which are
    numbered one set after the other, each has."""
    out: dict[str, float] = {}
    first = 0
    for name, count in sets.items():
        of_set = [sample for sample in samples if first <= sample.group < first + count]
        out |= {f"{name}_{metric}": value for metric, value in summarise(of_set).items()}
        first += count
    return out


def is_right(sample: Sample, judge: str | None = None) -> bool:
    """True when the judging reward part (by default the first; without parts the reward itself) is at least 1."""
    parts = sample.reward_parts
    value = parts[judge] if judge is not None else next(iter(parts.values()), sample.reward)
    return value is not None and value >= _RIGHT


def pass_at_k(n: int, right: int, k: int) -> float:
    """Probability that at least one of k replies, drawn without replacement from n of which `right` are right, is right.

    Unbiased estimate 1 - C(n - c, k) / C(n, k): Chen et al., Evaluating Large Language Models Trained on Code, 2021, eq. 1.
    """
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} needs at least {k} replies a prompt, there are {n}")
    return 1.0 - math.comb(n - right, k) / math.comb(n, k)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan
