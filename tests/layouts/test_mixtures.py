"""Families with experts: names of both forms, every row needed, every element of every tensor in one place."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from rlmca.layouts import LayoutError, ModelLayout, Topology
from rlmca.layouts.families import FAMILIES
from tests.helpers.models import MIXTURES, make_model
from tests.helpers.shards import numbered

TOPOLOGIES = [Topology(), Topology(tp=2, ep=2, etp=1), Topology(ep=4), Topology(tp=1, ep=2, etp=2), Topology(pp=2, ep=8)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    """What Transformers itself writes: the names of published checkpoints, and the names of its modules."""
    written = {}
    for family in MIXTURES:
        for form in ("single", "stacked"):
            written[family, form] = tmp_path_factory.mktemp(f"{family}_{form}")
            make_model(family).save_pretrained(written[family, form], save_original_format=form == "single")
    return written


def at(box: tuple[tuple[int, int], ...]) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in box)


@pytest.mark.parametrize("form", ["single", "stacked"])
@pytest.mark.parametrize("family", list(MIXTURES))
def test_names_and_shapes_are_those_that_transformers_writes(family: str, form: str, folders: dict[tuple[str, str], Path]) -> None:
    theirs = {name: tuple(tensor.shape) for name, tensor in load_file(folders[family, form] / "model.safetensors").items()}
    layout = ModelLayout(make_model(family).config.to_dict())
    ours = layout.as_stored(theirs)
    assert ours.form == form and ours.hf_tensors() == theirs
    if form == "stacked":
        assert ours.hf_tensors() == {name: tuple(p.shape) for name, p in make_model(family).state_dict().items()}
    assert layout.as_stored([]).form == "single"
    layers = [int(found[1]) for name in ours.hf_tensors() if (found := re.search(r"layers\.(\d+)\.", name))]
    assert layers == sorted(layers)  # a shard of an export holds neighbouring layers


@pytest.mark.parametrize("family", list(MIXTURES))
def test_no_row_of_the_table_can_be_left_out(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row of a table is one that Transformers' model has: without it the names above are not all there."""
    table, config = FAMILIES[family], make_model(family).config.to_dict()
    whole = ModelLayout(config).hf_tensors().keys()
    for row in table.rows:
        if not row.when(table.megatron(config)):
            continue
        less = dataclasses.replace(table, rows=tuple(other for other in table.rows if other is not row))
        with monkeypatch.context() as patch:
            patch.setattr("rlmca.layouts.plan.family_of", lambda _, less=less: less)
            assert ModelLayout(config).hf_tensors().keys() < whole, row.megatron


@given(st.sampled_from(list(MIXTURES)), st.sampled_from(TOPOLOGIES), st.sampled_from(["single", "stacked"]))
def test_every_element_is_written_once_and_read_once(family: str, topology: Topology, form: str) -> None:
    layout = ModelLayout(make_model(family).config.to_dict(), form=form)  # type: ignore[arg-type]
    shapes = layout.hf_tensors()
    for coord in topology.coords():
        for name, param in layout.rank_plan(topology, coord).items():
            writes = np.zeros(param.shape, int)
            for hf, src, dst in param.copies:
                assert all(0 <= a < b <= n for (a, b), n in zip(src, shapes[hf], strict=True))
                inner = src[-len(dst) :]
                assert [b - a for a, b in inner] == [b - a for a, b in dst] and all(b - a == 1 for a, b in src[: -len(dst)])
                writes[at(dst)] += 1
            padded = name.startswith(("embedding.", "output_layer."))
            assert (writes == 1).all() or (padded and writes.max() == 1), (name, coord)
    for name, plan in layout.hf_plan(topology).items():
        reads = np.zeros(plan.shape, int)
        for piece in plan.pieces:
            reads[at(piece.hf_box)] += 1
        assert (reads == 1).all(), name


@pytest.mark.parametrize("family", list(MIXTURES))
def test_both_forms_put_the_same_numbers_into_the_same_parameters(family: str) -> None:
    """The stacked tensors made from the single ones by plain numpy, as Transformers' modules hold them: gate above up."""
    config = make_model(family).config.to_dict()
    single, stacked = ModelLayout(config), ModelLayout(config, form="stacked")
    one = numbered(single.hf_tensors())
    gate, up, down = ("w1", "w3", "w2") if family == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    inside = "block_sparse_moe" if family == "mixtral" else "mlp"
    other = {}
    for name in stacked.hf_tensors():
        found = re.fullmatch(r"(model\.layers\.\d+)\.mlp\.(experts\.gate_up_proj|experts\.down_proj|gate\.weight)", name)
        if found is None:
            other[name] = one[name]
        elif found[2] == "gate.weight":
            other[name] = one[f"{found[1]}.{inside}.gate.weight"]
        else:
            parts = (gate, up) if found[2].endswith("gate_up_proj") else (down,)
            experts = [[one[f"{found[1]}.{inside}.experts.{e}.{part}.weight"] for part in parts] for e in range(8)]
            other[name] = np.stack([np.concatenate(expert) for expert in experts])
    for topology in TOPOLOGIES:
        for coord in topology.coords():
            ours, theirs = single.rank_plan(topology, coord), stacked.rank_plan(topology, coord)
            assert ours.keys() == theirs.keys()
            for name in ours:
                filled = []
                for plan, source in ((ours[name], one), (theirs[name], other)):
                    filled.append(np.zeros(plan.shape, np.int64))
                    for hf, src, dst in plan.copies:
                        filled[-1][at(dst)] = source[hf][at(src)]
                np.testing.assert_array_equal(*filled, err_msg=f"{name} at {coord}")


def test_widths_that_do_not_split_are_named_as_the_config_names_them() -> None:
    shared = ModelLayout(make_model("qwen2_moe", shared_expert_intermediate_size=41).config.to_dict())
    with pytest.raises(LayoutError, match="shared_expert_intermediate_size is 41"):
        shared.check(Topology(tp=2))
    with pytest.raises(LayoutError, match="but intermediate_size is 48 and does not split"):
        ModelLayout(make_model("mixtral").config.to_dict()).check(Topology(etp=5))
