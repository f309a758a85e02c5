"""The conversion script: Hugging Face folder to Hugging Face folder, and what it refuses."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rlmca.transfer.convert.rewrite import rewrite_hf
from tests.helpers.transfer import stored

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tools" / "convert" / "convert.py"


def test_recast_and_reshard(hf_folders: dict[str, Path], tmp_path: Path) -> None:
    source, out = hf_folders["qwen2"], tmp_path / "out"
    command = [sys.executable, SCRIPT, source, out, "--dtype", "bf16", "--shard_gb", "1e-5"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    have, want = stored(out), stored(source)
    assert have.keys() == want.keys() and all(torch.equal(have[n], want[n].bfloat16()) for n in want)
    assert len(list(out.glob("model-*.safetensors"))) > 2
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    assert f"{len(want)} tensors" in done.stdout


def test_refusals_write_nothing(hf_folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = importlib.util.spec_from_file_location("convert_script", SCRIPT)
    assert spec and spec.loader
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    megatron = tmp_path / "megatron"
    megatron.mkdir()
    (megatron / "latest_checkpointed_iteration.txt").write_text("1")
    for arguments, words in [
        ((megatron, tmp_path / "out"), "reading those is not in this version"),
        ((hf_folders["llama"], tmp_path / "out", "--to", "torch_dist"), "not in this version"),
        ((tmp_path / "nothing", tmp_path / "out"), "is not a folder"),
        ((hf_folders["llama"], hf_folders["qwen2"]), "not empty"),
    ]:
        assert script.main(list(map(str, arguments))) == 1
        assert words in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["megatron"]


@pytest.mark.parametrize("name", ["qwen3_tied_bf16", "llama"])
def test_default_keeps_type_and_config(name: str, hf_folders: dict[str, Path], tmp_path: Path) -> None:
    rewrite_hf(hf_folders[name], tmp_path / "out")
    have, want = stored(tmp_path / "out"), stored(hf_folders[name])
    assert have.keys() == want.keys() and all(have[n].dtype == want[n].dtype and torch.equal(have[n], want[n]) for n in want)
    assert (tmp_path / "out" / "config.json").read_bytes() == (hf_folders[name] / "config.json").read_bytes()
