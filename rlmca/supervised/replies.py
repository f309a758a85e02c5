"""Evaluation by generating: greedy replies to held-out prompts, scored by the run's reward functions."""

from __future__ import annotations

from collections.abc import Sequence

from rlmca.config import RunConfig
from rlmca.data import Prompt
from rlmca.parallel.groups import Parallel
from rlmca.rewards import RewardSet
from rlmca.rollout.local import LocalEngine
from rlmca.run.evaluate import evaluate_policy
from rlmca.run.roles import Source, sampling_params
from rlmca.transfer.stream import hf_tensors
from rlmca.workers import WorkerGroup


class ReplyEvaluation:
    """Scores of the policy's greedy replies. The main rank generates with a copy of the live weights; all get the result."""

    def __init__(self, cfg: RunConfig, source: Source, parallel: Parallel, prompts: Sequence[Prompt], rewards: RewardSet) -> None:
        self.prompts, self.rewards, self.parallel, self.seed = prompts, rewards, parallel, cfg.train.seed
        self.params = sampling_params(cfg, source, greedy=True)
        self.tokenizer, self.folder, self.pad_id = source.tokenizer, source.folder, int(source.tokenizer.pad_token_id)
        self.rollout_batch = cfg.rollout.rollout_batch
        self._rollout: LocalEngine | None = None

    def __call__(self, policy: WorkerGroup, step: int) -> dict[str, float]:
        """`accuracy`, `reward/<part>`, lengths; see `run.evaluate.summarise`. Collective over all ranks."""
        weights = policy.weights()
        stream = hf_tensors(weights)
        metrics: dict[str, float] = {}
        if self.parallel.is_main:
            if self._rollout is None:
                self._rollout = LocalEngine(
                    self.folder, pad_id=self.pad_id, dtype=weights.dtype, device=self.parallel.device, rollout_batch=self.rollout_batch
                )
            self._rollout.update_weights(stream, step)
            metrics = evaluate_policy(self._rollout, self.prompts, self.rewards, self.params, tokenizer=self.tokenizer, seed=self.seed)
        else:
            for _ in stream:
                pass
        return dict(self.parallel.broadcast_object(metrics))

    def close(self) -> None:
        """End the reward workers and free the generating copy."""
        self.rewards.close()
        if self._rollout is not None:
            self._rollout.close()
