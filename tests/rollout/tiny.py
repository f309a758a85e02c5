"""Tiny random models of some families, and prompts of unequal length."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PreTrainedConfig, PreTrainedModel, Qwen2Config, Qwen3Config

VOCAB = 97
_SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": 5,
    "pad_token_id": 5,
}


def config(family: str, **changes: object) -> PreTrainedConfig:
    """A config of `family`; qwen3 is tied."""
    kinds = {
        "qwen3": lambda: Qwen3Config(**{**_SHAPE, "head_dim": 16, "tie_word_embeddings": True, **changes}),
        "qwen2": lambda: Qwen2Config(**{**_SHAPE, "tie_word_embeddings": False, **changes}),
        "llama": lambda: LlamaConfig(**{**_SHAPE, "tie_word_embeddings": False, **changes}),
        "mistral": lambda: MistralConfig(**{**_SHAPE, "tie_word_embeddings": False, **changes}),
    }
    return kinds[family]()


def oracle(model_config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """The model as Transformers builds and runs it, random weights (biases too)."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(model_config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, param in model.named_parameters():
            if name.endswith("bias"):
                param.normal_(std=0.2)
    return model


def weights(model: PreTrainedModel) -> list[tuple[str, torch.Tensor]]:
    """Every parameter once: a tied head is not named."""
    return [(name, param.detach().clone()) for name, param in model.named_parameters()]


def prompts(count: int, longest: int = 14, seed: int = 1) -> list[list[int]]:
    """Random prompts of 1 to `longest` tokens; the token ids 0 and 5 (the pad id of the configs) come up among them."""
    generator = torch.Generator().manual_seed(seed)
    out = []
    for _ in range(count):
        n = int(torch.randint(1, longest + 1, (1,), generator=generator))
        ids = torch.randint(0, VOCAB, (n,), generator=generator).tolist()
        ids[0] = [0, 5, ids[0]][int(torch.randint(0, 3, (1,), generator=generator))]
        out.append(ids)
    return out
