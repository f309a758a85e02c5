"""Which models the Hugging Face engine takes, and what it says about the others before training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from rlmca.engines.huggingface_setup import attention_errors, model_errors
from rlmca.transfer.hf_folder import HFFolderError
from tests.helpers.engine import hf_reference, random_batch
from tests.helpers.huggingface import hf_gradients_on_rank, make_hf_engine
from tests.helpers.models import SMALL, save_model

SIZES = {name: SMALL[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")}
OTHERS: dict[str, dict[str, Any]] = {
    "gpt2": {
        "vocab_size": 67,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 64,
        "resid_pdrop": 0,
        "embd_pdrop": 0,
        "attn_pdrop": 0,
    },
    "opt": {**SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0, "pad_token_id": 1},
    "gemma2": {**SIZES, "intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 4, "pad_token_id": 0},
    "phi3": {**SIZES, "intermediate_size": 48, "num_key_value_heads": 2, "pad_token_id": 0},
    "bloom": {"vocab_size": 67, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "mamba": {"vocab_size": 67, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4},
}
LATENT = {"intermediate_size": 48, "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 12,
          "qk_rope_head_dim": 8, "v_head_dim": 10}  # fmt: skip
OTHERS |= {kind: {**SIZES, **LATENT} for kind in ("youtu", "minicpm3")}


def save_other(kind: str, folder: Path, **changes: Any) -> Path:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**OTHERS.get(kind, SIZES), **changes}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)  # zeros and ones would hide what is left out
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", list(OTHERS))
def test_other_architectures_give_the_numbers_of_transformers(kind: str, tmp_path: Path) -> None:
    """Windows, learned positions, ALiBi, tied heads, no attention at all: right padding changes nothing."""
    folder, batch = save_other(kind, tmp_path / kind), random_batch(rows=5)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    if model.get_input_embeddings().padding_idx is not None:
        model.get_input_embeddings().padding_idx = None
    ours, theirs = hf_gradients_on_rank(folder, {"micro_batch": 3}, batch), hf_reference(model, batch)
    assert abs(ours["loss"] - theirs["loss"]) < 1e-5
    torch.testing.assert_close(ours["logp_BT"], theirs["logp_BT"], rtol=0, atol=2e-5)
    for name, expected in theirs["gradients"].items():
        torch.testing.assert_close(ours["gradients"][name], expected, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
    engine = make_hf_engine(folder)
    engine.save(tmp_path / "checkpoint")
    assert set(load_file(tmp_path / "checkpoint" / "model.safetensors")) == set(load_file(folder / "model.safetensors"))
    engine.load(tmp_path / "checkpoint")


# ---- folders that do not hold their model


def change(folder: Path, *, drop: str = "", **tensors: torch.Tensor) -> None:
    path = folder / "model.safetensors"
    state = {name: value for name, value in load_file(path).items() if name != drop}
    save_file({**state, **tensors}, path, metadata={"format": "pt"})


def refusal(folder: Path, **settings: Any) -> str:
    with pytest.raises(HFFolderError) as caught:
        make_hf_engine(folder, **settings)
    return str(caught.value)


def test_tensors_that_do_not_fit_are_named(tmp_path: Path) -> None:
    folder = save_model("qwen3_untied", tmp_path / "model")
    change(folder, drop="lm_head.weight")
    assert refusal(folder).endswith("missing: lm_head.weight")
    folder = save_model("qwen3_untied", tmp_path / "more")
    change(folder, **{"model.extra.weight": torch.zeros(2), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)})
    assert refusal(folder).endswith("unexpected: model.extra.weight"), "tables that old folders store are computed"
    folder = save_model("qwen3_untied", tmp_path / "shape")
    change(folder, **{"model.norm.weight": torch.zeros(31)})
    assert refusal(folder).endswith("model.norm.weight has shape (31,), config.json says (32,)")


def test_a_classifier_is_no_language_model(tmp_path: Path) -> None:
    for tied in (True, False):
        config = AutoConfig.for_model("qwen3", **{**SMALL, "head_dim": 16, "tie_word_embeddings": tied, "num_labels": 3})
        AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / str(tied))
        text = refusal(tmp_path / str(tied))
        assert "score.weight" in text and ("lm_head.weight" in text) == (not tied)


def test_a_tied_head_may_be_stored_when_it_is_the_embedding(tmp_path: Path) -> None:
    folder = save_model("qwen3_tied", tmp_path / "model")
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    change(folder, **{"lm_head.weight": embedding.clone()})
    assert "lm_head.weight" not in make_hf_engine(folder).weights().shapes()
    change(folder, **{"lm_head.weight": embedding + 1})
    assert "lm_head.weight differs from model.embed_tokens.weight; write tie_word_embeddings: false" in refusal(folder)


def test_pickled_and_absent_weights_are_named(tmp_path: Path) -> None:
    folder = save_model("llama", tmp_path / "model")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "pickled .bin weights are not read" in refusal(folder)


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize(
    ("kind", "sizes", "moved"),
    [
        ("qwen3_moe", {**SMALL, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}, "experts"),
        ("gpt_neox", {**SIZES, "intermediate_size": 48}, "embed_out"),
    ],
)
def test_models_whose_weights_transformers_fuses_or_renames_are_refused(
    kind: str, sizes: dict[str, Any], moved: str, fresh: bool, tmp_path: Path
) -> None:
    AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes)).save_pretrained(tmp_path / "model")
    text = refusal(tmp_path / "model", fresh=fresh)
    assert moved in text and "fus" in text and "such models are not in this version" in text


CODE = """
import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
class TinyConfig(PreTrainedConfig):
    model_type = "tiny_test"
    def __init__(self, vocab_size=67, hidden_size=8, buffer=False, **kwargs):
        super().__init__(**kwargs)
        self.vocab_size, self.hidden_size, self.buffer = vocab_size, hidden_size, buffer
