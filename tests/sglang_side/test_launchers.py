"""The launchers with a stand-in for sglang: how arguments, key and parent arrive, and what spawned workers see."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
import torch

from rlmca.rollout.sglang.process import group_members

FOLDER = Path(__file__).parents[2] / "rlmca" / "sglang_side"
LAUNCHERS = ["launch.py", "launch_cpu.py"]
SERVER = """
import json, multiprocessing, os, sys, time

def worker(out):
    import sgl_kernel
    shims = [type(finder).__name__ for finder in sys.meta_path]
    json.dump({"shims": shims, "kernel": str(type(sgl_kernel.x.y))}, open(out, "w"))

if __name__ == "__main__":
    out = os.environ["OUT"]
    if "--workers" in sys.argv:
        from sglang.workers import worker
        process = multiprocessing.get_context("spawn").Process(target=worker, args=(out,))
        process.start(); process.join(); sys.exit(process.exitcode)
    json.dump({"argv": sys.argv[1:], "pid": os.getpid(), "env": dict(os.environ)}, open(out + ".part", "w"))
    os.rename(out + ".part", out)
    time.sleep(600)
"""


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"tried_{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    package = tmp_path / "sglang"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "launch_server.py").write_text(SERVER)
    (package / "workers.py").write_text(SERVER.split("if __name__")[0])
    return {**os.environ, "PYTHONPATH": str(tmp_path), "OUT": str(tmp_path / "out"), "RLMCA_SGLANG_API_KEY": "-KEY"}


def wait_for(path: Path) -> dict:
    until = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < until, f"{path} does not come"
        time.sleep(0.02)
    found: dict = json.loads(path.read_text())
    return found


@pytest.mark.serial
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_server_ends_when_its_parent_is_killed(launcher: str, env: dict[str, str], tmp_path: Path) -> None:
    code = (
        "import os, subprocess, sys, time; "
        f"subprocess.Popen([sys.executable, {str(FOLDER / launcher)!r}, str(os.getpid()), '--port', '7']); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], env=env, start_new_session=True)
    try:
        found = wait_for(tmp_path / "out")
        assert found["argv"][-3:] == ["--port", "7", "--api-key=-KEY"], "a random key may begin with a dash"
        assert "RLMCA_SGLANG_API_KEY" not in found["env"]
        assert ("torch_native" in found["argv"]) == (launcher == "launch_cpu.py")
        assert found["pid"] in group_members(parent.pid)
        parent.kill()
        parent.wait()
        until = time.monotonic() + 30
        while group_members(parent.pid):
            assert time.monotonic() < until, "the server outlives the trainer"
            time.sleep(0.02)
    finally:
        for process in group_members(parent.pid):
            os.kill(process, signal.SIGKILL)
        parent.wait()


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_server_whose_parent_is_gone_already_ends_at_once(launcher: str, env: dict[str, str], tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, str(FOLDER / launcher), "1", "--port", "7"], env=env, check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL and not (tmp_path / "out").exists()


def test_spawned_workers_get_the_shims_too(env: dict[str, str], tmp_path: Path) -> None:
    command = [sys.executable, str(FOLDER / "launch_cpu.py"), str(os.getpid()), "--workers"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out").read_text())
    assert found["shims"].count("ServerShims") == 1 and "MissingKernel" in found["kernel"]


def murmur3_32(data: bytes, seed: int = 0) -> int:
    """MurmurHash3_x86_32 on bytes, written from its definition; whole words only."""
    state = seed
    for i in range(0, len(data), 4):
        word = int.from_bytes(data[i : i + 4], "little") * 0xCC9E2D51 & 0xFFFFFFFF
        word = (word << 15 | word >> 17) * 0x1B873593 & 0xFFFFFFFF
        state ^= word
        state = ((state << 13 | state >> 19) & 0xFFFFFFFF) * 5 + 0xE6546B64 & 0xFFFFFFFF
    state ^= len(data)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        state = (state ^ state >> shift) * factor & 0xFFFFFFFF
    return state


def test_the_hash_is_murmur3() -> None:
    assert (murmur3_32(b""), murmur3_32(b"test"), murmur3_32(b"aaaa", 0x9747B28C)) == (0, 0xBA6BD213, 0x5A97808A)  # published values
    seeds, positions, columns = [0, 1, -5, 2**62 + 3], [0, 7, 100, 131071], [0, 1, 151935]
    got = load("launch_cpu").murmur_hash32(torch.tensor(seeds).view(torch.uint64), torch.tensor(positions), torch.tensor(columns))
    assert got.dtype == torch.uint32
    want = [
        [murmur3_32(b"".join(w.to_bytes(4, "little") for w in (s & 0xFFFFFFFF, s >> 32 & 0xFFFFFFFF, p, c))) for c in columns]
        for s, p in zip(seeds, positions, strict=True)
    ]
    assert got.to(torch.int64).tolist() == want


def test_a_missing_kernel_can_be_named_but_not_called() -> None:
    kernel = load("launch_cpu").MissingKernel("sgl_kernel")
    with pytest.raises(NotImplementedError, match=r"sgl_kernel\.gemm\.fp8 is a compiled kernel"):
        kernel.gemm.fp8(1, x=2)
    assert not hasattr(kernel, "__wrapped__")


def test_loading_a_launcher_for_a_look_changes_nothing() -> None:
    before = list(sys.meta_path)
    for launcher in LAUNCHERS:
        load(launcher.removesuffix(".py"))
    assert sys.meta_path == before


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda p: p.name)
def test_files_are_self_contained(path: Path) -> None:
    """They run where the package is not installed."""
    names = {
        (alias.name if isinstance(node, ast.Import) else node.module or "").split(".")[0]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    }
    assert names <= set(sys.stdlib_module_names) | {"torch", "numpy", "sglang"}
