"""One measurement of `bench convert`, in a process of its own: `convert_worker KIND FOLDER OUT.json [PARAMS]`."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from rlmca.layouts import ModelLayout
from rlmca.transfer.convert.run import ConvertOptions, convert, peak_memory
from rlmca.transfer.hf_writer import HFWriter

VOCAB = 151936


def main(kind: str, folder: Path, out: Path, params: float = 0.0) -> None:
    """Do it once, write seconds and bytes of memory beyond the imports."""
    if kind == "make":
        out.write_text(json.dumps(make(folder / "hf", params)))
        return
    target = folder / f"{kind}.out"
    shutil.rmtree(target, ignore_errors=True)
    work = _kinds(folder, target)[kind]
    before, start = peak_memory(), time.perf_counter()
    work()
    seconds = time.perf_counter() - start
    out.write_text(json.dumps({"seconds": seconds, "memory": peak_memory() - before}))
    if kind not in ("to_megatron", "to_ranks"):  # those are read by others
        shutil.rmtree(target)


def _kinds(folder: Path, target: Path) -> dict[str, Callable[[], Any]]:
    hf = folder / "hf"

    def ours(source: str, **more: Any) -> Callable[[], Any]:
        return lambda: convert(ConvertOptions(folder / source, target, synced=False, **more))

    return {
        "cp": lambda: subprocess.run(["cp", "-r", hf, target], check=True),
        "safetensors": lambda: _peer(hf, target),
        "to_megatron": ours("hf"),
        "to_megatron_fast": ours("hf", fast=True),
        "to_hf": ours("to_megatron.out"),
        "to_hf_fast": ours("to_megatron.out", fast=True),
        "to_ranks": ours("hf", tp=2, pp=2),
        "from_ranks": ours("to_ranks.out"),
    }


def _peer(source: Path, target: Path) -> None:
    target.mkdir()
    for file in source.glob("*.safetensors"):
        save_file(load_file(file), target / file.name, {"format": "pt"})


def make(folder: Path, params: float) -> dict[str, float]:
    """A random Qwen3 model of about so many parameters; those and its bytes."""
    config = {
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": VOCAB, "hidden_size": 1024, "intermediate_size": 3072,
        "num_hidden_layers": 1, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 40960, "tie_word_embeddings": True, "rope_theta": 1000000.0, "hidden_act": "silu",
        "attention_bias": False, "torch_dtype": "bfloat16", "use_sliding_window": False, "sliding_window": None, "max_window_layers": 28,
    }  # fmt: skip
    if params > 1.5e9:
        config |= {"hidden_size": 2048, "intermediate_size": 6144}
    if params < 0.3e9:
        config |= {"vocab_size": 4096}
    one, two = (_size(config | {"num_hidden_layers": n}) for n in (1, 2))
    config["num_hidden_layers"] = 2 * max(1, round(((params - one) / (two - one) + 1) / 2))  # for two stages
    shapes = ModelLayout(config).hf_tensors()
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    draw = torch.Generator().manual_seed(0)
    with HFWriter(folder, shapes, torch.bfloat16) as writer:
        for name, shape in shapes.items():
            writer.write(name, torch.randn(shape, generator=draw, dtype=torch.bfloat16) * 0.02)
    return {"params": _size(config), "bytes": 2 * _size(config)}


def _size(config: dict[str, Any]) -> int:
    return sum(torch.Size(shape).numel() for shape in ModelLayout(config).hf_tensors().values())


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), *map(float, sys.argv[4:]))
