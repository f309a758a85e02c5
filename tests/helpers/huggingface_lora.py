"""Adapters of the Hugging Face engine for tests, and what plain PEFT computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlmca.types import Batch
from tests.helpers.engine import hf_reference
from tests.helpers.huggingface import make_hf_engine
from tests.helpers.lora import ALPHA, RANK, draw_adapter, save_adapter
from tests.helpers.models import make_model


def lora_options(**changes: Any) -> Any:
    from rlmca.models.options import LoraOptions

    return LoraOptions(**{"rank": RANK, "alpha": ALPHA, **changes})


def start_folder(root: Path, family: str, *, seed: int = 3, **config: Any) -> Path:
    """A drawn adapter of every linear layer of the family's test model."""
    targets = tuple(config.pop("targets", ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")))
    return save_adapter(root, draw_adapter(make_model(family), targets, seed=seed), targets, **config)


def plain_peft(family: str, adapter: Path, **overrides: Any) -> Any:
    """The test model with the adapter, by PEFT alone, ready to be trained."""
    from peft import PeftModel

    return PeftModel.from_pretrained(make_model(family, **overrides), str(adapter), is_trainable=True)


def peft_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Under the names of PEFT's files, which do not say which of several adapters it is."""
    return {name.replace(".default.", "."): value for name, value in tensors.items()}


def peft_reference(model: Any, batch: Batch) -> dict[str, Any]:
    """Loss, gradients of the adapter and log-probs by plain PEFT, row by row without padding."""
    found = hf_reference(model, batch)
    return {**found, "gradients": peft_names(found["gradients"])}


def adapter_gradients_on_rank(folder: Path, settings: dict[str, Any], batch: Batch) -> dict[str, Any]:
    """Loss, gradients of the adapters under PEFT's names, and log-probs of the whole batch."""
    from rlmca.algorithms.losses import SftLoss
    from rlmca.engines.microbatch import micro_batches
    from rlmca.engines.step import global_counts, reduce_metrics
    from rlmca.workers import SpmdGroup

    engine = make_hf_engine(folder, **settings)
    parallel, loss = engine.parallel, SftLoss()
    logp_BT = SpmdGroup(engine, parallel).log_probs(batch).logp_BT
    own = batch.rows(engine.shares(batch)[parallel.dp_rank])
    pieces = micro_batches(own, engine.cutting(engine.options.micro_batch_size), parallel)
    value = reduce_metrics(engine.compute_gradients(pieces, loss, global_counts(own, loss, parallel)), parallel)["loss"]
    assert all(p.grad is None for p in engine.adapters.base.values()), "the base gets no gradient"
    return {"loss": value, "gradients": {n: p.grad.clone() for n, p in engine.adapters.parameters.items()}, "logp_BT": logp_BT}


def adapter_steps_on_rank(folder: Path, settings: dict[str, Any], batches: list[Batch], rates: list[float]) -> dict[str, Any]:
    """Metrics of the steps, the adapters, the base weights and the merged ones that `weights()` gives here."""
    from rlmca.algorithms.losses import SftLoss
    from rlmca.workers import SpmdGroup

    engine = make_hf_engine(folder, **settings)
    group = SpmdGroup(engine, engine.parallel)
    metrics = []
    for batch, rate in zip(batches, rates, strict=True):
        own = batch.rows(engine.shares(batch)[engine.parallel.dp_rank])
        engine.log_probs(own, adapter=False)  # between steps, as RL does it: the adapters must be trained all the same
        metrics.append(group.train_batch(batch, SftLoss(), rate))
    return {
        "metrics": metrics,
        "adapters": copies(engine.adapters.parameters),
        "base": copies(engine.adapters.base),
        "merged": {name: tensor.clone() for name, tensor in engine.weights().tensors()},
    }


def copies(parameters: Any) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in parameters.items()}


def same_bits(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(value, two[name]) for name, value in one.items())
