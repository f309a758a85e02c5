"""`convert` on Hugging Face folders: the command, what it refuses, what it says, and that nothing is lost on the way."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from rlmca.cli.convert import convert_command
from rlmca.transfer.convert import execute
from rlmca.transfer.convert.base import ConvertError
from rlmca.transfer.convert.hf import HFSource, HFTarget
from rlmca.transfer.convert.manifest import MANIFEST, check_manifest
from rlmca.transfer.convert.partial import Partial
from rlmca.transfer.convert.run import ConvertOptions, convert
from tests.helpers.models import save_model
from tests.helpers.transfer import stored

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tools" / "convert" / "convert.py"


def run(*arguments: object, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rlmca.cli.main", "convert", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, **kwargs)


def same(one: Path, two: Path) -> bool:
    have, want = stored(one), stored(two)
    return have.keys() == want.keys() and all(have[n].dtype == want[n].dtype and torch.equal(have[n], want[n]) for n in want)


# ---- what comes out


def test_the_script_recasts_and_reshards(hf_folders: dict[str, Path], tmp_path: Path) -> None:
    source, out = hf_folders["qwen2"], tmp_path / "out"
    command = [sys.executable, SCRIPT, source, out, "--to", "hf", "--dtype", "bf16", "--shard_gb", "1e-5", "--verify"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    have, want = stored(out), stored(source)
    assert have.keys() == want.keys() and all(torch.equal(have[n], want[n].bfloat16()) for n in want)
    files = sorted(out.glob("model-*.safetensors"))
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert len(files) > 2 and files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    assert set(index["weight_map"].values()) == {file.name for file in files} and index["weight_map"].keys() == want.keys()
    assert index["metadata"]["total_size"] == sum(t.numel() * 2 for t in want.values())
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    assert f"{len(want)} tensors" in done.stdout and "read back bit for bit" in done.stdout and "MB/s" in done.stdout


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("name", ["qwen3_tied_bf16", "llama"])
def test_default_keeps_type_and_config(name: str, fast: bool, hf_folders: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert(ConvertOptions(hf_folders[name], out, to="hf", fast=fast, verify=True))
    assert same(out, hf_folders[name]) and (out / MANIFEST).exists() is not fast
    assert (out / "config.json").read_bytes() == (hf_folders[name] / "config.json").read_bytes()


def test_transformers_loads_what_was_written(hf_folders: dict[str, Path], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    convert(ConvertOptions(hf_folders["qwen3_tied"], tmp_path / "out", to="hf", shard_gb=2e-5))
    ids = torch.arange(12)[None]
    one, two = (AutoModelForCausalLM.from_pretrained(folder)(ids).logits for folder in (hf_folders["qwen3_tied"], tmp_path / "out"))
    assert torch.equal(one, two)


@pytest.mark.parametrize(
    ("values", "dtype", "said"),
    [
        ([70000.0], "fp16", "model.norm.weight holds 70000"),
        ([float("nan"), 1e6], "fp16", "holds 1e"),
        ([3.4e38], "bf16", "holds 3.4e"),
        ([float("inf"), float("nan"), 1.0], "fp16", None),
    ],
)
def test_numbers_that_do_not_fit_are_refused_by_name(values: list[float], dtype: str, said: str | None, tmp_path: Path) -> None:
    source = save_model("llama", tmp_path / "model")
    tensors = stored(source)
    tensors["model.norm.weight"][: len(values)] = torch.tensor(values)
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    options = ConvertOptions(source, tmp_path / "out", to="hf", dtype=dtype)
    if said is None:
        convert(options)
        return
    with pytest.raises(ConvertError, match=said):
        convert(options)
    assert not (tmp_path / "out").exists()


def test_files_beside_the_weights_come_along(tmp_path: Path) -> None:
    source, out = save_model("deepseek_v3", tmp_path / "model"), tmp_path / "out"
    config = json.loads((source / "config.json").read_text())
    names = {"AutoConfig": "configuration_deepseek.DeepseekV3Config", "AutoModelForCausalLM": "modeling_x.DeepseekV3ForCausalLM"}
    (source / "config.json").write_text(json.dumps(config | {"auto_map": names}))
    texts = {
        "modeling_x.py": "from .helper_x import f\nfrom .deep.er import g\n", "helper_x.py": "f = 1\n", "deep/er.py": "g = 2\n",
        "generation_config.json": '{"eos_token_id": [7, 2]}', "chat_template.jinja": "{{ 'ü' }}", "preprocessor_config.json": "{}",
        "tokenizer.json": "{}", "tokenizer_config.json": '{"x": 1}',
    }  # fmt: skip
    for name, text in texts.items():
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(text)
    convert(ConvertOptions(source, out, to="hf"))
    assert {name: (out / name).read_text() for name in texts} == texts
    (source / "generation_config.json").unlink()
    convert(ConvertOptions(source, out, to="hf", overwrite=True))
    assert not (out / "generation_config.json").exists()


def test_neither_megatron_nor_transformers_is_imported() -> None:
    code = "import sys, rlmca.cli.convert; print(sorted({'megatron', 'transformers', 'peft', 'datasets'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.stdout.strip() == "[]", done.stderr


# ---- what is refused, with nothing written


def _lacks(source: Path) -> None:
    tensors = stored(source)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, source / "model.safetensors")


def _has_more(source: Path) -> None:
    save_file(stored(source) | {"model.layers.0.mlp.strange.weight": torch.zeros(2)}, source / "model.safetensors")


def _misshapen(source: Path) -> None:
    save_file(stored(source) | {"model.norm.weight": torch.zeros(31)}, source / "model.safetensors")


def _cut_off(source: Path) -> None:
    data = (source / "model.safetensors").read_bytes()
    (source / "model.safetensors").write_bytes(data[:-10])


def _no_header(source: Path) -> None:
    (source / "model.safetensors").write_bytes(b"not a header, and more than eight bytes")


def _shard_gone(source: Path) -> None:
    (source / "model.safetensors").rename(source / "model-00001-of-00002.safetensors")
    place = dict.fromkeys(["model.norm.weight"], "model-00002-of-00002.safetensors")
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": place}))


def _field(source: Path) -> None:
    path = source / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"hidden_act": "gelu"}))


def _sharded(source: Path, change: Callable[[dict[str, str], Path], None]) -> None:
    place = dict.fromkeys(stored(source), "model-00001-of-00001.safetensors")
    (source / "model.safetensors").rename(source / "model-00001-of-00001.safetensors")
    change(place, source / "model-00001-of-00001.safetensors")
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": place}))


def _not_in_the_index(source: Path) -> None:
    def change(_: dict[str, str], file: Path) -> None:
        save_file(stored(source) | {"visual.tower.weight": torch.ones(2)}, file)

    _sharded(source, change)


def _overlapping(source: Path) -> None:
    def change(_: dict[str, str], file: Path) -> None:
        raw = file.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + length])
        names = [f"model.layers.{n}.self_attn.q_proj.weight" for n in (0, 1)]
        header[names[1]]["data_offsets"] = header[names[0]]["data_offsets"]
        text = json.dumps(header).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])

    _sharded(source, change)


def _both_kinds(source: Path) -> None:
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "model.safetensors"}}))


def _quantized(source: Path) -> None:
    path = source / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": {"quant_method": "gptq", "bits": 4}}))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_lacks, "missing: model.layers.1.mlp.up_proj.weight"),
        (_has_more, "unexpected: model.layers.0.mlp.strange.weight"),
        (_misshapen, "model.norm.weight has shape (31,), config.json says (32,)"),
        (_cut_off, "model.safetensors"),
        (_no_header, "model.safetensors"),
        (_shard_gone, "lacks model-00002-of-00002.safetensors"),
        (_field, "hidden_act"),
        (_quantized, "quant_method 'gptq'"),
        (_not_in_the_index, "the index does not name tensors that are there: visual.tower.weight"),
        (_overlapping, "begins inside of another tensor"),
        (_both_kinds, "has both model.safetensors and model.safetensors.index.json"),
    ],
)
def test_a_damaged_folder_is_refused_by_name(
    damage: Callable[[Path], None], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = save_model("llama", tmp_path / "model")
    damage(source)
    assert convert_command([str(source), str(tmp_path / "out"), "--to", "hf"]) == 1
    assert words in capsys.readouterr().err.replace("\n", " ")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["{m}"], "OUT is missing"),
        (["{m}", "{t}/full", "--to", "hf"], "exists and is not empty"),
        (["{m}", "{t}/file", "--to", "hf"], "is a file"),
        (["{t}/nothing", "{t}/out"], "does not exist"),
        (["{t}/full", "{t}/out"], "is no model that can be converted"),
        (["{m}", "{m}/inside", "--to", "hf"], "lie in each other"),
        (["{m}", "{t}/out", "--to", "hf", "--tp", "2"], "--to hf has no layout of ranks"),
        (["{m}", "{t}/out", "--to", "hf", "--shard_gb", "0"], "shard_gb is 0"),
        (["{m}", "{t}/out", "--to", "hf", "--fast", "--resume"], "leave one of them out"),
        (["{m}", "{t}/out", "--to", "hf", "--adapter_name_or_path", "{t}/full"], "adapter"),
        (["{m}", "--verify"], "has no manifest.json"),
        (["{m}", "--verify", "--tp", "2", "--to", "ranks"], "--to, --tp belong to a conversion"),
        (["{m}", "{t}/out", "--to", "hf", "--shard_gb", "nan"], "shard_gb is nan"),
        (["{m}", "{t}/out", "--shard_gb", "inf"], "shard_gb is inf"),
        (["{m}", "/", "--to", "hf"], "name a folder"),
    ],
)
def test_a_wrong_command_is_refused(arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save_model("llama", tmp_path / "model")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("x")
    (tmp_path / "file").write_text("x")
    assert convert_command([a.format(m=model, t=tmp_path) for a in arguments]) == 1
    assert words in capsys.readouterr().err.replace("\n", " ")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "full", "model"]


def test_too_little_room_is_said_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = save_model("llama", tmp_path / "model")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(ConvertError, match=r"0\.00 GB left"):
        convert(ConvertOptions(source, tmp_path / "out", to="hf"))
    assert not (tmp_path / "out").exists()


def test_a_dry_run_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = save_model("llama", tmp_path / "model")
    assert convert_command([str(source), str(tmp_path / "out"), "--to", "hf", "--dry_run"]) == 0
    said = capsys.readouterr().out
    assert "model.safetensors" in said and f"{sum(t.numel() * 4 for t in stored(source).values()):,}" in said
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model"]


# ---- what ends it half-way


class Fails:
    """`write_exactly` that ends with an error once so many items are written."""

    def __init__(self, error: BaseException, after: int) -> None:
        self.error, self.left = error, after
        self.write = execute.write_exactly

    def __call__(self, *args: Any) -> None:
        if self.left == 0:
            raise self.error
        self.left -= 1
        self.write(*args)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(28, "No space left on device"), "the disk is full: stopped after"),
        (OSError(5, "Input/output error"), "Input/output error"),
        (KeyboardInterrupt(), "stopped after"),
    ],
)
@pytest.mark.parametrize("existing", [False, True])
def test_what_stops_half_way_leaves_out_alone_and_goes_on(
    error: BaseException, words: str, existing: bool, hf_folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = hf_folders["qwen3_untied"], tmp_path / "out"
    if existing:
        save_model("llama", out)
    before = {p.name: p.read_bytes() for p in out.iterdir()} if existing else None
    options = ConvertOptions(source, out, to="hf", overwrite=existing, threads=1)
    with monkeypatch.context() as patch:
        patch.setattr(execute, "write_exactly", Fails(error, 7))
        with pytest.raises((ConvertError, KeyboardInterrupt), match=words) as caught:
            convert(options)
    assert "--resume" in str(caught.value)
    assert ({p.name: p.read_bytes() for p in out.iterdir()} if existing else None) == before
    written: list[str] = []
    real = execute.Execution.write
    monkeypatch.setattr(execute.Execution, "write", lambda self, item, files: written.append(item.name) or real(self, item, files))
    summary = convert(ConvertOptions(source, out, to="hf", overwrite=existing, resume=True, verify=True))
    assert summary.resumed + len(written) == summary.tensors and 1 <= summary.resumed < summary.tensors
    assert same(out, source) and check_manifest(out) == summary.tensors
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"] and not list(out.glob(".*"))


def test_resuming_writes_again_what_was_spoilt_and_refuses_other_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = save_model("qwen2", tmp_path / "model"), tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(execute, "write_exactly", Fails(OSError(28, "full"), 9))
        with pytest.raises(ConvertError):
            convert(ConvertOptions(source, out, to="hf", threads=1))
    partial = tmp_path / ".out.partial" / "model.safetensors"
    data = bytearray(partial.read_bytes())
    data[8 + int.from_bytes(data[:8], "little")] ^= 1  # the first byte of the first tensor
    partial.write_bytes(data)
    for change in ({"dtype": "bf16"}, {"shard_gb": 1e-5}):
        with pytest.raises(ConvertError, match="begun from other files or with other options"):
            convert(ConvertOptions(source, out, to="hf", resume=True, **change))
    os.utime(source / "model.safetensors", ns=(1, 1))
    with pytest.raises(ConvertError, match="begun from other files"):
        convert(ConvertOptions(source, out, to="hf", resume=True))
    journal = tmp_path / ".out.partial" / ".convert.jsonl"
    lines = journal.read_text().splitlines()
    mark = json.loads(lines[0])
    stat = (source / "model.safetensors").stat()
    mark["mark"]["files"][str((source / "model.safetensors").resolve())] = [stat.st_size, stat.st_mtime_ns]
    journal.write_text("\n".join([json.dumps(mark), *lines[1:], lines[-1][:20]]))  # the last line was cut off, too
    summary = convert(ConvertOptions(source, out, to="hf", resume=True))
    assert summary.resumed == len(lines) - 2 and same(out, source)


def test_a_killed_process_leaves_out_alone(tmp_path: Path) -> None:
    source, out = save_model("llama", tmp_path / "model", hidden_size=512, intermediate_size=2048, num_hidden_layers=6), tmp_path / "out"
    (out / "sub").mkdir(parents=True)
    (out / "sub" / "mine").write_text("mine")
    command = [sys.executable, "-m", "rlmca.cli.main", "convert", str(source), str(out), "--to", "hf", "--overwrite", "--threads", "1"]
    process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    journal = tmp_path / ".out.partial" / ".convert.jsonl"
    while process.poll() is None and not (journal.exists() and journal.read_text().count("\n") > 2):
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    killed = process.wait() == -signal.SIGKILL
    if killed:  # on a fast machine it may have been done
        assert [p.name for p in out.iterdir()] == ["sub"] and (out / "sub" / "mine").read_text() == "mine"
        assert run(source, out, "--to", "hf", "--overwrite", "--resume", "--verify").returncode == 0
    assert same(out, source) and sorted(p.name for p in tmp_path.iterdir()) == ["model", "out"]


def test_a_flipped_bit_is_found(hf_folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = hf_folders["qwen3_tied"], tmp_path / "out"
    convert(ConvertOptions(source, out, to="hf"))
    data = bytearray((out / "model.safetensors").read_bytes())
    data[-3] ^= 4
    (out / "model.safetensors").write_bytes(data)
    done = run(out, "--verify")
    assert done.returncode == 1 and "1 of" in done.stderr and "are not those that were written" in done.stderr
    spoils = execute.write_exactly
    monkeypatch.setattr(execute, "write_exactly", lambda fd, view, at: spoils(fd, memoryview(bytes([view[0] ^ 1]) + bytes(view[1:])), at))
    for fast in (False, True):
        if fast:
            monkeypatch.setattr(execute, "copy_run", lambda *args: None)
        with pytest.raises(ConvertError, match="do not read back as the source has them"):
            convert(ConvertOptions(source, tmp_path / "other", to="hf", verify=True, fast=fast))
        assert not (tmp_path / "other").exists()


def test_two_at_once_and_links(tmp_path: Path) -> None:
    source, out = save_model("llama", tmp_path / "model"), tmp_path / "out"
    held = Partial(out, {}, overwrite=False, resume=False)
    with pytest.raises(ConvertError, match="another process is writing"):
        convert(ConvertOptions(source, out, to="hf"))
    held.close()
    (tmp_path / "far" / "away").mkdir(parents=True)
    out.symlink_to(tmp_path / "far" / "away")
    convert(ConvertOptions(source, out, to="hf"))
    assert out.is_symlink() and same(tmp_path / "far" / "away", source) and sorted(p.name for p in (tmp_path / "far").iterdir()) == ["away"]
    (tmp_path / "link").symlink_to(source)
    with pytest.raises(ConvertError, match="lie in each other"):
        convert(ConvertOptions(tmp_path / "link", source / "x", to="hf"))


def test_an_index_that_leads_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    source, other = save_model("llama", tmp_path / "ü model"), save_model("llama", tmp_path / "other", seed=1)
    place = dict.fromkeys(stored(source), f"../{other.name}/model.safetensors")
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": place}))
    (source / "model.safetensors").unlink()
    with pytest.raises(ConvertError, match="files outside of the folder"):
        convert(ConvertOptions(source, tmp_path / "out", to="hf"))


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.update(tensors={}),
        lambda m: next(iter(m["tensors"].values())).update(file="../other/model.safetensors"),
        lambda m: next(iter(m["tensors"].values())).update(offset=-4),
        lambda m: next(iter(m["tensors"].values())).pop("bytes"),
        lambda m: m.update(tensors=[]),
        lambda m: m.update(format="other"),
    ],
)
def test_a_manifest_that_says_nothing_is_refused(change: Any, hf_folders: dict[str, Path], tmp_path: Path) -> None:
    convert(ConvertOptions(hf_folders["llama"], tmp_path / "out", to="hf"))
    manifest = json.loads((tmp_path / "out" / MANIFEST).read_text())
    change(manifest)
    (tmp_path / "out" / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(ConvertError, match="manifest|format"):
        check_manifest(tmp_path / "out")


def test_files_that_the_manifest_does_not_name_are_said(hf_folders: dict[str, Path], tmp_path: Path) -> None:
    convert(ConvertOptions(hf_folders["llama"], tmp_path / "out", to="hf"))
    save_file({"x": torch.ones(1)}, tmp_path / "out" / "model-2.safetensors")
    with pytest.raises(ConvertError, match=r"does not name: model-2.safetensors"):
        check_manifest(tmp_path / "out")


def test_a_plan_that_loses_or_lacks_elements_is_refused(hf_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    source = HFSource(hf_folders["llama"])
    items = HFTarget(source.tensors).items
    execute.check_plan(items, source)
    with pytest.raises(ConvertError, match=f"nothing would be made of {items[3].name}"):
        execute.check_plan([*items[:3], *items[4:]], source)
    parts = HFSource.parts
    for times in (0, 2):
        monkeypatch.setattr(HFSource, "parts", lambda self, name, times=times: times * list(parts(self, name) or ()))
        with pytest.raises(ConvertError, match=f"{items[0].name}: .* elements are to come"):
            execute.check_plan(items, source)
