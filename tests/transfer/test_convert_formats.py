"""`convert` from format to format by its command: what goes in comes out again, whatever lies between."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlmca.cli.convert import convert_command
from rlmca.transfer.convert import execute
from rlmca.transfer.convert.archives import tensors_of
from rlmca.transfer.convert.base import ConvertError
from rlmca.transfer.convert.formats import format_of
from rlmca.transfer.convert.manifest import check_manifest
from rlmca.transfer.convert.run import ConvertOptions, convert, plan
from rlmca.transfer.hf_folder import HFFolderError
from tests.helpers.lora import draw_adapter, save_adapter
from tests.helpers.models import make_model, save_model
from tests.helpers.transfer import stored

ROOT = Path(__file__).parents[2]
FIXTURES = ROOT / "tests" / "fixtures"


def command(*arguments: object) -> None:
    assert convert_command([str(argument) for argument in arguments]) == 0


def same(one: Path, two: Path) -> None:
    have, want = stored(one), stored(two)
    assert have.keys() == want.keys()
    for name, tensor in want.items():
        assert have[name].dtype == tensor.dtype and torch.equal(have[name].view(torch.uint8), tensor.view(torch.uint8)), name


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("family", ["qwen3_tied", "mistral", "qwen2_moe", "qwen3_moe", "deepseek_v3"])
def test_there_and_back_by_every_format(family: str, fast: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hf, how = save_model(family, tmp_path / "hf"), ["--fast"] if fast else []
    if family == "deepseek_v3":  # a layer for multi-token prediction, which Megatron's model has no place for
        start = "model.layers.4."
        more = {start + "enorm.weight": torch.randn(32).bfloat16(), start + "mlp.gate.e_score_correction_bias": torch.randn(8)}
        save_file({**load_file(hf / "model.safetensors"), **more}, hf / "model.safetensors", {"format": "pt"})
        path = hf / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"num_nextn_predict_layers": 1}))
    experts = ["--ep", 2, "--etp", 1] if family.endswith(("moe", "v3")) else []
    chunks = ["--vpp", 2] if experts else ["--vocab_multiple", 16]  # the others have two layers
    steps = [
        ("dist", "torch_dist", []),
        ("ranks", "ranks", ["--tp", 2, "--pp", 2, *experts]),
        ("others", "ranks", ["--pp", 2, *chunks, "--transformer_impl", "local"]),
        ("again", "torch_dist", ["--to", "torch_dist", "--shard_gb", 1e-4]),
        ("back", "hf", []),
    ]
    before = hf
    for name, kind, options in steps:
        after = tmp_path / name
        command(before, after, *options, *how, "--verify")
        assert format_of(after) == kind and (after / "config.json").read_bytes() == (hf / "config.json").read_bytes()
        if not fast:
            assert check_manifest(after) > 0
            assert all(zipfile.ZipFile(file).testzip() is None for file in after.rglob("*.pt"))
        before = after
    same(before, hf)
    assert "read back bit for bit" in capsys.readouterr().out


@pytest.mark.parametrize("to", ["hf", "torch_dist", "ranks"])
def test_a3_r8_layers_that_are_not_trained_come_back_from_mixed_shards(to: str, tmp_path: Path) -> None:
    """Three layers, two for multi-token prediction stored behind them, in four files that mix both."""
    hf = save_model("deepseek_v3", tmp_path / "hf", num_hidden_layers=3)
    tensors = load_file(hf / "model.safetensors")
    (hf / "model.safetensors").unlink()
    more = {
        f"model.layers.{n}.{k}": torch.randn(4, 3) for n in (3, 4) for k in ("enorm.weight", "embed_tokens.weight", "mlp.up_proj.weight")
    }
    shards = [
        {n: t for n, t in {**tensors, **more}.items() if n.startswith(starts)}
        for starts in (("lm_head", "model.layers.3."), ("model.embed", "model.layers.4."), ("model.layers.0.", "model.layers.1."))
    ]
    placed = {name for shard in shards for name in shard}
    shards.append({name: tensor for name, tensor in tensors.items() if name not in placed})
    files = [f"model-{number + 1:05d}-of-00004.safetensors" for number in range(4)]
    for file, shard in zip(files, shards, strict=True):
        save_file(shard, hf / file, {"format": "pt"})
    place = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
    (hf / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": place}))
    config = json.loads((hf / "config.json").read_text()) | {"num_nextn_predict_layers": 2}
    (hf / "config.json").write_text(json.dumps(config))
    command(hf, tmp_path / "there", "--to", to)
    command(tmp_path / "there", tmp_path / "back", "--to", "hf", "--shard_gb", 1e-4)
    same(tmp_path / "back", hf)
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    held = {file.name: load_file(file) for file in (tmp_path / "back").glob("*.safetensors")}
    assert index["weight_map"] == {name: file for file, names in held.items() for name in names}
    assert index["metadata"]["total_size"] == sum(t.nbytes for shard in held.values() for t in shard.values())
    written = {name.split(".")[2] for name in index["weight_map"] if name.startswith("model.layers.")}
    assert json.loads((tmp_path / "back" / "config.json").read_text())["num_nextn_predict_layers"] == len(written) - 3 == 2
    next(hf.glob("*-00002-*")).unlink()
    with pytest.raises(HFFolderError, match="lacks model-00002-of-00004.safetensors"):
        plan(ConvertOptions(hf, tmp_path / "other"))


def test_a7_a_folder_without_tokenizer_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hf = save_model("llama", tmp_path / "hf")
    (hf / "generation_config.json").unlink()
    command(hf, tmp_path / "out")
    said = capsys.readouterr().out
    assert said.count("has no tokenizer") == 1 and not (tmp_path / "out" / "generation_config.json").exists()


@pytest.mark.parametrize(("fixture", "layout"), [("mcore_adapter_qwen2", "tp2_pp2"), ("mcore_adapter_qwen3_moe", "tp2_ep2")])
def test_checkpoints_of_mcore_adapter_give_their_model(fixture: str, layout: str, tmp_path: Path) -> None:
    source, checkpoint = FIXTURES / fixture, tmp_path / "checkpoint"
    if (source / layout).is_dir():
        shutil.copytree(source / layout, checkpoint)
    for file in source.glob("mp_rank_*.pt"):  # that fixture lies flat
        (checkpoint / "iter_0000001" / file.stem).mkdir(parents=True)
        shutil.copy(file, checkpoint / "iter_0000001" / file.stem / "model_optim_rng.pt")
        shutil.copy(source / "mca_config.json", checkpoint)
    command(checkpoint, tmp_path / "out", "--verify")
    same(tmp_path / "out", source / "hf")
    ours, theirs = (json.loads((path / "config.json").read_text()) for path in (tmp_path / "out", source / "hf"))
    assert {key: ours.get(key) for key in theirs} == theirs


@pytest.mark.parametrize("to", ["torch_dist", "ranks"])
def test_adapters_and_types_on_the_way_to_megatron(to: str, tmp_path: Path) -> None:
    model = make_model("qwen3_moe")
    model.save_pretrained(tmp_path / "model")
    adapter = save_adapter(tmp_path / "adapter", draw_adapter(model))
    command(tmp_path / "model", tmp_path / "merged", "--to", "hf", "--dtype", "bf16", "--adapter_name_or_path", adapter)
    command(tmp_path / "model", tmp_path / "megatron", "--to", to, "--dtype", "bf16", "--adapter_name_or_path", adapter, "--verify")
    command(tmp_path / "megatron", tmp_path / "out")
    same(tmp_path / "out", tmp_path / "merged")


def test_stacked_experts_go_to_megatron_as_they_are(tmp_path: Path) -> None:
    single, stacked = save_model("qwen3_moe", tmp_path / "single"), tmp_path / "stacked"
    model = make_model("qwen3_moe")
    stacked.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, stacked / "model.safetensors", {"format": "pt"})
    (stacked / "config.json").write_bytes((single / "config.json").read_bytes())
    for number, source in enumerate((single, stacked)):
        command(source, tmp_path / f"dist{number}")
        command(source, tmp_path / f"ranks{number}", "--tp", 2, "--ep", 4, "--etp", 1)
        command(tmp_path / f"dist{number}", tmp_path / f"out{number}")
        same(tmp_path / f"out{number}", single)
    assert (tmp_path / "dist0" / "__0_0.distcp").read_bytes() == (tmp_path / "dist1" / "__0_0.distcp").read_bytes()
    for file in (tmp_path / "ranks0").rglob("*.pt"):
        assert file.read_bytes() == (tmp_path / "ranks1" / file.relative_to(tmp_path / "ranks0")).read_bytes()


def test_a_checkpoint_of_a_run_becomes_a_model(tmp_path: Path) -> None:
    """checkpoint-N has the distributed form in `weights`; what the model is, is said by another folder."""
    hf = save_model("qwen3_tied", tmp_path / "hf")
    command(hf, tmp_path / "checkpoint-3" / "weights")
    (tmp_path / "checkpoint-3" / "weights" / "config.json").unlink()
    with pytest.raises(ConvertError, match="write --hf_config FOLDER"):
        plan(ConvertOptions(tmp_path / "checkpoint-3", tmp_path / "out"))
    command(tmp_path / "checkpoint-3", tmp_path / "out", "--hf_config", hf)
    same(tmp_path / "out", hf)


def test_tensors_of_several_types_are_kept_apart_or_refused(tmp_path: Path) -> None:
    hf = save_model("llama", tmp_path / "hf")
    tensors = stored(hf)
    tensors["model.layers.0.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"].bfloat16()
    save_file(tensors, hf / "model.safetensors", {"format": "pt"})
    convert(ConvertOptions(hf, tmp_path / "out", to="hf"))
    same(tmp_path / "out", hf)
    for to in ("torch_dist", "ranks"):
        with pytest.raises(ConvertError, match="choose one.* with --dtype"):
            convert(ConvertOptions(hf, tmp_path / "megatron", to=to))  # type: ignore[arg-type]
    assert not (tmp_path / "megatron").exists()


def test_no_format_takes_megatron_or_transformers() -> None:
    code = (
        "import sys, rlmca.cli.convert, rlmca.transfer.convert.torch_dist_source, rlmca.transfer.convert.rank_source;"
        "print(sorted({'megatron', 'transformers', 'peft', 'datasets', 'torch.distributed.checkpoint'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.stdout.strip() == "[]", done.stderr


def test_the_benchmark_measures_both_sides(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    arguments = ["bench", "convert", "--params", "3e6", "rounds=1", f"folder={tmp_path}", "--json", str(out)]
    done = subprocess.run(
        [sys.executable, "-m", "rlmca.cli.main", *arguments], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stderr + done.stdout
    figures = json.loads(out.read_text())
    rows = figures["results"]
    assert {"cp -r", "safetensors load + save", "HF -> torch_dist", "torch_dist -> HF --fast"} <= rows.keys()
    assert all(row["seconds"] > 0 and row["over_cp"] > 0 for row in rows.values()) and figures["bars"]
    assert rows["HF -> torch_dist"]["memory_mb"] < figures["bars"]["memory MB"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["figures.json"]


def test_the_folder_of_an_iteration_has_everything_too(tmp_path: Path) -> None:
    hf = save_model("deepseek_v3", tmp_path / "hf")
    more = {"model.layers.4.enorm.weight": torch.randn(32).bfloat16()}
    save_file({**load_file(hf / "model.safetensors"), **more}, hf / "model.safetensors", {"format": "pt"})
    config = json.loads((hf / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (hf / "config.json").write_text(json.dumps(config))
    command(hf, tmp_path / "ranks", "--to", "ranks")
    command(tmp_path / "ranks" / "release", tmp_path / "out")
    same(tmp_path / "out", hf)


def test_a_source_that_changes_between_attempts_is_noticed_wherever_its_config_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hf = save_model("llama", tmp_path / "hf")
    command(hf, tmp_path / "ranks", "--to", "ranks", "--fast")
    options = ConvertOptions(tmp_path / "ranks", tmp_path / "out", hf_config=hf, resume=True)

    def stops(*_: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(execute, "write_exactly", stops)
        with pytest.raises(ConvertError, match="Input/output error"):
            convert(options)
    file = next((tmp_path / "ranks").rglob("*.pt"))
    os.utime(file, ns=(1, 1))
    with pytest.raises(ConvertError, match="begun from other files"):
        convert(options)


def test_old_orders_of_queries_and_keys_are_refused(tmp_path: Path) -> None:
    hf = save_model("llama", tmp_path / "hf")
    command(hf, tmp_path / "ranks", "--to", "ranks")
    file = next((tmp_path / "ranks").rglob("*.pt"))
    torch.save(torch.load(file, weights_only=True) | {"checkpoint_version": 0}, file)
    with pytest.raises(ConvertError, match="checkpoint_version 0"):
        plan(ConvertOptions(tmp_path / "ranks", tmp_path / "out"))


@pytest.mark.parametrize("tree", ["dag", "cycle", "deep"])
def test_a_few_bytes_that_say_much_do_not_hang_the_reader(tree: str, tmp_path: Path) -> None:
    hf = save_model("llama", tmp_path / "hf")
    command(hf, tmp_path / "ranks", "--to", "ranks")
    file = next((tmp_path / "ranks").rglob("*.pt"))
    nested: list[object] = []
    for _ in range({"dag": 40, "cycle": 1, "deep": 200}[tree]):
        nested = [nested, nested] if tree == "dag" else [nested]
    if tree == "cycle":
        nested.append(nested)
    torch.save(torch.load(file, weights_only=True) | {"args": nested}, file)
    command(tmp_path / "ranks", tmp_path / "out")
    same(tmp_path / "out", hf)
    with contextlib.suppress(ConvertError):  # or read: what is asked is that it ends
        tensors_of(file)
