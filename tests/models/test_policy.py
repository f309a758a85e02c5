"""The policy's head inside Megatron: no logits, the weight's gradient straight in DDP's buffer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlmca.algorithms.losses import SftLoss
from rlmca.engines.microbatch import micro_batches
from tests.helpers.engine import Layout, make_engine, random_batch
from tests.helpers.models import save_model
from tests.models.test_logprobs_head import Largest


@pytest.mark.parametrize("family", ["qwen3_tied", "qwen3_untied"])
def test_a_training_step_makes_no_logits(family: str, tmp_path: Path) -> None:
    folder = save_model(family, tmp_path / "model", vocab_size=6000, hidden_size=16, intermediate_size=16, num_attention_heads=2)
    engine, batch = make_engine(folder, Layout("tp1")), random_batch(vocab=6000, rows=64)
    with Largest() as seen:
        engine.compute_gradients(micro_batches(batch, engine.cutting(64), engine.parallel), SftLoss(), SftLoss().counts(batch))
    assert batch.mask_BT.sum() > 200 and seen.shape[-1] <= 2048, seen.shape


@pytest.mark.parametrize("overlap", [False, True])
def test_bf16_gradients_of_micro_batches_are_added_in_fp32(overlap: bool, tmp_path: Path) -> None:
    """Sixteen equal micro-batches: a sum in bfloat16 would lose bits, and a gradient that reached DDP twice would double."""
    from rlmca.engines.step import global_counts

    folder = save_model("qwen3_untied", tmp_path / "model")
    data_parallel = {"overlap_grad_reduce": overlap}
    layout = Layout("tp1", micro_batch=2, options={"dtype": torch.bfloat16}, data_parallel=data_parallel)
    engine, loss, found = make_engine(folder, layout), SftLoss(), []
    one = random_batch(rows=2, seed=3)
    many = one.rows([0, 1] * 16)
    for batch in (one, many):
        counts = global_counts(batch, loss, engine.parallel)
        pieces = micro_batches(batch, engine.cutting(2), engine.parallel)
        engine.compute_gradients(pieces, loss, counts)
        found.append(engine.chunks[0].output_layer.weight.main_grad.clone())
        assert engine.chunks[0].output_layer.weight.grad is None
    assert found[0].dtype == torch.float32 and found[0].abs().max() > 1e-3
    torch.testing.assert_close(found[1], found[0], rtol=2e-3, atol=2e-6)


def test_entropy_is_made_when_asked_for(tmp_path: Path) -> None:
    engine, batch = make_engine(save_model("qwen3_untied", tmp_path / "model"), Layout("tp1")), random_batch()
    with torch.no_grad():
        with_2N, without_2N = (engine.chunks[0](batch.ids_BT, batch.mask_BT, 0.7, entropy) for entropy in (True, False))
    assert torch.equal(with_2N[0], without_2N[0]) and with_2N[1].min() > 0 and not without_2N[1].any()
