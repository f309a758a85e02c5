"""Models with experts on a real SGLang server: its log-probs are Transformers', before and after both kinds of update."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from rlmca.config import ConfigError
from rlmca.config.sglang import SyncOptions
from rlmca.rollout.base import Request, SamplingParams
from rlmca.rollout.sglang.engine import SglangEngine
from rlmca.rollout.sglang.mixtures import mixture_error
from rlmca.rollout.sglang.setup import served_model, sglang_engine
from tests.helpers.models import make_model, save_model
from tests.rollout.sglang.conftest import run_config

OWN: dict[str, dict[str, Any]] = {"qwen3_moe": {"mlp_only_layers": []}, "mixtral": {}}
REQUESTS = [Request([5, 9, 3, 7], [1, 2]), Request([1, 2, 3, 4, 5, 6, 8], [3, 4])]


def gap(engine: SglangEngine, model: PreTrainedModel) -> float:
    """Largest difference between the log-probs of sampled tokens and those of a plain forward."""
    gaps = []
    for request, replies in zip(REQUESTS, engine.generate(REQUESTS, SamplingParams(max_new_tokens=12)), strict=True):
        for reply in replies:
            ids = [*request.prompt_ids, *reply.ids]
            with torch.no_grad():
                logp = torch.log_softmax(model(torch.tensor([ids])).logits[0, :-1], -1)
            first = len(request.prompt_ids)
            gaps += [
                abs(float(logp[first + t - 1, token]) - ours) for t, (token, ours) in enumerate(zip(reply.ids, reply.logp, strict=True))
            ]
    return max(gaps)


@pytest.mark.serial
@pytest.mark.parametrize("family", [pytest.param("qwen3_moe", marks=pytest.mark.whole), "mixtral"])
def test_a_server_has_the_experts_of_its_folder_and_of_every_update(family: str, tmp_path: Path) -> None:
    folder = save_model(family, tmp_path / "start", **OWN[family])
    with sglang_engine(run_config(), folder, dtype=torch.float32, log_dir=tmp_path / "logs") as engine:
        assert gap(engine, make_model(family, **OWN[family])) < 1e-5
        for version, method in ((1, "disk"), (2, "tensor")):
            engine.sync = SyncOptions(method=method)
            new = save_model(family, tmp_path / method, seed=version, **OWN[family])
            engine.update_weights(load_file(new / "model.safetensors").items(), version)
            assert gap(engine, make_model(family, seed=version, **OWN[family])) < 1e-5
            assert gap(engine, make_model(family, **OWN[family])) > 1e-2, "the comparison sees other weights"


def test_what_servers_would_compute_otherwise_is_refused(tmp_path: Path) -> None:
    """With such models a real server answered with log-probs that were wrong by 0.3, and no word about it."""
    save_model("qwen3_moe", tmp_path / "dense_layer")
    with pytest.raises(ConfigError, match=r"mlp_only_layers \[1\].*rollout_engine: local"):
        served_model(tmp_path / "dense_layer", None)
    make_model("mixtral").save_pretrained(tmp_path / "stacked", save_original_format=False)
    with pytest.raises(ConfigError, match=r"experts of a layer in one tensor.*save_pretrained"):
        served_model(tmp_path / "stacked", None)
    assert "decoder_sparse_step 2" in (mixture_error({"model_type": "qwen3_moe", "decoder_sparse_step": 2}, []) or "")
    assert mixture_error({"model_type": "qwen3_moe", "mlp_only_layers": None}, ["model.layers.0.mlp.experts.0.up_proj.weight"]) is None
    assert mixture_error({"model_type": "gpt_oss"}, ["model.layers.0.mlp.experts.gate_up_proj"]) is None
