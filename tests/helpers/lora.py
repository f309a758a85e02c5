"""Adapters for tests: drawn at random, merged by hand, and the gradients that the chain rule gives them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from rlmca.types import Batch
from tests.helpers.engine import hf_reference
from tests.helpers.training import batches, learning_rate

PREFIX = "base_model.model."
RANK, ALPHA = 3, 7
LEAVES = {
    "attention": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
}
ALL = (*LEAVES["attention"], *LEAVES["mlp"])


def on_disk(model: Any) -> dict[str, Tensor]:
    """The model's weights under the names of its files."""
    stored = model.state_dict()
    own = dict(model.named_parameters()) | {name: buffer for name, buffer in model.named_buffers() if name in stored}
    return dict(revert_weight_conversion(model, {name: tensor.detach() for name, tensor in own.items()}))


def draw_adapter(model: Any, targets: tuple[str, ...] = ALL, *, seed: int = 3) -> dict[str, Tensor]:
    """A and B, neither of them zero, of every linear layer that `targets` names, under PEFT's names."""
    draw = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, weight in on_disk(model).items():
        stem = name.removesuffix(".weight")
        if stem.rsplit(".", 1)[-1] in targets and weight.dim() == 2:
            outputs, inputs = weight.shape
            tensors[f"{PREFIX}{stem}.lora_A.weight"] = torch.randn(RANK, inputs, generator=draw) * 0.1
            tensors[f"{PREFIX}{stem}.lora_B.weight"] = torch.randn(outputs, RANK, generator=draw) * 0.1
    return tensors


def save_adapter(folder: Path, tensors: dict[str, Tensor], targets: tuple[str, ...] = ALL, **config: Any) -> Path:
    """The files that PEFT would have written."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    own = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": ALPHA, "target_modules": list(targets), **config}
    (folder / "adapter_config.json").write_text(json.dumps(own))
    return folder


def merged_model(model: Any, tensors: dict[str, Tensor], scaling: float) -> Any:
    """The model itself, W + scaling * B A in the place of W, computed in float64. In place."""
    with torch.no_grad():
        live = on_disk(model)
        merged = dict(live)
        for name, a in tensors.items():
            if ".lora_A." in name:
                own, b = name.removeprefix(PREFIX).replace(".lora_A.weight", ".weight"), tensors[name.replace(".lora_A.", ".lora_B.")]
                merged[own] = (live[own].double() + scaling * (b.double() @ a.double())).to(live[own].dtype)
    return type(model).from_pretrained(None, config=model.config, state_dict=merged, dtype=torch.float32).eval()


def reference(model: Any, tensors: dict[str, Tensor], batch: Batch, scaling: float = ALPHA / RANK) -> dict[str, Any]:
    """What Transformers computes with the merged weights, and gradients of the adapter: with y = (W + s B A) x the chain rule
    gives dA = s B^T dW and dB = s dW A^T."""
    found = hf_reference(merged_model(model, tensors, scaling), batch)
    gradients: dict[str, Tensor] = {}
    for name, a in tensors.items():
        if ".lora_A." in name:
            b_name = name.replace(".lora_A.", ".lora_B.")
            of_weight = found["gradients"][name.removeprefix(PREFIX).replace(".lora_A.weight", ".weight")]
            gradients[name] = scaling * tensors[b_name].T @ of_weight
            gradients[b_name] = scaling * of_weight @ a.T
    return {**found, "gradients": gradients}


def hf_log_probs(model: Any, batch: Batch) -> Tensor:
    """[B, T] of the batch's targets, zero elsewhere."""
    with torch.no_grad():
        return _log_probs(model, batch) * batch.mask_BT


def hf_loss(model: Any, batch: Batch) -> Tensor:
    """Mean over all targets of the batch."""
    return -(_log_probs(model, batch) * batch.mask_BT).sum() / batch.mask_BT.sum()


def _log_probs(model: Any, batch: Batch) -> Tensor:
    attention_BT = (torch.arange(batch.ids_BT.shape[1])[None] < batch.length_B[:, None]).long()
    logits = model(input_ids=batch.ids_BT, attention_mask=attention_BT).logits[:, :-1]
    logp_BT = torch.log_softmax(logits, -1).gather(2, batch.ids_BT[:, 1:, None])[..., 0]
    return torch.nn.functional.pad(logp_BT, (1, 0))


def train_adapter_plainly(model: Any, tensors: dict[str, Tensor], steps: int, *, scaling: float) -> tuple[list[dict[str, float]], Any]:
    """Steps of torch's AdamW on A and B, their gradients by the chain rule from Transformers' own; (metrics, last tensors)."""
    own = {name: t.clone().requires_grad_() for name, t in tensors.items()}
    optimizer = torch.optim.AdamW(own.values(), lr=0.0, weight_decay=0.0)
    metrics = []
    for step, batch in enumerate(batches(8, steps)):
        found = reference(model, {name: t.detach() for name, t in own.items()}, batch, scaling)
        for name, parameter in own.items():
            parameter.grad = found["gradients"][name].clone()
        norm = torch.nn.utils.clip_grad_norm_(own.values(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        optimizer.step()
        metrics.append({"loss": found["loss"], "grad_norm": float(norm)})
    return metrics, {name: t.detach() for name, t in own.items()}
