"""The plan against shards that others made: a checkpoint written by mcore_adapter, and Megatron's own modules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rlmca.layouts import Coord, ModelLayout, Topology
from rlmca.layouts.boxes import full
from rlmca.transfer.hf_folder import open_hf_folder
from rlmca.transfer.load import index, load_ranks
from tests.helpers.config_mutations import base_config
from tests.helpers.ranks import rank_pool
from tests.helpers.transfer import dirty, layout_of

FIXTURE = Path(__file__).parents[1] / "fixtures" / "mcore_adapter_qwen2"


def foreign(coord: Coord) -> dict[str, torch.Tensor]:
    return torch.load(FIXTURE / f"mp_rank_{coord.tp:02d}_{coord.pp:03d}.pt", weights_only=True)["model"]


def test_loading_makes_the_shards_that_mcore_adapter_wrote() -> None:
    layout, topology = layout_of(FIXTURE / "hf", "te"), Topology(tp=2, pp=2)
    for coord in topology.coords():
        params, want = dirty(layout, topology, coord, torch.bfloat16), foreign(coord)
        load_ranks(FIXTURE / "hf", layout, topology, coord, params)
        assert params.keys() == want.keys()
        for name, tensor in want.items():
            assert torch.equal(params[name].view(torch.int16), tensor.view(torch.int16)), name


def test_the_plan_reads_them_back_to_the_hf_tensors() -> None:
    layout, topology = layout_of(FIXTURE / "hf", "te"), Topology(tp=2, pp=2)
    ranks = {coord: foreign(coord) for coord in topology.coords()}
    with open_hf_folder(FIXTURE / "hf") as folder:
        assert folder.shapes == layout.hf_tensors()
        for name, plan in layout.hf_plan(topology).items():
            back = torch.empty(plan.shape, dtype=torch.bfloat16)
            for piece in plan.pieces:
                back[index(piece.hf_box)] = ranks[piece.coord][piece.param][index(piece.param_box)]
            assert torch.equal(back.view(torch.int16), folder.read(name, full(plan.shape)).view(torch.int16)), name


def megatron_parameters(config: dict[str, Any], topology: Topology) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a GPTModel of this rank, built by Megatron from our keywords with its own local layers."""
    import os

    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    from rlmca.parallel import megatron

    world = topology.tp * topology.pp
    megatron.start(tp=topology.tp, pp=topology.pp, rank=int(os.environ.get("RANK", 0)), world_size=world)
    layout = ModelLayout(config)
    kwargs = dict(layout.megatron.config)
    kwargs["activation_func"] = getattr(torch.nn.functional, kwargs["activation_func"])
    transformer = TransformerConfig(
        **kwargs,
        tensor_model_parallel_size=topology.tp,
        pipeline_model_parallel_size=topology.pp,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
    )
    model = GPTModel(
        config=transformer,
        transformer_layer_spec=get_gpt_layer_local_spec(qk_layernorm=transformer.qk_layernorm, normalization="RMSNorm"),
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        **{**layout.megatron.model, "vocab_size": layout.padded_vocab(topology)},
    )
    return {name: tuple(p.shape) for name, p in model.named_parameters()}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("topology", [Topology(tp=2, pp=2, vocab_multiple=16), Topology(pp=2)], ids=str)
@pytest.mark.parametrize(
    ("family", "extra"), [("qwen3", {}), ("qwen2", {}), ("llama", {}), ("llama", {"attention_bias": True, "mlp_bias": True})]
)
@pytest.mark.serial
def test_names_and_shapes_are_those_of_megatrons_modules(family: str, extra: dict[str, Any], topology: Topology, tied: bool) -> None:
    config = {**base_config(family), **extra, "tie_word_embeddings": tied}
    results = rank_pool(topology.tp * topology.pp).run(megatron_parameters, config, topology)
    layout = ModelLayout(config)
    for coord in topology.coords():
        plan = layout.rank_plan(topology, coord)
        assert results[coord.tp + topology.tp * coord.pp] == {name: p.shape for name, p in plan.items()}, coord
