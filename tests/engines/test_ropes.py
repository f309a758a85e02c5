"""Scaled rotary embeddings in a whole model: loss, log-probs and every gradient equal Transformers' on several layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlmca.layouts import ModelLayout
from tests.helpers.engine import Layout, assert_same_numbers, gradients_on_rank, hf_reference, random_batch
from tests.helpers.models import make_model, save_model
from tests.helpers.ranks import rank_pool

pytestmark = pytest.mark.serial
OLD = {"original_max_position_embeddings": 8}
"""Shorter than the rows: every branch of a scaling is at work."""
LLAMA3: dict[str, Any] = {"rope_type": "llama3", "rope_theta": 100.0, "factor": 8.0, "low_freq_factor": 0.5, "high_freq_factor": 3.0, **OLD}
YARN: dict[str, Any] = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "beta_fast": 2, "beta_slow": 0.5, **OLD}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama_linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 2.5}}),
    "llama_llama3": ("llama", {"rope_parameters": LLAMA3, "head_dim": 16}),
    "qwen2_yarn": ("qwen2", {"rope_parameters": YARN}),
    "qwen3_yarn": ("qwen3_tied", {"rope_parameters": YARN | {"attention_factor": 0.7, "truncate": False}}),
    "mistral_yarn": ("mistral", {"rope_parameters": YARN}),
    "qwen3_moe_yarn": ("qwen3_moe", {"rope_parameters": YARN}),
}
LAYOUTS = [
    Layout("one"),
    Layout("packed", packing=True, max_tokens=20),
    Layout("tp2_sp", tp=2, sp=True, etp=1),
    Layout("pp2", pp=2),
    Layout("cp2_packed", cp=2, packing=True, micro_batch=4),
    Layout("cp2_a2a", cp=2, options={"cp_comm_type": "a2a"}),
]
IN_CI = {
    "llama_linear": ("one",), "llama_llama3": ("tp2_sp", "cp2_packed"), "qwen2_yarn": ("packed", "pp2"),
    "qwen3_yarn": ("tp2_sp", "cp2_packed"), "mistral_yarn": ("cp2_a2a",), "qwen3_moe_yarn": ("one",),
}  # fmt: skip


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        pytest.param(layout, name, id=f"{layout.name}-{name}", marks=[] if layout.name in IN_CI[name] else pytest.mark.whole)
        for name in MODELS
        for layout in LAYOUTS
    ],
)
def test_numbers_equal_transformers(layout: Layout, name: str, tmp_path: Path) -> None:
    family, changes = MODELS[name]
    folder = save_model(family, tmp_path, **changes)
    ours = rank_pool(layout.world).run(gradients_on_rank, folder, layout, random_batch())[0]
    theirs = hf_reference(make_model(family, **changes), random_batch())
    assert_same_numbers(ours, theirs)
    plain = hf_reference(make_model(family, rope_parameters={"rope_type": "default", "rope_theta": 100.0}), random_batch())
    if "head_dim" not in changes:
        assert (plain["logp_BT"] - theirs["logp_BT"]).abs().max() > 1e-3, "the scaling shows nothing"


def test_a_folder_keeps_the_scaling_that_it_came_with(tmp_path: Path) -> None:
    """Both spellings of one table are one model."""
    table = {key: value for key, value in YARN.items() if key != "rope_theta"}
    config = make_model("qwen2", rope_parameters=YARN).config.to_dict()
    older = {**config, "rope_parameters": None, "rope_theta": 100.0, "rope_scaling": table}
    oldest = {**older, "rope_scaling": {"type": "yarn", **{key: value for key, value in table.items() if key != "rope_type"}}}
    assert ModelLayout(config).megatron == ModelLayout(older).megatron == ModelLayout(oldest).megatron
    assert ModelLayout(config).megatron.rope["attention_factor"] > 1.1
