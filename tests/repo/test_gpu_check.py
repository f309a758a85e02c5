"""The check for a GPU, with a CPU in its place: it runs, and says so when numbers differ."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "tools" / "gpu_check.py"


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_check"] = module  # dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


@pytest.mark.serial
@pytest.mark.whole
def test_a_cpu_equals_itself() -> None:
    done = subprocess.run([sys.executable, SCRIPT, "--device", "cpu"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "gradients, bfloat16, packed" in done.stdout and "offload and onload" in done.stdout and "FAILED" not in done.stdout


def test_without_a_gpu_it_says_what_is_missing() -> None:
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 2 and "no CUDA device" in done.stderr


def test_a_wrong_gradient_or_a_lost_bit_fails(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    right = {"loss": 1.0, "gradients": {"a": torch.ones(4), "b": torch.ones(4)}}
    cpu = {"cuda": False, "float32, padded": right}
    assert script.show(script.compare(cpu, {**cpu, "offload": 0.0})) == 0
    for wrong in (
        {"float32, padded": {**right, "gradients": {"a": torch.ones(4), "b": torch.full((4,), 1.001)}}},
        {"float32, padded": {**right, "gradients": {"a": torch.ones(4), "b": torch.full((4,), float("nan"))}}},
        {"float32, padded": {**right, "loss": 1.01}},
        {"float32, padded": {**right, "loss": float("nan")}},
        {"offload": 1e-9},
    ):
        capsys.readouterr()
        assert script.show(script.compare(cpu, {**cpu, "offload": 0.0, **wrong})) == 1
        assert capsys.readouterr().out.count("FAILED") == 1
