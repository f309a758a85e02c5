"""What PEFT makes of adapters of experts, against the merged model: it reads them, or leaves out what the documentation says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from rlmca.layouts import ModelLayout
from rlmca.layouts.adapters import AdapterLayout
from rlmca.transfer.hf_folder import read_config
from rlmca.transfer.peft_limits import peft_limit
from tests.helpers.engine import random_batch
from tests.helpers.lora import ALL, ALPHA, LEAVES, PREFIX, RANK, draw_adapter, hf_log_probs, merged_model, save_adapter
from tests.helpers.models import make_model, save_model

LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
ONLY_EXPERTS = {"qwen3_moe": {"mlp_only_layers": []}, "qwen2_moe": {"mlp_only_layers": []}, "deepseek_v3": {"first_k_dense_replace": 0}}
DENSE_TOO: dict[str, dict[str, Any]] = {"qwen3_moe": {"mlp_only_layers": [0]}, "qwen2_moe": {"mlp_only_layers": [0]}}
DENSE_TOO["deepseek_v3"] = {"first_k_dense_replace": 1}
EXPERTS, OUTSIDE, REFUSED, UPPER = "the experts", "outside of experts", "refuses", "whose down projections have none"
CASES = [
    ("qwen3_moe", ALL, ONLY_EXPERTS, None),
    ("qwen3_moe", ALL, DENSE_TOO, OUTSIDE),
    ("qwen3_moe", LEAVES["attention"], DENSE_TOO, None),
    ("qwen3_moe", ("down_proj",), ONLY_EXPERTS, None),
    ("qwen3_moe", ("down_proj",), DENSE_TOO, OUTSIDE),
    ("qwen3_moe", ("up_proj",), ONLY_EXPERTS, REFUSED),
    ("qwen3_moe", ("gate_proj", "down_proj"), ONLY_EXPERTS, REFUSED),
    ("qwen3_moe", ("mlp.up_proj",), DENSE_TOO, REFUSED),
    ("qwen3_moe", ("mlp.down_proj",), DENSE_TOO, OUTSIDE),
    ("qwen3_moe", ("gate_proj", "up_proj"), ONLY_EXPERTS, UPPER),
    ("qwen2_moe", ALL, ONLY_EXPERTS, EXPERTS),
    ("qwen2_moe", ALL, DENSE_TOO, EXPERTS),
    ("qwen2_moe", LEAVES["attention"], DENSE_TOO, None),
    ("qwen2_moe", ("shared_expert.up_proj",), ONLY_EXPERTS, None),
    ("qwen2_moe", ("up_proj",), ONLY_EXPERTS, REFUSED),
    ("qwen2_moe", ("gate_proj", "up_proj"), ONLY_EXPERTS, EXPERTS),
    ("mixtral", (*LEAVES["attention"], "w1", "w2", "w3"), {}, None),
    ("mixtral", ("w2",), {}, None),
    ("mixtral", ("w3",), {}, REFUSED),
    ("mixtral", ("w1", "w3"), {}, UPPER),
    ("deepseek_v3", (*LATENT, *LEAVES["mlp"]), ONLY_EXPERTS, OUTSIDE),
    ("deepseek_v3", (*LATENT, *LEAVES["mlp"]), DENSE_TOO, OUTSIDE),
    ("deepseek_v3", LATENT, DENSE_TOO, None),
    ("deepseek_v3", ("shared_experts.down_proj",), ONLY_EXPERTS, OUTSIDE),
]


@pytest.mark.parametrize(
    ("family", "targets", "layers", "limit"), CASES, ids=lambda value: "+".join(value) if isinstance(value, tuple) else None
)
def test_peft_reads_what_the_documentation_says(
    family: str, targets: tuple[str, ...], layers: dict[str, Any], limit: str | None, tmp_path: Path
) -> None:
    """A PEFT that reads more fails here: then the sentence can go."""
    over = {"num_hidden_layers": 2, **layers.get(family, {})}
    model, base = save_model(family, tmp_path / "model", **over), make_model(family, **over)
    said = peft_limit(AdapterLayout(ModelLayout(read_config(model)), targets, RANK))
    assert said is None if limit is None else said is not None and limit in said

    drawn = draw_adapter(base, tuple(target.rsplit(".", 1)[-1] for target in targets))
    stems = {name: "." + name.removeprefix(PREFIX).split(".lora_")[0] for name in drawn}
    tensors = {name: tensor for name, tensor in drawn.items() if stems[name].endswith(tuple(f".{target}" for target in targets))}
    adapter = save_adapter(tmp_path / "adapter", tensors, targets)
    if limit == REFUSED:
        with pytest.raises(ValueError, match="without also targeting|expected a non-empty list"):
            peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), str(adapter))
        return
    read = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), str(adapter))
    kept = {name: tensor for name, tensor in tensors.items() if limit is None or not left_out(stems[name], limit)}
    expected = hf_log_probs(merged_model(make_model(family, **over), kept, ALPHA / RANK) if kept else base, random_batch())
    torch.testing.assert_close(hf_log_probs(read, random_batch()), expected, rtol=0, atol=1e-5)
    if limit is not None:
        whole = hf_log_probs(merged_model(make_model(family, **over), tensors, ALPHA / RANK), random_batch())
        assert (whole - expected).abs().max() > 1e-3, "what is left out shows"


def left_out(stem: str, limit: str) -> bool:
    """Whether the sentence says that PEFT has no adapter of this layer."""
    feed_forward = stem.endswith(("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"))
    expert = ".experts." in stem
    return feed_forward and {EXPERTS: expert, OUTSIDE: not expert, UPPER: True}[limit]