class TinyForCausalLM(PreTrainedModel):
    config_class = TinyConfig
    def __init__(self, config):
        super().__init__(config)
        self.embed, self.head = nn.Embedding(config.vocab_size, config.hidden_size), nn.Linear(config.hidden_size, config.vocab_size)
        if config.buffer:
            self.register_buffer("bias", torch.zeros(config.vocab_size))
        self.post_init()
    def forward(self, input_ids, logits_to_keep=0):
        hidden = self.embed(input_ids)
        return CausalLMOutputWithPast(logits=self.head(hidden if not logits_to_keep else hidden[:, -logits_to_keep:]))
"""


@pytest.mark.parametrize("buffer", [False, True])
def test_code_that_comes_with_a_model_runs_only_by_request(buffer: bool, tmp_path: Path) -> None:
    """Its own meaning of logits_to_keep (a number) is not relied on; weights in buffers are refused."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "modeling_tiny.py").write_text(CODE)
    auto = {"AutoConfig": "modeling_tiny.TinyConfig", "AutoModelForCausalLM": "modeling_tiny.TinyForCausalLM"}
    config = {"model_type": "tiny_test", "auto_map": auto, "buffer": buffer}
    (folder / "config.json").write_text(json.dumps(config))
    weights = {"embed.weight": torch.randn(67, 8), "head.weight": torch.randn(67, 8), "head.bias": torch.randn(67)}
    save_file({**weights, **({"bias": torch.zeros(67)} if buffer else {})}, folder / "model.safetensors", metadata={"format": "pt"})
    assert "trust_remote_code" in refusal(folder) and "trust_remote_code: true" in model_errors(config, trust_remote_code=False)[0]
    assert model_errors(config, trust_remote_code=True) == []
    if buffer:
        assert "bias" in refusal(folder, trust_remote_code=True)
        return
    batch = random_batch(rows=3)
    engine = make_hf_engine(folder, trust_remote_code=True)
    logp_BTV = torch.log_softmax(weights["embed.weight"][batch.ids_BT] @ weights["head.weight"].T + weights["head.bias"], -1)
    expected = logp_BTV[:, :-1].gather(2, batch.ids_BT[:, 1:, None])[..., 0] * batch.mask_BT[:, 1:]
    torch.testing.assert_close(engine.log_probs(batch).logp_BT[:, 1:], expected, rtol=0, atol=1e-5)
    engine.save(tmp_path / "checkpoint")
    assert (tmp_path / "checkpoint" / "modeling_tiny.py").read_text() == CODE


def test_what_config_json_alone_shows() -> None:
    assert model_errors({"model_type": "qwen3"}, trust_remote_code=False) == []
    config = {"model_type": "mamba9", "quantization_config": {"quant_method": "fp8"}, "output_router_logits": True}
    found = model_errors(config, trust_remote_code=False)
    assert len(found) == 3 and "no causal language model of model_type 'mamba9'" in found[0]


@pytest.mark.parametrize("kernel", ["fa2", "fa3"])
def test_flash_attention_is_taken_only_where_it_is(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers.utils

    name = f"is_flash_attn_{kernel[-1]}_available"
    monkeypatch.setattr(transformers.utils, name, lambda: False)
    assert [kernel in text and "write sdpa" in text for text in attention_errors(kernel)] == [True]
    monkeypatch.setattr(transformers.utils, name, lambda: True)
    assert attention_errors(kernel) == attention_errors("auto") == attention_errors("disabled") == []
