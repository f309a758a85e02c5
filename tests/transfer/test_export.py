"""Export: what comes along, what may stand in the way, and that no half folder is left behind."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import AutoConfig, PreTrainedTokenizerFast

from rlmca.layouts import Topology
from rlmca.transfer.export import export_hf
from tests.helpers.ranks import rank_pool
from tests.helpers.transfer import export_error, live

SIDE_FILES = {
    "generation_config.json": b'{"eos_token_id": [2, 3]}',
    "tokenizer.json": b"{ }\n\n",
    "tokenizer_config.json": b'{"model_max_length":  5}',
    "special_tokens_map.json": b"{}",
    "merges.txt": b"a b",
    "vocab.json": b"{}",
    "chat_template.jinja": b"{{ messages }}\r\n",
    "additional_chat_templates/tool.jinja": b"tool",
    "modeling_custom.py": b"x = 1",
    "LICENSE": b"free",
}


@pytest.fixture
def source(hf_folders: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(hf_folders["qwen3_tied"], tmp_path / "source"))


def test_side_files_come_along_byte_for_byte(source: Path, tmp_path: Path) -> None:
    (source / "additional_chat_templates").mkdir()
    for name, content in SIDE_FILES.items():
        (source / name).write_bytes(content)
    for name in ("optimizer.pt", "trainer_log.jsonl", "pytorch_model.bin"):
        (source / name).write_bytes(b"stays behind")
    export_hf(live(source, Topology(), torch.float32), tmp_path / "out", source)
    have = {str(p.relative_to(tmp_path / "out")): p.read_bytes() for p in (tmp_path / "out").rglob("*") if p.is_file()}
    assert have.pop("model.safetensors")
    assert have == {**SIDE_FILES, "config.json": (source / "config.json").read_bytes()}


def test_without_a_source_config_and_tokenizer_are_written(source: Path, tmp_path: Path) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")))
    export_hf(live(source, Topology(), torch.float32), tmp_path / "out", tokenizer=tokenizer)
    written, want = (AutoConfig.from_pretrained(folder).to_dict() for folder in (tmp_path / "out", source))
    assert {**written, "_name_or_path": ""} == {**want, "_name_or_path": ""}
    assert PreTrainedTokenizerFast.from_pretrained(tmp_path / "out").get_vocab() == {"a": 0, "b": 1}
    (source / "tokenizer.json").write_bytes(SIDE_FILES["tokenizer.json"])
    export_hf(live(source, Topology(), torch.float32), tmp_path / "two", source, tokenizer=tokenizer)
    assert (tmp_path / "two" / "tokenizer.json").read_bytes() == SIDE_FILES["tokenizer.json"]


def test_what_stands_in_the_way(source: Path, tmp_path: Path) -> None:
    weights = live(source, Topology(), torch.float32)
    out = tmp_path / "out"
    out.mkdir()
    export_hf(weights, out, source)  # an empty folder is no obstacle
    with pytest.raises(FileExistsError, match="not empty"):
        export_hf(weights, out, source)
    (out / "stale").write_text("old")
    export_hf(weights, out, source, overwrite=True)
    assert not (out / "stale").exists() and (out / "model.safetensors").exists()
    for bad in (source, tmp_path):
        with pytest.raises(ValueError, match="holds the model it is made from"):
            export_hf(weights, bad, source, overwrite=True)
    with pytest.raises(ValueError, match="int8"):
        export_hf(weights, tmp_path / "never", source, dtype=torch.int8)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "source"]


@pytest.mark.serial
def test_one_rank_failing_ends_the_export_on_all(source: Path, tmp_path: Path) -> None:
    pool, topology = rank_pool(2), Topology(tp=2)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("x")
    first, second = pool.run(export_error, source, tmp_path / "full", topology, {})
    assert first.startswith("FileExistsError") and "another rank failed: FileExistsError" in second
    first, second = pool.run(export_error, source, tmp_path / "new", topology, {"dtype": torch.int8})  # fails after the first check
    assert first.startswith("ValueError: cannot write") and "another rank failed: ValueError" in second
    assert not (tmp_path / "new").exists()
    assert pool.run(export_error, source, tmp_path / "new", topology, {}) == ["no error", "no error"]
    assert json.loads((tmp_path / "new" / "config.json").read_text())["model_type"] == "qwen3"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["full", "new", "source"]
