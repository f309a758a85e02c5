"""Distributed checkpoints against plain Megatron-Core: it loads what we write, and we read what it saves, under any layout."""

from __future__ import annotations

import json
import math
import pickle
import random
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlmca.layouts.boxes import volume
from rlmca.transfer.convert import torch_dist_source
from rlmca.transfer.convert.base import ConvertError
from rlmca.transfer.convert.dcp_metadata import Place, StoredChunk, StoredKey, metadata_bytes, read_metadata
from rlmca.transfer.convert.formats import open_source
from rlmca.transfer.convert.hf import HFSource
from rlmca.transfer.convert.kept import KEPT, WithKept
from rlmca.transfer.convert.torch_dist import TorchDistTarget
from rlmca.transfer.convert.torch_dist_source import TorchDistSource
from tests.helpers.conversion import convert, read_all, same_bits, types_of
from tests.helpers.models import FAMILIES, MIXTURES, make_model
from tests.helpers.plain_megatron import plain_logits, save_plain
from tests.helpers.ranks import rank_pool

VARIANTS: dict[str, dict[str, Any]] = {
    **{name: {} for name in (*FAMILIES, *MIXTURES)},
    "llama_biases": {"attention_bias": True, "mlp_bias": True},
    "qwen3_moe_alike": {"mlp_only_layers": []},
    "deepseek_v3": {"rms_norm_eps": 1e-6},  # of its latent norms, whatever the config says
    "deepseek_v3_alike": {"rms_norm_eps": 1e-6, "first_k_dense_replace": 0},
}
IDS = torch.randint(0, 67, (2, 17), generator=torch.Generator().manual_seed(1))
Folders = dict[str, Path]
SIZES = [{}, {"tp": 2}, {"pp": 2}, {"tp": 2, "pp": 2}]
EXPERT_SIZES = [{"ep": 2}, {"ep": 2, "pp": 2}, {"tp": 2, "ep": 2, "etp": 1}]
SAVED: list[dict[str, Any]] = [{"singleton_local_shards": True}, {"non_homogeneous_layers": True}, {}]
"""What a user may ask Megatron to save a checkpoint with."""


def model_of(variant: str) -> Any:
    name = next(name for name in sorted((*FAMILIES, *MIXTURES), key=len, reverse=True) if variant.startswith(name))
    return make_model(name, **VARIANTS[variant])


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    root = tmp_path_factory.mktemp("hf")
    for variant in VARIANTS:
        model_of(variant).save_pretrained(root / variant, save_original_format=True)
    return {variant: root / variant for variant in VARIANTS}


