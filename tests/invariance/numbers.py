"""What is computed and compared: the batch, the losses, and a layout's numbers on the ranks of a pool.

Shape legend: B rows, T tokens of the padded row.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from rlmca.algorithms.losses import PolicyLoss, PolicyOptions, SftLoss
from rlmca.types import Batch, batch_of_examples
from tests.helpers.engine import Layout, loss_and_gradients, make_engine
from tests.invariance.compare import Numbers
from tests.invariance.table import ALL_ROWS, LAYERS

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_tied": {"num_hidden_layers": LAYERS, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8},
    "qwen2": {"num_hidden_layers": LAYERS, "num_attention_heads": 8, "num_key_value_heads": 4},
    "llama": {"num_hidden_layers": LAYERS, "num_attention_heads": 8, "num_key_value_heads": 4},
}
"""Family of `helpers.models` -> sizes: heads for four tensor ranks and, exchanged, for eight context ranks; an odd vocabulary."""
VOCABULARY = 67
TEMPERATURE, ENTROPY_WEIGHT = 0.8, 0.1
LOSSES = {
    "sft": SftLoss(),
    "policy": PolicyLoss(PolicyOptions(temperature=TEMPERATURE, entropy_coef=ENTROPY_WEIGHT)),
}
"""Mean over targets; and mean over rows of means, with the entropy (a gradient of its own through the head) at a temperature."""


def make_batch() -> Batch:
    """Rows of 1 to 16 tokens; the first and the fifth have no target, as a rank's whole share has in some layouts."""
    draw = torch.Generator().manual_seed(3)
    lengths = [1, 13, 2, 16, 5, 9, 3, 7, 11]
    ids = [torch.randint(0, VOCABULARY, (n,), generator=draw).tolist() for n in lengths]
    masks = [[row != 4 and bool(torch.rand((), generator=draw) < 0.7) for _ in range(n)] for row, n in enumerate(lengths)]
    masks[2][1] = True
    batch = batch_of_examples(ids, masks)
    assert len(batch) == ALL_ROWS
    return batch.replace(advantage_BT=torch.randn(len(batch), 1, generator=draw).expand(batch.ids_BT.shape).contiguous())


def numbers_on_rank(folder: Path, layout: Layout, dtype: torch.dtype) -> Numbers | None:
    """The numbers of the batch under a layout; rank 0 answers."""
    from rlmca.workers import SpmdGroup

    batch = make_batch()
    with _any_type_of_weights():
        engine = make_engine(folder, _of_type(layout, dtype))
    if dtype == torch.float64:
        for chunk in engine.chunks:  # see `reference.without_float32_islands`
            chunk.rotary_pos_emb.inv_freq = chunk.rotary_pos_emb.inv_freq.double()
    out = SpmdGroup(engine, engine.parallel).log_probs(batch, entropy=True)
    assert out.entropy_BT is not None
    numbers = {"log-prob": out.logp_BT, "entropy": out.entropy_BT}
    for kind, loss in LOSSES.items():
        value, gradients = loss_and_gradients(engine, batch, loss)
        numbers[f"{kind}: loss"] = torch.tensor(value, dtype=torch.float64)
        numbers.update({f"{kind}: gradient of {name}": gradient for name, gradient in gradients.items()})
    return numbers if engine.parallel.rank == 0 else None


def _of_type(layout: Layout, dtype: torch.dtype) -> Layout:
    """With weights of this type, and gradients too: by default they are summed up in float32."""
    return dataclasses.replace(
        layout,
        options={**layout.options, "dtype": dtype},
        data_parallel={**layout.data_parallel, "accumulate_allreduce_grads_in_fp32": dtype == torch.float32},
    )


@contextlib.contextmanager
def _any_type_of_weights() -> Iterator[None]:
    """Engines whose optimizer holds all states.

    Megatron's distributed optimizer takes no float64. Gradients do not depend on it: that each rank keeps its share of their
    sum is the business of DDP and of its own option, which stays as the layout says.
    """
    from rlmca.engines import megatron

    build = megatron.build_optimizer

    def build_whole(models: Any, options: Any, data_parallel: Any, dtype: torch.dtype, *more: Any) -> Any:
        whole = dataclasses.replace(data_parallel, use_distributed_optimizer=False, overlap_param_gather=False)
        return build(models, options, whole if dtype == torch.float64 else data_parallel, dtype, *more)

    with mock.patch.object(megatron, "build_optimizer", build_whole):
        yield
