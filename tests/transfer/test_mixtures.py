"""Experts one by one and stacked: load, export, rewrite and sync, each bit by bit, against what Transformers writes and reads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlmca.layouts import Form, Topology
from rlmca.transfer.convert.rewrite import rewrite_hf
from rlmca.transfer.export import export_hf
from rlmca.transfer.hf_folder import HFFolderError
from rlmca.transfer.module import copy_to_module
from tests.helpers.models import MIXTURES, make_model
from tests.helpers.transfer import layout_of, live, stored

FORMS: tuple[Form, ...] = ("single", "stacked")
IDS = torch.arange(1, 20)[None]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, Form], Path]:
    written = {}
    for family in MIXTURES:
        for form in FORMS:
            written[family, form] = tmp_path_factory.mktemp(f"{family}_{form}")
            make_model(family).save_pretrained(written[family, form], save_original_format=form == "single")
    return written


def same(have: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert have.keys() == want.keys()
    for name in want:
        assert torch.equal(have[name], want[name]), name


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", list(MIXTURES))
def test_an_export_has_the_form_of_its_source(family: str, form: Form, folders: dict[tuple[str, Form], Path], tmp_path: Path) -> None:
    source = folders[family, form]
    weights = live(source, Topology(vocab_multiple=32), torch.float32)
    assert weights.layout.form == form
    export_hf(weights, tmp_path / "out", source, shard_gb=2e-5)
    same(stored(tmp_path / "out"), stored(source))
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 1
    ours, theirs = (AutoModelForCausalLM.from_pretrained(folder).eval() for folder in (tmp_path / "out", folders[family, "single"]))
    with torch.no_grad():
        assert torch.equal(ours(IDS).logits, theirs(IDS).logits)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", list(MIXTURES))
def test_a_rewritten_folder_has_the_form_of_its_source(
    family: str, form: Form, folders: dict[tuple[str, Form], Path], tmp_path: Path
) -> None:
    assert rewrite_hf(folders[family, form], tmp_path / "out", shard_gb=2e-5) == len(layout_of(folders[family, form]).hf_tensors())
    same(stored(tmp_path / "out"), stored(folders[family, form]))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", list(MIXTURES))
def test_a_module_synced_from_either_form_is_the_exported_model(
    family: str, form: Form, folders: dict[tuple[str, Form], Path], tmp_path: Path
) -> None:
    """As the local rollout engine does it after each step: the live weights, changed since they were loaded, into a module."""
    weights = live(folders[family, form], Topology(vocab_multiple=32), torch.float32)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in weights.params.values():
            parameter.add_(torch.randn(parameter.shape, generator=draw) * 0.05)
    view = weights.in_form("stacked")
    assert weights.in_form("stacked") is view and weights.in_form(form) is weights, "a plan is made once"
    module = make_model(family, seed=5)
    copy_to_module(view.tensors(), module)
    export_hf(weights, tmp_path / "out", folders[family, form])
    fresh = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    same(module.state_dict(), fresh.state_dict())
    with torch.no_grad():
        assert torch.equal(module(IDS).logits, fresh(IDS).logits)
        assert not torch.equal(module(IDS).logits, AutoModelForCausalLM.from_pretrained(folders[family, form])(IDS).logits)


def test_the_form_changes_nothing_for_a_model_without_experts(hf_folders: dict[str, Path]) -> None:
    weights = live(hf_folders["qwen2"], Topology(), torch.float32)
    assert weights.in_form("stacked") is weights


def test_a_folder_with_both_forms_is_refused(folders: dict[tuple[str, Form], Path], tmp_path: Path) -> None:
    from safetensors.torch import save_file

    both = stored(folders["qwen3_moe", "single"])
    name = "model.layers.0.mlp.experts.down_proj"
    both[name] = stored(folders["qwen3_moe", "stacked"])[name]
    (tmp_path / "config.json").write_bytes((folders["qwen3_moe", "single"] / "config.json").read_bytes())
    save_file(both, tmp_path / "model.safetensors")
    with pytest.raises(HFFolderError, match=r"unexpected: model.layers.0.mlp.experts.0"):
        live(tmp_path, Topology(), torch.float32)
