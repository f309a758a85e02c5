"""Evaluation by generating: greedy replies to held-out prompts, scored by the run's reward functions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlmca.config import RunConfig
from rlmca.data import Prompt
from rlmca.parallel.groups import Parallel
from rlmca.rewards import RewardSet
from rlmca.rollout.base import RolloutEngine
from rlmca.run.evaluate import evaluate_policy
from rlmca.run.source import Source, rollout_engine, rollout_form, sampling_params
from rlmca.workers import WorkerGroup


class ReplyEvaluation:
    """Scores of the policy's greedy replies. The main rank generates with a copy of the live weights; all get the result."""

    def __init__(self, cfg: RunConfig, source: Source, parallel: Parallel, prompts: Sequence[Prompt], rewards: RewardSet) -> None:
        self.prompts, self.rewards, self.parallel, self.seed = prompts, rewards, parallel, cfg.train.seed
        self.params = sampling_params(cfg, source, greedy=True)
        self.cfg, self.source = cfg, source
        self.log_dir = Path(str(cfg.train.output_dir)) / "sglang"
        self._rollout: RolloutEngine | None = None

    def __call__(self, policy: WorkerGroup, step: int) -> dict[str, float]:
        """`accuracy`, `reward/<part>`, lengths; see `run.evaluate.summarise`. Collective over all ranks."""
        stream = policy.hf_tensors(rollout_form(self.cfg))
        metrics: dict[str, float] = {}
        if self.parallel.is_main:
            if self._rollout is None:
                self._rollout = rollout_engine(self.cfg, self.source, self.parallel.device, self.log_dir)
            self._rollout.update_weights(stream, step)
            metrics = evaluate_policy(
                self._rollout, self.prompts, self.rewards, self.params, tokenizer=self.source.tokenizer, seed=self.seed
            )
        else:
            for _ in stream:
                pass
        return dict(self.parallel.broadcast_object(metrics))

    def close(self) -> None:
        """End the reward workers and free the generating copy."""
        self.rewards.close()
        if self._rollout is not None:
            self._rollout.close()
