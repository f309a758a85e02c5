"""Layers over pipeline chunks: row A2 of the known faults, and every way to write a split."""

from __future__ import annotations

import pytest

from rlmca.layouts import LayoutError, Topology
from rlmca.layouts.pipeline import chunk_sizes, megatron_layout, pipeline_topology
from rlmca.layouts.plan import ModelLayout
from tests.helpers.models import make_model


def ids(num_layers: int, topology: Topology) -> list[list[list[int]]]:
    """[stage][chunk] -> numbers of the layers."""
    return [[list(topology.layers_of(pp, num_layers, chunk)) for chunk in range(topology.vpp)] for pp in range(topology.pp)]


def test_a2_sizes_that_do_not_add_up_are_named() -> None:
    with pytest.raises(LayoutError, match="holds 24 layers, the model has 48"):
        chunk_sizes(48, 2, layout="Et*11|t*13L")
    with pytest.raises(LayoutError, match="30 layers do not split evenly"):
        chunk_sizes(30, 4)
    with pytest.raises(LayoutError, match="30 layers do not split evenly over 4 stages"):
        Topology(pp=4).chunk_layers(30)


def test_a2_unequal_stages_hold_every_layer_once() -> None:
    assert chunk_sizes(48, 4, layout="Et*11|t*12|t*12|t*13L") == (11, 12, 12, 13)
    topology = pipeline_topology(14, tp=1, pp=4, vpp=2, layout="Ett|tt|tt|t|tt|tt|tt|tL")
    found = ids(14, topology)
    assert found == [[[0, 1], [7, 8]], [[2, 3], [9, 10]], [[4, 5], [11, 12]], [[6], [13]]]
    assert sorted(layer for stage in found for chunk in stage for layer in chunk) == list(range(14))


@pytest.mark.parametrize(
    ("num_layers", "pp", "vpp", "options", "sizes"),
    [
        (8, 2, 1, {}, (4, 4)),
        (8, 2, 2, {}, (2, 2, 2, 2)),
        (7, 2, 2, {"embedding_counts": True}, (1, 2, 2, 2)),
        (7, 2, 2, {"loss_counts": True}, (2, 2, 2, 1)),
        (6, 2, 2, {"embedding_counts": True, "loss_counts": True}, (1, 2, 2, 1)),
        (2, 4, 1, {"embedding_counts": True, "loss_counts": True}, (0, 1, 1, 0)),
        (7, 2, 1, {"layout": "Et*3, t | t*3 L"}, (4, 3)),
        (9, 2, 2, {"layout": "Et|(tt|)*2t*4L"}, (1, 2, 2, 4)),
    ],
)
def test_ways_to_write_a_split(num_layers: int, pp: int, vpp: int, options: dict[str, object], sizes: tuple[int, ...]) -> None:
    assert chunk_sizes(num_layers, pp, vpp, **options) == sizes  # type: ignore[arg-type]
    rows = megatron_layout(sizes)
    assert rows[0][0] == "embedding" and rows[-1][-1] == "loss"
    assert [row.count("decoder") for row in rows] == list(sizes)


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ("tt|ttL", "write E \\(embedding\\) first"),
        ("Ett|tt", "L \\(the head\\) last"),
        ("Ettx|ttL", "t for each layer"),
        ("Ett|ttmL", "multi-token prediction"),
        ("Ett|t|tL", "has 3 chunks"),
        ("Ett|ttt L", "holds 5 layers, the model has 4"),
    ],
)
def test_layouts_that_make_no_sense(layout: str, words: str) -> None:
    with pytest.raises(LayoutError, match=words):
        chunk_sizes(4, 2, layout=layout)


def test_chunks_need_a_pipeline() -> None:
    with pytest.raises(LayoutError, match="pipeline_model_parallel_size 1: only a pipeline has chunks"):
        chunk_sizes(4, 1, 2)


@pytest.mark.parametrize("family", ["qwen3_tied", "llama"])
@pytest.mark.parametrize("layout", [None, "E|tt|t|tL", "Ett|t|t|L"])
def test_every_element_has_one_place_whatever_the_chunks(family: str, layout: str | None) -> None:
    """The plan of a pipeline with chunks covers every Hugging Face tensor exactly once, as the plan of one rank does."""
    model = ModelLayout(make_model(family, num_hidden_layers=4).config.to_dict())
    topology = pipeline_topology(4, tp=2, pp=2, vpp=2, layout=layout)
    for name, plan in model.hf_plan(topology).items():
        total = 1
        for side in plan.shape:
            total *= side
        covered = 0
        for piece in plan.pieces:
            volume = 1
            for start, end in piece.hf_box:
                volume *= end - start
            covered += volume
        assert covered == total, name
    names = [name for coord in topology.coords() for name in model.rank_plan(topology, coord)]
    assert all(name.split(":", 1)[0] in ("0", "1") for name in names)
