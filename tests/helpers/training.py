"""Short trainings on the ranks of a pool, and the same by a plain PyTorch loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from rlmca.types import Batch
from tests.helpers.engine import Layout, make_engine, random_batch

STEPS = 20
LEARNING_RATE = 1e-3


def learning_rate(step: int) -> float:
    """A warm-up, so that a schedule that lags by a step would show."""
    return LEARNING_RATE * min(1.0, (step + 1) / 5)


def batches(rows: int, steps: int = STEPS) -> list[Batch]:
    return [random_batch(rows=rows, seed=100 + step) for step in range(steps)]


def train_on_rank(folder: Path, layout: Layout, rows: int) -> list[dict[str, float]]:
    """Metrics of every step."""
    from rlmca.algorithms.losses import SftLoss
    from rlmca.workers import SpmdGroup

    engine = make_engine(folder, layout)
    group = SpmdGroup(engine, engine.parallel)
    return [group.train_batch(batch, SftLoss(), learning_rate(step)) for step, batch in enumerate(batches(rows))]


def train_plainly(model: Any, rows: int, *, weight_decay: float = 0.0, max_grad_norm: float = 1.0) -> list[dict[str, float]]:
    """The same steps on a Transformers model with torch's AdamW and no micro-batches."""
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}], lr=0.0)
    result = []
    for step, batch in enumerate(batches(rows)):
        attention_BT = torch.arange(batch.ids_BT.shape[1])[None] < batch.length_B[:, None]
        logits = model(input_ids=batch.ids_BT, attention_mask=attention_BT.long()).logits[:, :-1]
        logp_BT = torch.log_softmax(logits, -1).gather(2, batch.ids_BT[:, 1:, None])[..., 0]
        loss = -logp_BT[batch.mask_BT[:, 1:]].sum() / batch.mask_BT.sum()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        optimizer.step()
        result.append({"loss": loss.item(), "grad_norm": float(norm)})
    return result


def resume_on_rank(folder: Path, layout: Layout, checkpoint: Path) -> dict[str, Any]:
    """Six steps in one go, and three, a save, a load into a new engine, and three more: losses and last weights of both."""
    from rlmca.algorithms.losses import SftLoss
    from rlmca.workers import SpmdGroup

    def steps(group: SpmdGroup, numbers: range) -> list[float]:
        return [group.train_batch(random_batch(seed=s), SftLoss(), 1e-2)["loss"] for s in numbers]

    engine = make_engine(folder, layout)
    group = SpmdGroup(engine, engine.parallel)
    whole = steps(group, range(3))
    engine.save(checkpoint)
    whole += steps(group, range(3, 6))
    expected = {name: p.clone() for name, p in _state(engine).items()}

    again = make_engine(folder, layout)
    again.load(checkpoint)
    resumed = steps(SpmdGroup(again, again.parallel), range(3, 6))
    same = all(torch.equal(p, expected[name]) for name, p in _state(again).items())
    return {"whole": whole[3:], "resumed": resumed, "same_weights": same}


def _state(engine: Any) -> dict[str, torch.Tensor]:
    """This rank's weights, and its adapters where there are some."""
    own = {} if engine.adapters is None else engine.adapters.parameters
    return {**engine.weights().params, **{name: p.detach() for name, p in own.items()}}


def export_on_rank(folder: Path, layout: Layout) -> dict[str, torch.Tensor] | None:
    """All weights under HF names, gathered to rank 0."""
    from rlmca.transfer.stream import hf_tensors

    engine = make_engine(folder, layout, trainable=False)
    found = {name: tensor.clone() for name, tensor in hf_tensors(engine.weights())}
    return found if engine.parallel.rank == 0 else None


def random_states_on_rank(folder: Path, layout: Layout) -> dict[str, Any]:
    """Digests of this rank's random states: the default one, and the tracker's for model-parallel parts."""
    import hashlib

    from megatron.core import tensor_parallel

    engine = make_engine(folder, layout, trainable=False)
    tracker = tensor_parallel.get_cuda_rng_tracker().get_states()["model-parallel-rng"]
    digest = [hashlib.sha256(state.numpy().tobytes()).hexdigest() for state in (torch.get_rng_state(), tracker)]
    return {"default": digest[0], "model_parallel": digest[1], "coord": engine.coord, "dp": engine.parallel.dp_rank}


def dropout_losses_on_rank(folder: Path, layout: Layout, steps: int) -> list[float]:
    """Losses of a few steps under dropout."""
    from rlmca.algorithms.losses import SftLoss
    from rlmca.workers import SpmdGroup

    engine = make_engine(folder, layout)
    group = SpmdGroup(engine, engine.parallel)
    return [group.train_batch(random_batch(seed=s), SftLoss(), 1e-3)["loss"] for s in range(steps)]
