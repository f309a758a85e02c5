"""`make gpu-check`: does one CUDA GPU compute what a CPU computes? Needs the package with torch and megatron-core, nothing else.

Two processes compute the same model on the same batch, one on the CPU and one on the GPU (a process has one platform),
and this one compares: loss and every gradient in float32 and bfloat16, padded and packed; the log-prob head's Triton
kernels against float64; offload and onload bit by bit; Transformer Engine's layers against torch's where it is
installed. Prints a table; exit status 1 when something is off, 2 without a CUDA device. `--device cpu` puts a CPU in the
GPU's place, to see that the check itself works.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 4099, "hidden_size": 256, "intermediate_size": 512,
    "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": False, "attention_bias": False,
}  # fmt: skip
ALLOWED = {"float32": 1e-4, "bfloat16": 5e-2}
"""Largest difference of a loss (absolute) and of a gradient (norm of the difference over its norm)."""
SECONDS = 100


@dataclass(frozen=True)
class Line:
    """A row of the table: what was compared, how far apart, how far it may be. `allowed` None: left out, `note` says why."""

    name: str
    found: float = 0.0
    allowed: float | None = None
    note: str = ""

    @property
    def failed(self) -> bool:
        return self.allowed is not None and not self.found <= self.allowed


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare a CUDA GPU with the CPU on a small model.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--worker", nargs=3, metavar=("WHO", "MODEL", "RESULT"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        who, model, result = arguments.worker
        torch.save(compute(who, Path(model)), result)
        return 0
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("gpu-check: torch finds no CUDA device here (a CPU build of torch finds none anywhere)", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(CONFIG))
        lines = compare(*(in_process(who, model, Path(folder) / f"{who}.pt", arguments.device) for who in ("cpu", "device")))
    return show(lines)


def in_process(who: str, model: Path, result: Path, device: str) -> Any:
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if who == "cpu" or device == "cpu" else {}
    env = {**os.environ, **hidden, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, __file__, "--worker", who, str(model), str(result)], env=env, check=True, timeout=SECONDS)
    return torch.load(result, weights_only=True)


# ---- in a worker


def compute(who: str, model: Path) -> dict[str, Any]:
    """Everything of one platform; the CPU, which comes first, also draws the weights."""
    from rlmca.parallel import megatron, platform

    parallel = megatron.start(rank=0, world_size=1)
    if who == "cpu":
        draw_weights(model, parallel)
    result: dict[str, Any] = {"cuda": platform.is_cuda()}
    for dtype in ALLOWED:
        for packed in (False, True):
            result[f"{dtype}, {'packed' if packed else 'padded'}"] = gradients(model, parallel, dtype, packed, "local")
    if who == "device":
        result["offload"] = offloaded(model, parallel)
        if platform.is_cuda():
            result["triton"] = triton_errors()
            if importlib.util.find_spec("transformer_engine") is not None:
                result["te"] = {
                    f"{dtype}, {'packed' if packed else 'padded'}": gradients(model, parallel, dtype, packed, "transformer_engine")
                    for dtype, packed in (("float32", False), ("bfloat16", False), ("bfloat16", True))
                }
    return result


def build(model: Path, parallel: Any, dtype: str, packed: bool, implementation: str, *, fresh: bool = False) -> Any:
    from rlmca.engines.megatron import MegatronEngine
    from rlmca.engines.options import EngineOptions
    from rlmca.layouts import ModelLayout
    from rlmca.models.options import BuildOptions
    from rlmca.models.spec import choose_spec

    options = EngineOptions(
        build=BuildOptions(dtype=getattr(torch, dtype), transformer_impl=implementation),  # type: ignore[arg-type]
        micro_batch_size=4,
        packing=packed,
    )
    layout = ModelLayout(json.loads((model / "config.json").read_text()), spec=choose_spec(implementation))
    return MegatronEngine(layout, parallel, options, folder=None if fresh else model)


def draw_weights(model: Path, parallel: Any) -> None:
    from safetensors.torch import save_file

    engine = build(model, parallel, "float32", False, "local", fresh=True)
    save_file({name: tensor.clone().contiguous() for name, tensor in engine.weights().tensors()}, model / "model.safetensors")


def batch() -> Any:
    from rlmca.types import batch_of_examples

    draw = torch.Generator().manual_seed(1)
    lengths = torch.randint(5, 120, (8,), generator=draw).tolist()
    ids = [torch.randint(0, CONFIG["vocab_size"], (n,), generator=draw).tolist() for n in lengths]  # type: ignore[call-overload]
    return batch_of_examples(ids, [[t % 3 > 0 for t in range(n)] for n in lengths])


def gradients(model: Path, parallel: Any, dtype: str, packed: bool, implementation: str) -> dict[str, Any]:
    """Loss and gradients under Hugging Face names, on the CPU."""
    from rlmca.algorithms.losses import SftLoss
    from rlmca.engines.microbatch import micro_batches
    from rlmca.engines.step import global_counts, reduce_metrics
    from rlmca.transfer.stream import hf_tensors

    engine, loss, own = build(model, parallel, dtype, packed, implementation), SftLoss(), batch()
    pieces = micro_batches(own, engine.cutting(4), parallel)
    value = reduce_metrics(engine.compute_gradients(pieces, loss, global_counts(own, loss, parallel)), parallel)["loss"]
    weights = engine.weights().with_params({name: p.main_grad for name, p in engine.named_parameters()})
    return {"loss": value, "gradients": {name: tensor.float().cpu().clone() for name, tensor in hf_tensors(weights)}}


def offloaded(model: Path, parallel: Any) -> float:
    """Largest difference that moving everything to the host and back between steps makes."""
    from rlmca.algorithms.losses import SftLoss

    after = []
    for moves in (False, True):
        engine = build(model, parallel, "bfloat16", False, "local")
        for _ in range(3):
            engine.train_batch(batch(), SftLoss(), 1e-3)
            if moves:
                engine.offload()
                engine.onload()
        after.append({name: tensor.float().cpu().clone() for name, tensor in engine.weights().tensors()})
    return max(float((after[0][name] - after[1][name]).abs().max()) for name in after[0])


def triton_errors() -> dict[str, tuple[float, float]]:
    """(error of the Triton path, of the plain one) against float64, by type: log-prob, entropy and both gradients, relative."""
    from rlmca.models import logprobs_passes
    from rlmca.models.logprobs_head import Tiles, head_log_probs
    from rlmca.models.logprobs_triton import TRITON

    draw = torch.Generator("cuda").manual_seed(2)
    target_N = torch.randint(0, 5000, (777,), generator=draw, device="cuda")
    wide: dict[str, Any] = {"generator": draw, "device": "cuda", "dtype": torch.float64}
    given = [torch.randn(777, 256, **wide), 0.1 * torch.randn(5003, 256, **wide)]

    def run(dtype: torch.dtype, rounded: torch.dtype) -> list[torch.Tensor]:
        hidden_NH, weight_VH = (t.to(rounded).to(dtype).requires_grad_() for t in given)
        outputs = head_log_probs(hidden_NH, weight_VH, target_N, vocab_size=5000, temperature=0.7, tiles=Tiles(256, 1024, None))
        (outputs[0].sum() + 0.1 * outputs[1].sum()).backward()  # type: ignore[union-attr]
        return [t.detach().double() for t in (*outputs, hidden_NH.grad, weight_VH.grad)]  # type: ignore[union-attr]

    found: dict[str, tuple[float, float]] = {}
    chosen = logprobs_passes.choose_passes(torch.device("cuda"), 1, None)
    assert chosen is TRITON, "on CUDA the head takes the Triton kernels"
    for dtype in (torch.float32, torch.bfloat16):
        exact, ours = run(torch.float64, dtype), run(dtype, dtype)
        errors = [float((a - b).norm() / b.norm()) for a, b in zip(ours, exact, strict=True)]
        found[str(dtype).removeprefix("torch.")] = max(errors[:2]), max(errors[2:])
    return found


# ---- in this process


def compare(cpu: dict[str, Any], device: dict[str, Any]) -> list[Line]:
    lines: list[Line] = []
    for name in (key for key in cpu if key != "cuda"):
        lines += differences(name, device[name], cpu[name], ALLOWED[name.split(",")[0]])
    lines.append(Line("offload and onload, three steps of bfloat16", device["offload"], 0.0))
    for dtype, (outputs, grads) in device.get("triton", {}).items():
        lines.append(Line(f"Triton log-probs and entropy, {dtype}", outputs, ALLOWED[dtype] / 10))
        lines.append(Line(f"Triton gradients, {dtype}", grads, ALLOWED[dtype] / 2))
    if "triton" not in device:
        lines.append(Line("Triton log-probs", note="needs a CUDA device"))
    for name, found in device.get("te", {}).items():
        lines += differences(f"Transformer Engine, {name}", found, device[name], 2 * ALLOWED[name.split(",")[0]])
    if "te" not in device:
        lines.append(Line("Transformer Engine", note="not installed" if device["cuda"] else "needs a CUDA device"))
    return lines


def differences(name: str, found: dict[str, Any], expected: dict[str, Any], allowed: float) -> list[Line]:
    theirs, ours = expected["gradients"], found["gradients"]
    apart = {key: float((ours[key] - theirs[key]).norm() / theirs[key].norm()) for key in theirs}
    worst = max(apart, key=lambda key: math.inf if math.isnan(apart[key]) else apart[key])
    return [
        Line(f"loss, {name}", abs(found["loss"] - expected["loss"]), allowed),
        Line(f"gradients, {name}", apart[worst] if set(ours) == set(theirs) else float("nan"), allowed, f"worst: {worst}"),
    ]


def show(lines: list[Line]) -> int:
    from rich.console import Console
    from rich.table import Table

    table = Table("compared", "difference", "allowed", "", "note", title="GPU against CPU")
    for line in lines:
        verdict = "left out" if line.allowed is None else "FAILED" if line.failed else "ok"
        numbers = ("", "") if line.allowed is None else (f"{line.found:.1e}", f"{line.allowed:.1e}")
        table.add_row(line.name, *numbers, verdict, line.note)
    Console(width=None if sys.stdout.isatty() else 140).print(table)
    return int(any(line.failed for line in lines))


if __name__ == "__main__":
    sys.exit(main())
