"""Sources that are computed: FP8 with scales of blocks, adapters merged, both in narrow types and in row ranges."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from rlmca.transfer.convert import execute
from rlmca.transfer.convert.base import ConvertError
from rlmca.transfer.convert.computed import BlockScaled
from rlmca.transfer.convert.headers import read_header
from rlmca.transfer.convert.run import ConvertOptions, convert
from tests.helpers.lora import ALPHA, RANK, draw_adapter, save_adapter
from tests.helpers.models import make_model, save_model
from tests.helpers.transfer import stored

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def scaled(folder: Path, codes: dict[str, Tensor], scales: dict[str, Tensor], block: int) -> BlockScaled:
    save_file({**codes, **{f"{name}_scale_inv": scale for name, scale in scales.items()}}, folder / "model.safetensors")
    return BlockScaled(folder, FP8 | {"weight_block_size": [block, block]}, read_header(folder / "model.safetensors"))


def test_a8_a_weight_of_two_by_two_blocks(tmp_path: Path) -> None:
    codes = {"w": torch.full((192, 160), 2.0).to(torch.float8_e4m3fn)}
    read = scaled(tmp_path, codes, {"w": torch.tensor([[0.5, 1.0], [2.0, 4.0]])}, 128)
    whole = read.read("w", ((0, 192), (0, 160)))
    read.close()
    assert (whole[0, 0], whole[127, 128], whole[128, 127], whole[191, 159], whole.sum()) == (1, 2, 4, 8, 73728)


def test_any_box_is_that_of_the_whole(tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(2)
    codes = torch.randn(37, 29, generator=draw).to(torch.float8_e4m3fn)
    scale = torch.rand(5, 4, generator=draw) + 0.5
    read = scaled(tmp_path, {"w": codes}, {"w": scale}, 8)
    expected = codes.float() * scale.repeat_interleave(8, 0)[:37].repeat_interleave(8, 1)[:, :29]
    for box in [((0, 37), (0, 29)), ((3, 9), (7, 25)), ((36, 37), (28, 29)), ((8, 16), (0, 29))]:
        assert torch.equal(read.read("w", box), expected[slice(*box[0]), slice(*box[1])])
    read.close()


def quantized(folder: Path, family: str, block: int) -> dict[str, Tensor]:
    """Turn a folder's matrices to FP8 in place; what they stand for, in float32."""
    meant, held = {}, {}
    for name, tensor in stored(folder).items():
        if tensor.dim() != 2 or "embed" in name or "lm_head" in name or ".gate.weight" in name:
            held[name] = meant[name] = tensor if "e_score" in name else tensor.bfloat16()
            continue
        rows, columns = (-(-n // block) for n in tensor.shape)
        scale = torch.rand(rows, columns) + 0.5
        wide = scale.repeat_interleave(block, 0)[: tensor.shape[0]].repeat_interleave(block, 1)[:, : tensor.shape[1]]
        held[name], held[f"{name}_scale_inv"] = (tensor / wide).to(torch.float8_e4m3fn), scale
        meant[name] = held[name].float() * wide
    save_file(held, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"quantization_config": FP8 | {"weight_block_size": [block, block]}, "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    return meant


@pytest.mark.parametrize("dtype", [None, "fp32"])
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_an_fp8_folder_becomes_what_it_stands_for(family: str, dtype: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execute, "BUFFER", 700)  # several row ranges a tensor, whose borders are not those of blocks
    source = save_model(family, tmp_path / "model")
    meant = quantized(source, family, 16)
    convert(ConvertOptions(source, tmp_path / "out", to="hf", dtype=dtype, verify=True))
    have = stored(tmp_path / "out")
    assert have.keys() == meant.keys()
    for name, tensor in meant.items():
        wanted = tensor.float() if dtype == "fp32" or "e_score" in name else tensor.bfloat16()
        assert have[name].dtype == wanted.dtype and torch.equal(have[name], wanted), name
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in config and config["dtype"] == ("float32" if dtype == "fp32" else "bfloat16")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("model.layers.0.self_attn.q_proj.weight_scale_inv"), "q_proj.weight has no"),
        (lambda t: t.update({"model.norm.weight_scale_inv": torch.ones(1)}), "model.norm.weight_scale_inv has no FP8 weight"),
        (lambda t: t.update({"model.layers.0.self_attn.q_proj.weight_scale_inv": torch.ones(1, 1)}), "blocks of .16, 16. need"),
    ],
)
def test_scales_that_do_not_fit_are_named(change: object, words: str, tmp_path: Path) -> None:
    source = save_model("qwen3_moe", tmp_path / "model")
    quantized(source, "qwen3_moe", 16)
    tensors = stored(source)
    change(tensors)  # type: ignore[operator]
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(ConvertError, match=words):
        convert(ConvertOptions(source, tmp_path / "out", to="hf"))


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_adapters_are_added_once(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execute, "BUFFER", 900)
    model = make_model(family)
    model.save_pretrained(tmp_path / "model")
    pair = draw_adapter(model)
    adapter = save_adapter(tmp_path / "adapter", pair)
    convert(ConvertOptions(tmp_path / "model", tmp_path / "out", to="hf", adapters=(adapter,), verify=True))
    before, after = stored(tmp_path / "model"), stored(tmp_path / "out")
    changed = 0
    for name, tensor in before.items():
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        expected = tensor.double()
        if f"{stem}.lora_A.weight" in pair:
            changed += 1
            expected = expected + ALPHA / RANK * pair[f"{stem}.lora_B.weight"].double() @ pair[f"{stem}.lora_A.weight"].double()
        assert torch.equal(after[name], expected.float()), name
    assert changed == len(pair) // 2
