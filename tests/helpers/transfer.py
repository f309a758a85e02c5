"""Pieces of transfer tests that run on the ranks of a pool, with plain tensors in place of a model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from rlmca.layouts import Coord, ModelLayout, Topology
from rlmca.transfer.export import export_hf
from rlmca.transfer.hf_folder import layout_of_folder
from rlmca.transfer.load import load_ranks
from rlmca.transfer.stream import LiveWeights, hf_tensors


def layout_of(folder: Path, spec: Any = "local") -> ModelLayout:
    return layout_of_folder(folder, spec)


def stored(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder, by the library's own reader."""
    return {k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()}


def dirty(layout: ModelLayout, topology: Topology, coord: Coord, dtype: torch.dtype) -> dict[str, Tensor]:
    """Parameters full of NaN: what loading forgets stays visible."""
    return {n: torch.full(p.shape, float("nan"), dtype=dtype).requires_grad_() for n, p in layout.rank_plan(topology, coord).items()}


def live(folder: Path, topology: Topology, dtype: torch.dtype, *, dp: int = 1, bucket_bytes: int = 64 << 20) -> LiveWeights:
    """Weights of `folder` loaded on this rank of a pool (Megatron's order of ranks: tp, dp, pp)."""
    rank = int(os.environ.get("RANK", 0))
    group = None
    if topology.tp * topology.pp * dp > 1:
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        group = dist.group.WORLD
    coord = Coord(tp=rank % topology.tp, pp=rank // (topology.tp * dp))
    layout = layout_of(folder)
    params = dirty(layout, topology, coord, dtype)
    load_ranks(folder, layout, topology, coord, params)
    return LiveWeights(layout, topology, coord, params, lambda c: c.tp + topology.tp * dp * c.pp, group, bucket_bytes)


def stream_and_export(folder: Path, out: Path, topology: Topology, dtype: torch.dtype, options: dict[str, Any]) -> dict[str, Tensor]:
    """Runs on every rank: stream, then export; the streamed tensors (empty where nothing came)."""
    weights = live(folder, topology, dtype, dp=options.get("dp", 1), bucket_bytes=options.get("bucket_bytes", 64 << 20))
    dst = options.get("dst_rank", 0)
    got = {name: tensor.clone() for name, tensor in hf_tensors(weights, dst)}
    export_hf(weights, out, folder, dtype=options.get("dtype"), shard_gb=options.get("shard_gb", 5.0), dst_rank=dst)
    assert (out / "config.json").exists()  # on every rank: the folder is complete when the call returns
    return got


def export_error(folder: Path, out: Path, topology: Topology, options: dict[str, Any]) -> str:
    """The error that this rank's export ends with."""
    weights = live(folder, topology, torch.float32, bucket_bytes=1)
    try:
        export_hf(weights, out, folder, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"
