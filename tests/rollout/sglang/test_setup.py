"""From a configuration to a Python, a command line, and the choice of the engine."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rlmca.config import ConfigError
from rlmca.rollout.base import RolloutError
from rlmca.rollout.sglang import environment
from rlmca.rollout.sglang.environment import resolve_engine, sglang_python
from rlmca.rollout.sglang.server import server_command
from rlmca.rollout.sglang.setup import served_model, server_options, sglang_engine
from rlmca.run.source import run_dtype
from tests.helpers.models import save_model
from tests.rollout.sglang.conftest import run_config
from tests.rollout.sglang.double import Double


def fake_python(path: Path, has_sglang: bool) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\nexit {0 if has_sglang else 1}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A trainer environment with nothing beside it; the folder that holds it."""
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))
    monkeypatch.setattr(environment.importlib.util, "find_spec", lambda name: None)
    return tmp_path


def test_the_environment_beside_the_trainers_is_found(trainer: Path) -> None:
    with pytest.raises(ConfigError, match=r"neither this environment nor .*\.venv-sglang.* has sglang: run `make venv`"):
        sglang_python()
    beside = fake_python(trainer / ".venv-sglang" / "bin" / "python", True)
    assert sglang_python() == beside
    fake_python(beside, False)
    with pytest.raises(ConfigError, match="make venv"):
        sglang_python()