@pytest.fixture(scope="module")
def written(hf: Folders, tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Our checkpoints, each with config.json beside it."""
    root = tmp_path_factory.mktemp("dist")
    for number, (variant, folder) in enumerate(hf.items()):
        source = HFSource(folder)
        most = 20_000 if number % 2 else None
        convert(source, TorchDistTarget(source.layout, types_of(source), max_bytes=most), root / variant)
        shutil.copy(folder / "config.json", root / variant)
    return {variant: root / variant for variant in hf}


def config_of(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "config.json").read_text()))


def check_logits(variant: str, hf: Folders, written: Folders, sizes: dict[str, int], world: int) -> None:
    results = rank_pool(world).run(plain_logits, written[variant], config_of(hf[variant]), IDS, sizes)
    with torch.no_grad():
        want = model_of(variant)(IDS).logits
    logits = [result for result in results if result is not None]
    assert len(logits) == world // sizes.get("pp", 1)
    for result in logits:
        torch.testing.assert_close(result, want, rtol=0, atol=1e-5)


def world_of(sizes: dict[str, int]) -> int:
    return max(sizes.get("tp", 1), sizes.get("ep", 1) * sizes.get("etp", sizes.get("tp", 1))) * sizes.get("pp", 1)


def cases() -> list[Any]:
    quick = {("qwen3_tied", 3), ("llama_biases", 1), ("qwen2", 2), ("mixtral", 4), ("deepseek_v3", 1), ("qwen2_moe", 5), ("qwen3_moe", 5)}
    found = []
    for variant in VARIANTS:
        dense = not variant.startswith(tuple(MIXTURES))
        for number, sizes in enumerate(SIZES if dense else SIZES + EXPERT_SIZES):
            mark = [pytest.mark.serial] if (variant, number) in quick else [pytest.mark.serial, pytest.mark.whole]
            found.append(pytest.param(variant, sizes, marks=mark, id=f"{variant}-{sizes or 'one'}"))
    return found


@pytest.mark.parametrize(("variant", "sizes"), cases())
def test_plain_megatron_loads_it_strictly_and_computes_the_same(variant: str, sizes: dict[str, int], hf: Folders, written: Folders) -> None:
    check_logits(variant, hf, written, sizes, world_of(sizes))


def saved_cases() -> list[Any]:
    quick = {("qwen3_tied", 1, 2), ("mixtral", 4, 0), ("qwen2_moe", 2, 2), ("deepseek_v3", 1, 0)}
    found = []
    for variant in VARIANTS:
        dense = not variant.startswith(tuple(MIXTURES))
        for number, sizes in enumerate(SIZES if dense else SIZES + EXPERT_SIZES):
            for kind, metadata in enumerate(SAVED):
                mark = [pytest.mark.serial] if (variant, number, kind) in quick else [pytest.mark.serial, pytest.mark.whole]
                found.append(pytest.param(variant, sizes, metadata, marks=mark, id=f"{variant}-{sizes or 'one'}-{''.join(metadata)}"))
    return found


@pytest.mark.parametrize(("variant", "sizes", "metadata"), saved_cases())
def test_what_plain_megatron_saves_is_read_bit_for_bit(
    variant: str, sizes: dict[str, int], metadata: dict[str, Any], hf: Folders, written: Folders, tmp_path: Path
) -> None:
    out = tmp_path / "iter_0000007"
    out.mkdir()
    rank_pool(world_of(sizes)).run(save_plain, written[variant], out, config_of(hf[variant]), sizes, metadata)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    source = TorchDistSource(tmp_path, hf[variant])
    want = {name: tensor for file in hf[variant].glob("*.safetensors") for name, tensor in load_file(file).items()}
    same_bits(read_all(source), want)
    source.close()


@pytest.mark.parametrize("form", ["single", "stacked"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_our_own_come_back_bit_for_bit(variant: str, form: Any, hf: Folders, written: Folders, tmp_path: Path) -> None:
    if form == "stacked":
        model_of(variant).save_pretrained(tmp_path / "hf")
    original = HFSource(tmp_path / "hf" if form == "stacked" else hf[variant])
    source = TorchDistSource(written[variant], form=original.layout.form)
    assert list(source.tensors) == list(original.tensors) and source.path == written[variant]
    same_bits(read_all(source), read_all(original))


@pytest.mark.parametrize("variant", ["qwen3_tied", "deepseek_v3", "mixtral"])
def test_checksums_are_right_in_every_archive(variant: str, written: Folders) -> None:
    assert zipfile.ZipFile(written[variant] / "common.pt").testzip() is None
    assert not torch.load(written[variant] / "common.pt")
    number = 0
    for stored in read_metadata(written[variant]).values():
        for chunk in stored.chunks:
            raw = (written[variant] / chunk.place.file).read_bytes()[chunk.place.start : chunk.place.start + chunk.place.length]
            (written[variant].parent / "one.zip").write_bytes(raw)
            assert zipfile.ZipFile(written[variant].parent / "one.zip").testzip() is None
            number += 1
    assert number > 10


def test_metadata_is_the_pickle_of_torchs_own_classes(written: Folders) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        StorageMeta,
        TensorProperties,
        TensorStorageMetadata,
    )

    size = torch.Size
    stored = {
        "a": StoredKey((2, 3), "bfloat16", [StoredChunk((i, 0), (1, 3), Place("__0_0.distcp", i * (5 << 31), 700)) for i in (0, 1)]),
        "b": StoredKey((4,), "float32", [StoredChunk((0,), (4,), Place("__0_1.distcp", 3, 600))]),
    }
    made = pickle.loads(metadata_bytes(stored, {"o/shard_0_1": Place("__0_1.distcp", 700, 99)}))
    properties = [TensorProperties(dtype=torch.bfloat16), TensorProperties(dtype=torch.float32)]
    places = {(key, chunk.offset): _StorageInfo(*chunk.place) for key, value in stored.items() for chunk in value.chunks}
    assert made == Metadata(
        state_dict_metadata={
            **{
                key: TensorStorageMetadata(own, size(v.shape), [ChunkStorageMetadata(size(c.offset), size(c.size)) for c in v.chunks])
                for (key, v), own in zip(stored.items(), properties, strict=True)
            },
            "o/shard_0_1": BytesStorageMetadata(),
        },
        planner_data=None,
        storage_data={**{MetadataIndex(*where): place for where, place in places.items()},
                      MetadataIndex("o/shard_0_1"): _StorageInfo("__0_1.distcp", 700, 99)},
        storage_meta=StorageMeta(),
        version="1.0.0",
    )  # fmt: skip
    whole: dict[str, Any] = {key: torch.empty(v.shape) for key, v in read_metadata(written["qwen2"]).items()}
    dcp.load(whole, storage_reader=dcp.FileSystemReader(written["qwen2"]), no_dist=True)
    source = TorchDistSource(written["qwen2"])
    assert torch.equal(whole["embedding.word_embeddings.weight"], read_all(source)["model.embed_tokens.weight"])


def test_types_are_those_asked_for_and_a_key_has_one(hf: Folders, tmp_path: Path) -> None:
    source = HFSource(hf["deepseek_v3"])
    dtypes = types_of(source, "BF16") | dict.fromkeys(source.layout.hf_buffers(), "F32")
    out = convert(source, TorchDistTarget(source.layout, dtypes), tmp_path / "out", fast=True)
    assert {k: v.dtype for k, v in read_metadata(out).items() if "expert_bias" in k or "router.weight" in k} == {
        f"decoder.layers.{layer}.mlp.router.{name}": kind
        for layer in (1, 2, 3)
        for name, kind in (("weight", "bfloat16"), ("expert_bias", "float32"))
    }
    back = TorchDistSource(out, hf["deepseek_v3"])
    assert {name: stored.dtype for name, stored in back.tensors.items()} == dtypes
    want = {name: tensor.to(torch.bfloat16 if dtypes[name] == "BF16" else torch.float32) for name, tensor in read_all(source).items()}
    same_bits(read_all(back), want)
    mixed = types_of(source) | {"model.layers.0.mlp.up_proj.weight": "BF16"}
    with pytest.raises(ConvertError, match=r"layers.0.mlp.linear_fc1.weight: .*up_proj.weight is BF16 and .*gate_proj.weight is F32"):
        TorchDistTarget(source.layout, mixed)


def test_tensors_without_a_place_are_kept_beside_it(tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    model_of("deepseek_v3").save_pretrained(folder, save_original_format=True)
    held = load_file(folder / "model.safetensors")
    extra = {"model.layers.4.eh_proj.weight": torch.randn(3, 5).bfloat16(), "model.layers.4.enorm.weight": torch.randn(7)}
    save_file(held | extra, folder / "model.safetensors", metadata={"format": "pt"})
    config = config_of(folder) | {"num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    source = HFSource(folder)
    kept = {name: stored for name, stored in source.tensors.items() if name in extra}
    out = convert(source, WithKept(TorchDistTarget(source.layout, types_of(source)), kept), tmp_path / "out")
    same_bits(load_file(out / KEPT), extra)
    same_bits(read_all(open_source(out, folder)), held | extra)
    save_file({"model.layers.9.x": torch.ones(1)}, out / KEPT)
    with pytest.raises(ConvertError, match=r"no part of the model: model.layers.9.x in kept.safetensors"):
        open_source(out, folder)


def rechunked(folder: Path, out: Path, draw: random.Random, rename: Callable[[str], str] = lambda key: key) -> None:
    """The same checkpoint with every key cut at random places, by torch's own save of each chunk."""
    out.mkdir()
    keys: dict[str, StoredKey] = {}
    import torch.distributed.checkpoint as dcp

    whole: dict[str, Any] = {k: torch.empty(v.shape, dtype=getattr(torch, v.dtype)) for k, v in read_metadata(folder).items()}
    dcp.load(whole, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    for number, (key, tensor) in enumerate(whole.items()):
        cuts = [sorted({0, n, *(draw.randrange(n + 1) for _ in range(draw.randrange(3)))}) for n in tensor.shape]
        boxes: list[tuple[Any, ...]] = [()]
        for axis in cuts:
            boxes = [(*box, part) for box in boxes for part in zip(axis, axis[1:], strict=False)]
        file = f"__{number % 3}_0.distcp"
        stored = keys[rename(key)] = StoredKey(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), [])
        assert sum(map(volume, boxes)) == math.prod(tensor.shape)
        for box in boxes:
            with (out / file).open("ab") as stream:
                start = stream.tell()
            with (out / "chunk").open("wb") as stream:
                torch.save(tensor[tuple(slice(a, b) for a, b in box)].clone(), stream)
            raw = (out / "chunk").read_bytes()
            with (out / file).open("ab") as stream:
                stream.write(raw)
            offset, size = tuple(a for a, _ in box), tuple(b - a for a, b in box)
            stored.chunks.append(StoredChunk(offset, size, Place(file, start, len(raw))))
    keys["optimizer.state.exp_avg." + next(iter(keys))] = next(iter(keys.values()))
    (out / ".metadata").write_bytes(metadata_bytes(keys, {}))
    (out / "chunk").unlink()


@pytest.mark.parametrize("variant", ["qwen2", "qwen3_moe_alike", "deepseek_v3"])
def test_any_chunking_and_a_prefix_are_read(variant: str, written: Folders, hf: Folders, tmp_path: Path) -> None:
    rechunked(written[variant], tmp_path / "out", random.Random(variant), lambda key: f"model.{key}")
    same_bits(read_all(TorchDistSource(tmp_path / "out", hf[variant])), read_all(HFSource(hf[variant])))


def rewrite(folder: Path, change: Callable[[dict[str, StoredKey]], Any]) -> None:
    keys = read_metadata(folder)
    change(keys)
    (folder / ".metadata").write_bytes(metadata_bytes(keys, {}))


QKV, FC2 = "decoder.layers.self_attention.linear_qkv.weight", "decoder.layers.mlp.linear_fc2.weight"


def moved_to(place: Place) -> Callable[[dict[str, StoredKey]], Any]:
    """The first chunk of FC2 is said to lie there."""
    return lambda keys: keys[FC2].chunks.__setitem__(0, keys[FC2].chunks[0]._replace(place=place))


FAULTS: dict[str, tuple[Callable[[dict[str, StoredKey]], Any], str]] = {
    "missing": (
        lambda keys: (keys.pop(QKV), keys.pop("output_layer.weight")),
        r"missing: decoder.layers.self_attention.linear_qkv.weight \(layer 0\)\n.*\(layer 1\)\nmissing: output_layer.weight",
    ),
    "surplus": (
        lambda keys: keys.update({"decoder.layers.mlp.other.weight": keys[FC2]}),
        "no part of the model: decoder.layers.mlp.other.weight",
    ),
    "shape": (
        lambda keys: keys.update({FC2: keys[FC2]._replace(shape=(2, 32, 49))}),
        r"linear_fc2.weight has shape \[2, 32, 49\], config.json says \[2, 32, 48\]",
    ),
    "hole": (lambda keys: keys[FC2].chunks.pop(), r"the chunks of decoder.layers.mlp.linear_fc2.weight do not make up .*\(layer 1\)"),
    "overlap": (
        lambda keys: keys[FC2].chunks.append(keys[FC2].chunks[0]),
        r"the chunks of decoder.layers.mlp.linear_fc2.weight do not make up .*\(layer 0\)",
    ),
    "type": (
        lambda keys: keys.update({FC2: keys[FC2]._replace(dtype="bfloat16")}),
        r"linear_fc2.weight at \[0, 0, 0\] .* is no tensor of type bfloat16",
    ),
    "place": (moved_to(Place("__0_0.distcp", 5, 700)), r"linear_fc2.weight at \[0, 0, 0\]"),
    "file": (moved_to(Place("__9_0.distcp", 0, 700)), "__9_0.distcp"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_checkpoint_that_does_not_fit_is_refused_by_name(fault: str, written: Folders, tmp_path: Path) -> None:
    change, message = FAULTS[fault]
    shutil.copytree(written["qwen2"], tmp_path / "out")
    rewrite(tmp_path / "out", change)
    with pytest.raises(ConvertError, match=message):
        TorchDistSource(tmp_path / "out")


def test_all_faults_come_in_one_message(written: Folders, tmp_path: Path) -> None:
    shutil.copytree(written["qwen2"], tmp_path / "out")
    for fault in ("missing", "surplus", "hole"):
        rewrite(tmp_path / "out", FAULTS[fault][0])
    with pytest.raises(ConvertError) as caught:
        TorchDistSource(tmp_path / "out")
    assert all(word in str(caught.value) for word in ("missing: output_layer.weight", "mlp.other.weight", "do not make up"))


def test_folders_that_are_no_checkpoint(written: Folders, hf: Folders, tmp_path: Path) -> None:
    with pytest.raises(ConvertError, match=r"has no \.metadata"):
        TorchDistSource(hf["qwen2"])
    bare = tmp_path / "bare"
    shutil.copytree(written["qwen2"], bare)
    (bare / "config.json").unlink()
    with pytest.raises(ConvertError, match="--hf_config FOLDER"):
        TorchDistSource(bare)
    with pytest.raises(ConvertError, match="--hf_config FOLDER"):
        TorchDistSource(bare, tmp_path)
    assert TorchDistSource(bare, hf["qwen2"]).path == hf["qwen2"]
    (bare / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    with pytest.raises(ConvertError, match="zarr"):
        TorchDistSource(bare, hf["qwen2"])
    (bare / "metadata.json").unlink()
    (bare / ".metadata").write_bytes(pickle.dumps({"state_dict_metadata": {}}))
    with pytest.raises(ConvertError, match="no metadata of a distributed checkpoint"):
        TorchDistSource(bare, hf["qwen2"])


def test_a_checkpoints_metadata_runs_nothing(written: Folders, hf: Folders, tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return open, (str(tmp_path / "sprung"), "w")

    shutil.copytree(written["qwen2"], tmp_path / "out")
    (tmp_path / "out" / ".metadata").write_bytes(pickle.dumps(Trap()))
    with pytest.raises(ConvertError):
        TorchDistSource(tmp_path / "out", hf["qwen2"])
    assert not (tmp_path / "sprung").exists()


def test_padding_of_the_vocabulary_is_dropped(written: Folders, hf: Folders, tmp_path: Path) -> None:
    shutil.copytree(written["qwen2"], tmp_path / "out")
    key, pad = "embedding.word_embeddings.weight", torch.full((5, 32), 9.0)
    torch.save(pad, tmp_path / "out" / "__1_0.distcp")
    place = Place("__1_0.distcp", 0, (tmp_path / "out" / "__1_0.distcp").stat().st_size)

    def add(keys: dict[str, StoredKey]) -> None:
        keys[key] = keys[key]._replace(shape=(72, 32), chunks=[*keys[key].chunks, StoredChunk((67, 0), (5, 32), place)])

    rewrite(tmp_path / "out", add)
    same_bits(read_all(TorchDistSource(tmp_path / "out")), read_all(HFSource(hf["qwen2"])))


def test_neither_megatron_nor_transformers_nor_dcp_is_imported(written: Folders, hf: Folders, tmp_path: Path) -> None:
    code = f"""
import sys
from pathlib import Path
from tests.helpers.conversion import convert, read_all, types_of
from rlmca.transfer.convert.hf import HFSource
from rlmca.transfer.convert.torch_dist import TorchDistTarget
from rlmca.transfer.convert.torch_dist_source import TorchDistSource
source = HFSource(Path({str(hf["qwen2_moe"])!r}))
out = convert(source, TorchDistTarget(source.layout, types_of(source)), Path({str(tmp_path / "out")!r}))
assert read_all(TorchDistSource(out, {str(hf["qwen2_moe"])!r}))
print([name for name in sys.modules if name.startswith(("megatron", "transformers", "torch.distributed.checkpoint"))])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_list_of_problems_ends(written: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(written["mixtral"], tmp_path / "out")
    monkeypatch.setattr(torch_dist_source, "LISTED", 5)
    rewrite(tmp_path / "out", lambda keys: [keys.pop(key) for key in list(keys) if "experts" in key])
    with pytest.raises(ConvertError, match=r"layer 0, expert 0\)[\s\S]*and 59 more"):
        TorchDistSource(tmp_path / "out")
