"""Which cases of a serial test run without `--whole`."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

CONFTEST = Path(__file__).parents[1] / "conftest.py"
TESTS = """
import pytest

@pytest.mark.serial
@pytest.mark.parametrize("n", range(20))
def test_sampled(n): ...

@pytest.mark.serial
@pytest.mark.cases(5)
@pytest.mark.parametrize("n", range(20))
def test_more(n): ...

@pytest.mark.parametrize("n", range(20))
def test_beside_others(n): ...
"""


def collected(folder: Path, *arguments: str) -> list[str]:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *arguments]
    out = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return re.findall(r"^test_x.py::(\S+)$", out.stdout, re.MULTILINE)


def test_a_seed_draws_the_cases_of_serial_tests_and_whole_runs_all(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST.read_text())
    (tmp_path / "test_x.py").write_text(TESTS)
    drawn = collected(tmp_path)
    assert drawn == collected(tmp_path)
    assert drawn != collected(tmp_path, "--test-seed=1")
    count = {name: sum(test.startswith(name + "[") for test in drawn) for name in ("test_sampled", "test_more", "test_beside_others")}
    assert count == {"test_sampled": 2, "test_more": 5, "test_beside_others": 20}
    assert len(collected(tmp_path, "--whole")) == 60
    left = next(f"test_sampled[{n}]" for n in range(20) if f"test_sampled[{n}]" not in drawn)
    assert collected(tmp_path, f"test_x.py::{left}") == [left]