def test_the_trainers_own_environment_comes_first(trainer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_python(trainer / ".venv-sglang" / "bin" / "python", True)
    monkeypatch.setattr(environment.importlib.util, "find_spec", lambda name: SimpleNamespace(origin="sglang/__init__.py"))
    assert sglang_python() == Path(sys.executable)


def test_a_configured_python_must_be_right(tmp_path: Path) -> None:
    assert sglang_python(str(fake_python(tmp_path / "good", True))) == tmp_path / "good"
    for path, words in (
        (tmp_path / "none", "does not exist"),
        (fake_python(tmp_path / "bad", False), "has no sglang"),
        (tmp_path, "does not exist"),
    ):
        with pytest.raises(ConfigError, match=rf"sglang: python: {path} {words}"):
            sglang_python(str(path))
    (tmp_path / "text").write_text("no program")
    with pytest.raises(ConfigError, match="cannot be run"):
        sglang_python(str(tmp_path / "text"))


def test_auto_is_sglang_with_a_gpu_and_an_environment(trainer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    auto = run_config(rollout_engine="auto", use_cpu=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert resolve_engine(auto) == "local"
    fake_python(trainer / ".venv-sglang" / "bin" / "python", True)
    assert resolve_engine(auto) == "sglang"
    assert resolve_engine(run_config(rollout_engine="auto", use_cpu=True)) == "local"
    with pytest.raises(ConfigError, match="does not exist"):
        resolve_engine(run_config(rollout_engine="auto", use_cpu=False, sglang={"python": "/no/python"}))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_engine(auto) == "local" == resolve_engine(run_config(rollout_engine="torch"))
    assert resolve_engine(run_config(rollout_engine="auto", sglang_base_urls="http://h:1", sync={"method": "tensor"})) == "sglang"
    assert resolve_engine(run_config()) == "sglang"


def test_what_a_server_is_started_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = fake_python(tmp_path / "python", True)
    folder = save_model("qwen3_tied", tmp_path / "model")
    options = {
        "python": str(python),
        "num_engines": 2,
        "tp": 2,
        "ep": 2,
        "max_running_requests": 7,
        "context_length": 100,
        "api_key": "SECRET",
    }
    cfg = run_config(
        use_cpu=False,
        seed=11,
        sglang=options | {"mem_fraction_static": 0.5, "extra_args": {"chunked_prefill_size": 64, "enable-metrics": True}},
    )
    model = served_model(folder, 100)
    assert (model.max_length, model.vocab_size) == (100, 67)

    def command(number: int, cuda: bool) -> str:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
        made = server_options(cfg, folder, model, torch.bfloat16, tmp_path / "logs", number)
        assert made.log == tmp_path / "logs" / f"sglang-{number}.log" and made.api_key == "SECRET"
        return " ".join(server_command(made, tmp_path / "served", 999))

    for fp16, bf16, name in ((True, False, "float16"), (False, True, "bfloat16"), (False, False, "float32")):
        dtype = run_dtype(run_config(fp16=fp16, bf16=bf16))
        assert server_options(cfg, folder, model, dtype, tmp_path / "logs", 0).dtype == name
    gpu, cpu = command(1, True), command(0, False)
    for line in (gpu, cpu):
        assert (
            "SECRET" not in line
            and f"--model-path {tmp_path / 'served'} --host 127.0.0.1 --port 999 --dtype bfloat16 --random-seed 11" in line
        )
        assert "--skip-tokenizer-init --tp-size 2" in line and "--context-length 116" in line and "--ep-size 2" in line
        assert line.endswith("--chunked-prefill-size 64 --enable-metrics") and "--max-running-requests 7" in line
    assert "sglang_side/launch.py" in gpu and "--base-gpu-id 2" in gpu and "deterministic" not in gpu
    assert "sglang_side/launch_cpu.py" in cpu and "--enable-deterministic-inference" in cpu and "gpu" not in cpu.split("launch_cpu.py")[1]


def test_a_context_beyond_the_models_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="context_length 129 is more than the model's max_position_embeddings 128"):
        served_model(save_model("llama", tmp_path), 129)


def test_servers_that_ran_already_get_the_folders_weights_first(tmp_path: Path) -> None:
    folder = save_model("qwen3_untied", tmp_path / "model")
    one, two = Double(version="57"), Double()
    with one.serving(), two.serving():
        cfg = run_config(sglang_base_urls=[one.url, two.url], sync={"method": "tensor", "bucket_mb": 1000})
        with sglang_engine(cfg, folder, dtype=torch.float32, log_dir=tmp_path) as engine:
            assert engine.version == 0 and one.version == two.version == "0"
            assert sorted(one.received()[0]) == sorted(engine.model.expected.shapes)


def test_a_server_that_is_not_there_is_named_and_started_ones_are_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rlmca.rollout.sglang import server

    monkeypatch.setattr(server, "_ATTACH_S", 0.3)
    folder = save_model("qwen3_tied", tmp_path / "model")
    with pytest.raises(RolloutError, match=r"SGLang server http://127.0.0.1:9 was not ready within 0.3 s"):
        sglang_engine(run_config(sglang_base_urls="http://127.0.0.1:9"), folder, dtype=torch.float32, log_dir=tmp_path)


def test_a_folder_named_sglang_is_no_sglang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clone of it, or the log folder of a run, in the current folder."""
    (tmp_path / "sglang").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert environment._unconfigured() != Path(sys.executable)
    assert "has no sglang" in str(environment._problem(Path(sys.executable)))


def test_what_auto_leaves_unused_is_said() -> None:
    from rlmca.config import Environment, make_config

    values = {"model_name_or_path": "m", "dataset": "d", "output_dir": "o", "stage": "grpo", "rewards": "exact"}
    cfg = make_config({**values, "sglang": {"tp": 2}, "sync": {"method": "tensor"}}, env=Environment(use_mca=True))
    assert [note.split(" ")[0] for note in cfg.notes if "rollout_engine: auto means sglang" in note] == ["sglang", "sync"]


def test_a_full_disk_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """safetensors reports it as an error of its own kind."""
    import asyncio

    from safetensors import SafetensorError

    from rlmca.config.sglang import SyncOptions
    from rlmca.rollout.sglang import engine as engine_module
    from rlmca.rollout.sglang.engine import ServedModel, SglangEngine
    from rlmca.rollout.sglang.expected import ExpectedTensors
    from rlmca.rollout.sglang.server import SglangServer

    def full(*_: object) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(engine_module, "write_files", full)
    model = ServedModel({"vocab_size": 9}, ExpectedTensors(None), None)
    engine = SglangEngine([SglangServer.attach("http://127.0.0.1:9")], model, sync=SyncOptions(dir=str(tmp_path)), scratch=tmp_path)
    with pytest.raises(RolloutError, match=r"weights cannot be written to .*No space left.*write sync: \{dir: ...\}"):
        asyncio.run(engine._update_by_files([], []))
