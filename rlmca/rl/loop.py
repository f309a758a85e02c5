"""The loop of reinforcement learning: generate, score, advantages, update, sync, repeat.

One rollout, one policy version: `version` is the number of the last step whose weights the rollout engine holds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rlmca.algorithms import AdaptiveKl
from rlmca.algorithms.moments import RunningMoments
from rlmca.config import LateError, RunConfig
from rlmca.data import Prompt, ShuffledOrder
from rlmca.rewards import RewardSet
from rlmca.rl.advantages import make_advantages
from rlmca.rl.baselines import Reference
from rlmca.rl.choice import choose_thinking
from rlmca.rl.curriculum import Curriculum
from rlmca.rl.debug import print_samples
from rlmca.rl.experience import reward_statistics
from rlmca.rl.gather import gather
from rlmca.rl.shaping import shape_rewards
from rlmca.rl.update import update_policy
from rlmca.rollout.base import RolloutEngine, SamplingParams
from rlmca.rollout.samples import sample_replies
from rlmca.run.rollouts import RolloutWriter
from rlmca.run.session import Session
from rlmca.run.timing import Stopwatch
from rlmca.types import Sample
from rlmca.workers import WorkerGroup


@dataclass
class Roles:
    """Everything the loop talks to."""

    policy: WorkerGroup
    reference: Reference | None
    kl: AdaptiveKl | None
    rollout: RolloutEngine
    rewards: RewardSet
    prompts: list[Prompt]
    order: ShuffledOrder
    curriculum: Curriculum | None
    moments: RunningMoments
    params: SamplingParams
    tokenizer: Any
    dump: RolloutWriter | None
    evaluate: Callable[[], dict[str, float]] | None


def run_loop(cfg: RunConfig, session: Session, roles: Roles) -> None:
    """All steps from where the session stands; saves and evaluates as the schedule says."""
    sync_weights(roles, session.step)
    logging = 0.0
    for step in session.steps():
        watch = Stopwatch(carried=logging)
        draw = Drawing(cfg, roles, step, watch)
        gathered = gather(draw, roles.order, cfg.gathering, roles.curriculum, groups=cfg.rl.rollout_batch_size, step=step)
        samples = gathered.samples
        with watch("score"):
            metrics = reward_statistics(samples) | gathered.metrics
            metrics |= shape_rewards(samples, cfg, roles.moments)
        kl_coef = cfg.rl.kl_coef if roles.kl is None else roles.kl.coef
        with watch("advantages"):
            metrics |= make_advantages(samples, roles.policy, roles.reference, cfg, kl_coef=kl_coef)
        with watch("update"):
            lr = session.learning_rate(step)
            metrics |= update_policy(roles.policy, roles.reference, samples, cfg, step=step, learning_rate=lr, kl_coef=kl_coef)
            if roles.kl is not None:
                metrics["kl_coef"] = kl_coef
                roles.kl.update(metrics.get("kl", math.nan))
        with watch("sync"):
            sync_weights(roles, step)
        with watch("dump"):
            if roles.dump is not None:
                roles.dump.write(step, samples)
            if cfg.rl.debug_mode and step % cfg.rl.debug_interval == 0:
                print_samples(samples, step)

        metrics |= watch.seconds()
        speed = gathered.generated_tokens / metrics["time_generate"]
        metrics |= {"lr": lr, "tokens_per_second": speed, "reward_errors": float(draw.reward_errors)}
        written = time.perf_counter()
        session.log(step, metrics, epoch=roles.order.epochs, tokens=sum(s.length for s in samples))
        logging = time.perf_counter() - written
        if roles.evaluate is not None and session.schedule.should_eval(step):
            session.log_eval(step, roles.evaluate(), epoch=roles.order.epochs)
        if session.should_save(step):
            session.save(step, roles.policy, roles.order)


class Drawing:
    """`gather.Draw` with the roles of a run; counts the invalid scores of the rollout in `reward_errors`."""

    def __init__(self, cfg: RunConfig, roles: Roles, step: int, watch: Stopwatch) -> None:
        self._cfg, self._roles, self._step, self._watch = cfg, roles, step, watch
        self.reward_errors = 0

    def __call__(self, rows: Sequence[int], first: int) -> list[Sample]:
        cfg, roles, step = self._cfg, self._roles, self._step
        n, seed = cfg.rl.num_generations, cfg.train.seed
        with self._watch("generate"):
            prompts = [roles.prompts[row] for row in rows]
            prompts = choose_thinking(prompts, rows, cfg.gathering.thinking_ratio, seed=seed, step=step)
            places = range(first, first + len(rows))
            samples = sample_replies(roles.rollout, prompts, roles.tokenizer, roles.params, n=n, seed=seed, step=step, index=places)
        with self._watch("score"):
            roles.rewards.score(samples)
            self.reward_errors += roles.rewards.errors
            if first == 0:
                check_rewards(roles.rewards, samples, step)
        return samples


def check_rewards(rewards: RewardSet, samples: Sequence[Sample], step: int) -> None:
    """Raises LateError where no sample has a valid reward: there is nothing to learn, and the run would go on as if there were."""
    if samples and all(sample.reward is None for sample in samples):
        raise LateError(
            f"rewards: none of the {len(samples)} replies of step {step} has a valid score from {', '.join(rewards.names)}; "
            "the warnings above say why: the functions must return numbers"
        )


def sync_weights(roles: Roles, version: int) -> None:
    """The policy's live weights into the rollout engine, under the number of the step that made them."""
    roles.rollout.update_weights(roles.policy.hf_tensors(roles.rollout.form), version)
