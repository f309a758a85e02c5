"""What a Hugging Face folder may look like, and the errors when it does not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3ForCausalLM

from rlmca.layouts import Coord, Topology
from rlmca.transfer.convert.rewrite import rewrite_hf
from rlmca.transfer.hf_folder import HFFolderError, open_hf_folder
from rlmca.transfer.hf_writer import HFWriter, new_folder
from rlmca.transfer.load import load_ranks
from tests.helpers.models import make_model
from tests.helpers.transfer import dirty, layout_of, stored


@pytest.fixture
def folder(hf_folders: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(hf_folders["qwen3_tied"], tmp_path / "model"))


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def load_fails(folder: Path) -> str:
    """The error of loading, which must come before anything is written."""
    layout = layout_of(folder)
    params = dirty(layout, Topology(), Coord(), torch.float32)
    with pytest.raises(HFFolderError) as caught:
        load_ranks(folder, layout, Topology(), Coord(), params)
    assert all(p.isnan().all() for p in params.values())
    return str(caught.value)


def test_tensors_that_do_not_fit_are_all_named(folder: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.norm.weight"]
        tensors["model.layers.7.mlp.up_proj.weight"] = torch.zeros(2)
        tensors["model.layers.0.self_attn.q_norm.weight"] = torch.zeros(8)

    edit(folder, change)
    text = load_fails(folder)
    assert "missing: model.norm.weight" in text and "unexpected: model.layers.7.mlp.up_proj.weight" in text
    assert "q_norm.weight has shape (8,), config.json says (16,)" in text


def test_a_head_beside_tied_embeddings_must_be_the_same_bits(folder: Path) -> None:
    edit(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    layout = layout_of(folder)
    params = dirty(layout, Topology(), Coord(), torch.float32)
    load_ranks(folder, layout, Topology(), Coord(), params)
    assert not any(p.isnan().any() for p in params.values())
    edit(folder, lambda t: t["lm_head.weight"][3, 3].add_(1e-7))
    assert "lm_head.weight differs from model.embed_tokens.weight" in load_fails(folder)
    edit(folder, lambda t: t.update({"lm_head.weight": torch.zeros(2, 2)}))
    assert "lm_head.weight differs" in load_fails(folder)


def test_parameters_that_do_not_fit_are_all_named(folder: Path) -> None:
    layout = layout_of(folder)
    params = dirty(layout, Topology(), Coord(), torch.float32)
    params["extra"] = params.pop("decoder.final_layernorm.weight")
    params["decoder.layers.0.mlp.linear_fc2.weight"] = torch.zeros(3, 3)
    with pytest.raises(ValueError) as caught:
        load_ranks(folder, layout, Topology(), Coord(), params)
    for words in ("lacks decoder.final_layernorm.weight", "no place for extra", "linear_fc2.weight has shape (3, 3)"):
        assert words in str(caught.value)


def test_shards_by_transformers_are_read(tmp_path: Path) -> None:
    model = make_model("qwen3_untied")
    model.save_pretrained(tmp_path / "m", max_shard_size="20KB")
    assert len(list((tmp_path / "m").glob("*.safetensors"))) > 2
    (tmp_path / "m" / "consolidated.safetensors").write_bytes(b"another format, not named by the index")
    with open_hf_folder(tmp_path / "m") as opened:
        assert opened.shapes.keys() == opened.dtypes.keys() == model.state_dict().keys()
        for name, want in model.state_dict().items():
            assert torch.equal(opened.read(name), want)
        assert torch.equal(opened.read("lm_head.weight", ((3, 9), (2, 5))), model.lm_head.weight[3:9, 2:5])


def break_index(folder: Path) -> str:
    (folder / "model.safetensors.index.json").write_text('{"metadata": {}}')
    return "weight_map"


def drop_shard(folder: Path) -> str:
    name = max(folder.glob("model-*.safetensors"))
    name.unlink()
    return name.name


def truncate(folder: Path) -> str:
    name = max(folder.glob("model-*.safetensors"))
    name.write_bytes(name.read_bytes()[:-8])
    return f"{name.name} is not a whole safetensors file"


def misplace(folder: Path) -> str:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.norm.weight"] = min(index["weight_map"].values())
    path.write_text(json.dumps(index))
    return "lacks the tensor model.norm.weight"


def pickled(folder: Path) -> str:
    for file in folder.glob("*safetensors*"):
        file.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")
    return "save_pretrained"


def adapter(folder: Path) -> str:
    for file in folder.glob("*safetensors*"):
        file.unlink()
    (folder / "adapter_model.safetensors").write_bytes(b"")
    return "LoRA"


@pytest.mark.parametrize("damage", [break_index, drop_shard, truncate, misplace, pickled, adapter])
def test_damaged_folders_are_named(damage: Callable[[Path], str], tmp_path: Path) -> None:
    make_model("qwen2").save_pretrained(tmp_path / "m", max_shard_size="20KB")
    words = damage(tmp_path / "m")
    with pytest.raises(HFFolderError) as caught:
        open_hf_folder(tmp_path / "m")
    assert words in str(caught.value) and str(tmp_path / "m") in str(caught.value)


def test_other_types_and_places_are_named(tmp_path: Path) -> None:
    with pytest.raises(HFFolderError, match="not a folder"):
        open_hf_folder(tmp_path / "nowhere")
    save_file({"a": torch.zeros(2, dtype=torch.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(HFFolderError, match="a in .* has type I8"):
        open_hf_folder(tmp_path)


def test_writer_writes_what_transformers_reads(tmp_path: Path) -> None:
    model = make_model("qwen3_untied")
    state = dict(model.named_parameters())
    shapes = {name: tuple(p.shape) for name, p in state.items()}
    with HFWriter(tmp_path, shapes, torch.float32, shard_gb=2e-5) as writer:
        for name, p in state.items():
            writer.write(name, p)
    model.config.save_pretrained(tmp_path)
    files = sorted(p.name for p in tmp_path.glob("*.safetensors"))
    assert files == [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))] and len(files) > 1
    for file in files:
        assert (size := (tmp_path / file).stat().st_size) < 2.2e4 or len(load_file(tmp_path / file)) == 1, size
        with safe_open(tmp_path / file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_parameters": model.num_parameters(), "total_size": 4 * model.num_parameters()}
    assert index["weight_map"].keys() == state.keys() and set(index["weight_map"].values()) == set(files)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(again, Qwen3ForCausalLM)
    assert all(torch.equal(p, state[name]) for name, p in again.named_parameters())


def test_writer_wants_the_declared_tensors_in_order(tmp_path: Path) -> None:
    shapes = {"a": (2,), "b": (3, 1)}
    writer = HFWriter(tmp_path, shapes, torch.bfloat16)
    with pytest.raises(ValueError, match="got b to write, expected a"):
        writer.write("b", torch.zeros(3, 1))
    writer.write("a", torch.arange(2))
    with pytest.raises(ValueError, match=r"\(3,\), expected \(3, 1\)"):
        writer.write("b", torch.zeros(3))
    with pytest.raises(ValueError, match="1 tensors were not written, the first is b"):
        writer.close()
    with pytest.raises(ValueError, match="int8"):
        HFWriter(tmp_path, shapes, torch.int8)
    with pytest.raises(ValueError, match="positive"):
        HFWriter(tmp_path, shapes, torch.float32, shard_gb=0)


def test_new_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    out = tmp_path / "sub" / "out"
    with pytest.raises(RuntimeError), new_folder(out) as fresh:
        (fresh / "half").write_text("x")
        raise RuntimeError
    assert not out.exists() and not list(out.parent.iterdir())
    with new_folder(out) as fresh:
        (fresh / "file").write_text("one")
        assert not out.exists()
    assert [p.name for p in out.parent.iterdir()] == ["out"]
    with pytest.raises(FileExistsError, match="not empty"), new_folder(out):
        pass
    with pytest.raises(RuntimeError), new_folder(out, overwrite=True) as fresh:
        raise RuntimeError
    assert (out / "file").read_text() == "one"
    with new_folder(out, overwrite=True) as fresh:
        (fresh / "other").write_text("two")
    assert [p.name for p in out.iterdir()] == ["other"] and [p.name for p in out.parent.iterdir()] == ["out"]
    with pytest.raises(FileExistsError, match="is a file"), new_folder(out / "other"):
        pass


def test_what_a_killed_export_left_is_cleared_or_put_back(tmp_path: Path) -> None:
    for name in (".out.partial", ".out.old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    with pytest.raises(FileExistsError), new_folder(tmp_path / "out"):  # killed between the two renames: the old one is back
        pass
    assert (tmp_path / "out" / "file").read_text() == ".out.old"
    with new_folder(tmp_path / "out", overwrite=True) as fresh:
        assert not list(fresh.iterdir())
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_reading_is_independent_of_config(folder: Path) -> None:
    with open_hf_folder(folder) as opened:
        assert opened.config["model_type"] == "qwen3"
        assert stored(folder).keys() == opened.shapes.keys()
    (folder / "config.json").write_text("[1]")
    with open_hf_folder(folder) as opened, pytest.raises(HFFolderError, match="JSON object"):
        _ = opened.config
    (folder / "config.json").unlink()
    with open_hf_folder(folder) as opened, pytest.raises(HFFolderError, match="does not exist"):
        _ = opened.config


def test_rotary_tables_of_old_llama_folders_are_not_read(hf_folders: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(hf_folders["llama"], tmp_path / "llama"))
    before = stored(folder)
    edit(folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    layout = layout_of(folder)
    load_ranks(folder, layout, Topology(), Coord(), params := dirty(layout, Topology(), Coord(), torch.float32))
    assert not any(p.isnan().any() for p in params.values())
    assert rewrite_hf(folder, tmp_path / "copy") == len(before) and stored(tmp_path / "copy").keys() == before.keys()


@pytest.mark.parametrize("weight_map", ['["model.safetensors"]', '{"model.norm.weight": null}', "3"])
def test_an_index_of_another_shape_is_an_error(folder: Path, weight_map: str) -> None:
    (folder / "model.safetensors.index.json").write_text(f'{{"weight_map": {weight_map}}}')
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    with pytest.raises(HFFolderError, match="is not a safetensors index"):
        open_hf_folder(folder)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_numbers_that_float16_cannot_hold_are_named(dtype: torch.dtype, folder: Path) -> None:
    edit(folder, lambda tensors: tensors["model.layers.1.mlp.down_proj.weight"].view(-1)[3].fill_(-7e4))
    layout = layout_of(folder)
    params = dirty(layout, Topology(), Coord(), dtype)
    if dtype == torch.bfloat16:
        load_ranks(folder, layout, Topology(), Coord(), params)
        return
    with pytest.raises(HFFolderError, match="model.layers.1.mlp.down_proj.weight holds 70000, more than float16 can"):
        load_ranks(folder, layout, Topology(), Coord(), params)
