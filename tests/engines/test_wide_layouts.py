"""Four and eight ranks, and batches whose parts are empty: rows of one token, ranks and micro-batches without a target."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rlmca.types import Batch, batch_of_examples
from tests.helpers.engine import Layout, gradients_on_rank, hf_reference, random_batch
from tests.helpers.models import make_model, save_model
from tests.helpers.ranks import rank_pool

pytestmark = pytest.mark.serial
SIZES: dict[str, Any] = {"num_hidden_layers": 4, "num_key_value_heads": 4}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}


def rows(lengths: list[int], is_target: Callable[[int], bool] = lambda row: True) -> Batch:
    """Rows of these lengths; all tokens of the rows that `is_target` names are targets."""
    draw = torch.Generator().manual_seed(0)
    ids = [torch.randint(0, 67, (n,), generator=draw).tolist() for n in lengths]
    return batch_of_examples(ids, [[is_target(row)] * n for row, n in enumerate(lengths)])


BATCHES = {
    "uneven": random_batch(rows=9, seed=4),
    "tiny": rows([1, 2, 1, 2, 3, 1, 2, 2]),
    "odd": rows([1, 3, 5, 7, 9, 11, 13, 2, 1]),
    "one_rank_has_targets": rows([5, 7, 3, 4, 6, 2, 9, 8], lambda row: row % 4 == 2),
    "first_micro_batches_have_none": rows([5, 7, 3, 4, 6, 2, 9, 8], lambda row: row >= 6),
}


def recompute(**options: Any) -> dict[str, Any]:
    return {f"recompute_{name}": value for name, value in options.items()}


CASES = [
    (Layout("tp4", tp=4), "tiny"),
    (Layout("tp4_sp", tp=4, sp=True, micro_batch=3), "odd"),
    (Layout("pp4", pp=4), "first_micro_batches_have_none"),
    (Layout("pp4_one_piece", pp=4, micro_batch=50), "odd"),
    pytest.param(Layout("dp4", dp=4), "uneven", marks=pytest.mark.whole),
    (Layout("dp4_overlap", dp=4, micro_batch=1, data_parallel=OVERLAP), "one_rank_has_targets"),
    (Layout("pp2_dp2_overlap", pp=2, dp=2, micro_batch=1, data_parallel=OVERLAP), "one_rank_has_targets"),
    (Layout("tp2_sp_pp2_uniform", tp=2, sp=True, pp=2, options=recompute(granularity="full", method="uniform", num_layers=2)), "odd"),
    (Layout("tp2_sp_pp2_block", tp=2, sp=True, pp=2, options=recompute(granularity="full", method="block", num_layers=1)), "odd"),
    pytest.param(
        Layout("tp2_sp_pp2_parts", tp=2, sp=True, pp=2,
               options=recompute(granularity="selective", modules=["core_attn", "layernorm", "mlp"])),
        "tiny", marks=pytest.mark.whole,
    ),
    pytest.param(Layout("tp2_pp2_dp2", tp=2, pp=2, dp=2), "uneven", marks=pytest.mark.whole),
    pytest.param(Layout("tp2_sp_pp2_dp2_overlap", tp=2, sp=True, pp=2, dp=2, data_parallel=OVERLAP), "one_rank_has_targets",
                 marks=pytest.mark.whole),
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("qwen3_tied", tmp_path_factory.mktemp("model"), **SIZES)


@pytest.mark.parametrize(("layout", "name"), CASES, ids=lambda value: value.name if isinstance(value, Layout) else value)
def test_numbers_equal_transformers(layout: Layout, name: str, folder: Path) -> None:
    ours = rank_pool(layout.world).run(gradients_on_rank, folder, layout, BATCHES[name])[0]
    theirs = hf_reference(make_model("qwen3_tied", **SIZES), BATCHES[name])
    assert abs(ours["loss"] - theirs["loss"]) < 1e-5
    torch.testing.assert_close(ours["logp_BT"], theirs["logp_BT"], rtol=0, atol=1e-5)
    for parameter, expected in theirs["gradients"].items():
        torch.testing.assert_close(ours["gradients"][parameter], expected, rtol=0, atol=1e-5, msg=lambda m, n=parameter: f"{n}: {m}")
