"""mbridge, another converter, fills the same parameters with the same bits, for the families that it knows.

Its loader builds its models on CUDA with Transformer Engine; here it runs unmodified on modules of those names and shapes.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from rlmca.transfer.convert.run import ConvertOptions, convert
from tests.helpers.models import save_model
from tests.helpers.ranks import rank_pool

pytest.importorskip("mbridge", reason="mbridge is not installed: pip install mbridge==0.15.1 (see requirements/dev.txt)")
pytestmark = pytest.mark.serial
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3_untied": {},  # before the tied one: it notes in its class, for the whole process, that the head is the embedding
    "qwen3_tied": {},
    "llama": {},
    "qwen3_moe": {"mlp_only_layers": []},
    "qwen2_moe": {"mlp_only_layers": []},
    "mixtral": {"head_dim": 8},
}
"""What it knows -> fields without which it does not: it takes all layers for mixtures, and computes no head_dim."""


def differing_on_rank(hf: Path, checkpoint: Path, tp: int) -> list[str]:
    """Names of the parameters that mbridge fills otherwise than the rank's file has them; all that it fills must be there."""
    from mbridge import AutoBridge

    from rlmca.parallel import megatron

    rank = int(os.environ.get("RANK", 0)) if tp > 1 else 0
    megatron.start(tp=tp, rank=rank, world_size=tp)
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", init_method=f"file://{checkpoint}.store", rank=0, world_size=1)
    file = checkpoint / "release" / f"mp_rank_{rank:02d}" / "model_optim_rng.pt"
    ours = torch.load(file, weights_only=True)["model"]
    bridge = AutoBridge.from_pretrained(str(hf))
    model: Any = module_of({name: tensor.shape for name, tensor in ours.items()}, next(iter(ours.values())).dtype)
    model.config = bridge.config
    with torch.no_grad():
        bridge.load_weights([model], str(hf))
    return [name for name, tensor in model.state_dict().items() if not torch.equal(tensor, ours[name])]


def module_of(shapes: dict[str, torch.Size], dtype: torch.dtype) -> torch.nn.Module:
    """A tree of modules with parameters of these names, full of NaN."""
    root = torch.nn.Module()
    for name, shape in shapes.items():
        *path, last = name.split(".")
        place = root
        for part in path:
            if not hasattr(place, part):
                place.add_module(part, torch.nn.ModuleList() if part == "layers" else torch.nn.Module())
            place = getattr(place, part)
        place.register_parameter(last, torch.nn.Parameter(torch.full(shape, float("nan"), dtype=dtype)))
    for number, layer in enumerate(root.get_submodule("decoder.layers").children()):
        layer.layer_number = number + 1  # type: ignore[assignment]
    return root


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_mbridge_agrees_tensor_by_tensor(family: str, tp: int, tmp_path: Path) -> None:
    hf, plain = tmp_path / "hf", save_model(family, tmp_path / "plain", vocab_size=68, **FAMILIES[family])  # it pads otherwise
    convert(ConvertOptions(plain, hf, to="hf", dtype="bf16", shard_gb=2e-5))  # it rounds to that, and loads a tied head by an index
    convert(ConvertOptions(hf, tmp_path / "ranks", to="ranks", tp=tp))
    for differing in rank_pool(tp).run(differing_on_rank, hf, tmp_path / "ranks", tp):
        assert differing == []
