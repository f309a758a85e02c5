"""Experts with a capacity, against Transformers with a router that drops by hand."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlmca.types import Batch
from tests.engines.test_router_losses import assert_close
from tests.helpers.engine import Layout, loss_and_gradients, make_engine, random_batch
from tests.helpers.models import make_model, save_model
from tests.helpers.ranks import rank_pool

pytestmark = pytest.mark.serial
FACTOR = 0.5
ALLTOALL = {"moe_token_dispatcher_type": "alltoall"}
FILLED = {**ALLTOALL, "moe_pad_expert_input_to_capacity": True}


def pieces_on_rank(folder: Path, layout: Layout) -> dict[str, Any]:
    """Loss and gradients, and of each micro-batch of this rank the rows and what they are padded to."""
    from rlmca.algorithms.losses import SftLoss
    from rlmca.engines.microbatch import micro_batches

    engine, batch = make_engine(folder, layout), random_batch()
    value, gradients = loss_and_gradients(engine, batch, SftLoss())
    own = engine.shares(batch)[engine.parallel.dp_rank]
    pieces = micro_batches(batch.rows(own), engine.cutting(layout.micro_batch), engine.parallel)
    padded = [([own[row] for row in piece.numbers], tuple(piece.ids_BT.shape)) for piece in pieces]
    return {"loss": value, "gradients": gradients if engine.parallel.rank == 0 else {}, "pieces": padded}


def transformers_with_capacity(batch: Batch, pieces: list[tuple[list[int], tuple[int, int]]], policy: str) -> dict[str, Any]:
    """Loss and gradients of one forward a micro-batch, tokens beyond the capacity taken from their experts; and how many these are."""
    from transformers.core_model_loading import revert_weight_conversion

    model: Any = make_model("qwen3_moe")
    dropped = 0
    for layer in model.model.layers:
        if hasattr(layer.mlp, "gate"):
            layer.mlp.gate.register_forward_hook(lambda _, __, out: drop(*out))
    loss: Tensor = torch.zeros(())
    for rows, (height, width) in pieces:
        part = batch.rows(rows).pad_to(max(height, len(rows)), width)
        real_BT = torch.arange(width) < part.length_B[:, None]
        real_BT[len(rows) :] = False
        capacity = math.ceil(real_BT.numel() * 3 / 8 * FACTOR)

        def drop(logits: Tensor, weight_XK: Tensor, expert_XK: Tensor, real: Tensor = real_BT, most: int = capacity) -> Any:
            nonlocal dropped
            keep = torch.zeros_like(weight_XK)
            for expert in range(8):
                at = [(x, k) for x, k in (expert_XK == expert).nonzero().tolist() if real.reshape(-1)[x]]
                last = {"probs": lambda p: -weight_XK[p].item(), "position": lambda p: (p[0] % real.shape[1], p[0] // real.shape[1])}
                at.sort(key=last[policy])  # type: ignore[arg-type]
                dropped += len(at[most:])
                for place in at[:most]:
                    keep[place] = 1.0
            return logits, weight_XK * keep, expert_XK

        logits = model(input_ids=part.ids_BT, attention_mask=real_BT.long()).logits
        logp_BT = torch.log_softmax(logits[:, :-1], -1).gather(2, part.ids_BT[:, 1:, None])[..., 0]
        loss = loss - logp_BT[part.mask_BT[:, 1:]].sum() / batch.mask_BT.sum()
    loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.item(), "gradients": dict(revert_weight_conversion(model, gradients)), "dropped": dropped}


@pytest.mark.parametrize("policy", ["probs", "position"])
@pytest.mark.parametrize(
    "layout",
    [
        Layout("one", micro_batch=8),
        pytest.param(Layout("filled", micro_batch=4, options=FILLED), marks=pytest.mark.whole),
        pytest.param(Layout("ep2", dp=2, ep=2, micro_batch=3), marks=pytest.mark.whole),
        Layout("ep2_filled", dp=2, ep=2, micro_batch=3, options=FILLED),
        pytest.param(Layout("ep2_alltoall", dp=2, ep=2, micro_batch=3, options=ALLTOALL), marks=pytest.mark.whole),
    ],
    ids=lambda layout: layout.name,
)
def test_tokens_beyond_the_capacity_of_a_micro_batch_are_dropped(layout: Layout, policy: str, tmp_path: Path) -> None:
    limits = {"moe_expert_capacity_factor": FACTOR, "moe_token_drop_policy": policy}
    layout = dataclasses.replace(layout, options={**layout.options, **limits})
    ours = rank_pool(layout.world).run(pieces_on_rank, save_model("qwen3_moe", tmp_path), layout)
    pieces = [piece for rank in ours for piece in rank["pieces"]]
    assert sorted(row for rows, _ in pieces for row in rows) == list(range(8))
    theirs = transformers_with_capacity(random_batch(), [piece for piece in pieces if piece[0]], policy)
    assert theirs["dropped"] > 50
    assert ours[0]["loss"] == pytest.approx(theirs["loss"], abs=1e-5)
    assert_close(ours[0]["gradients"], theirs["gradients"])
