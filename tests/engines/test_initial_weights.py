"""An engine without a folder draws its weights as Megatron does, and every copy of a weight starts equal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.engine import Layout, make_engine
from tests.helpers.models import save_model
from tests.helpers.ranks import rank_pool

pytestmark = pytest.mark.serial
STD = 0.05


def drawn_on_rank(folder: Path, layout: Layout) -> dict[str, Any]:
    """The whole model under HF names (rank 0), this rank's own parameters, and where it sits."""
    from rlmca.transfer.stream import hf_tensors

    engine = make_engine(folder, layout, fresh=True)
    whole = {name: tensor.clone() for name, tensor in hf_tensors(engine.weights())}
    own = {name: p.detach().clone() for name, p in engine.named_parameters()}
    return {"whole": whole, "own": own, "pp": engine.coord.pp, "tp": engine.coord.tp}


@pytest.mark.parametrize(
    "layout", [Layout("tp1"), Layout("tp2", tp=2), Layout("pp2", pp=2), Layout("dp2", dp=2)], ids=lambda layout: layout.name
)
def test_initial_weights_have_the_configs_spread_and_agree(layout: Layout, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "initializer_range": STD, "tie_word_embeddings": True}
    folder = save_model("qwen3_tied", tmp_path / "model", **sizes)
    ranks = rank_pool(layout.world).run(drawn_on_rank, folder, layout)
    layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    for name, tensor in ranks[0]["whole"].items():
        if "norm" in name:
            assert torch.equal(tensor, torch.ones_like(tensor)), name
            continue
        # the two projections that end in the residual stream are drawn narrower (Megatron's scaled_init_method_normal)
        narrow = (2 * layers) ** -0.5 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
        assert tensor.std().item() == pytest.approx(STD * narrow, rel=0.1), name
        assert abs(tensor.mean().item()) < 0.005, name
    own = [rank["own"] for rank in ranks]
    if layout.dp > 1:
        assert all(torch.equal(value, own[1][name]) for name, value in own[0].items())
    if layout.pp > 1:
        assert torch.equal(own[0]["embedding.word_embeddings.weight"], own[1]["output_layer.weight"])
        assert not torch.equal(own[0]["decoder.layers.0.mlp.linear_fc2.weight"], own[1]["decoder.layers.0.mlp.linear_fc2.weight"])
    if layout.tp > 1:
        for name in ("decoder.layers.0.mlp.linear_fc1.weight", "embedding.word_embeddings.weight"):
            assert not torch.equal(own[0][name], own[1][name]), name
