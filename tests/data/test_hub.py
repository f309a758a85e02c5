"""Data sets of the hub, loaded by name through HF_ENDPOINT; the hub is a server on the loopback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.hub import loopback_hub

TRAIN = [{"instruction": f"question {i}", "input": "", "output": f"answer {i}"} for i in range(5)]
OTHER = [{"instruction": "other", "input": "", "output": "another"}]


def lines(rows: list[dict[str, str]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


REPOS = {
    "org/toy": {"data/train.jsonl": lines(TRAIN), "data/test.jsonl": lines(OTHER)},
    "org/two": {
        "README.md": b"---\nconfigs:\n- config_name: a\n  data_files: a.jsonl\n- config_name: b\n  data_files: b.jsonl\n---\n",
        "a.jsonl": lines(TRAIN),
        "b.jsonl": lines(OTHER),
    },
}
INFO: dict[str, dict[str, Any]] = {
    "plain": {"hf_hub_url": "org/toy", "ms_hub_url": "elsewhere/toy"},
    "split": {"hf_hub_url": "org/toy", "split": "test"},
    "subset": {"hf_hub_url": "org/two", "subset": "b"},
    "folder": {"hf_hub_url": "org/toy", "folder": "data"},
    "absent": {"hf_hub_url": "org/absent"},
}
# The endpoint is read when huggingface_hub is imported, so the loading happens in a process of its own, once for all names.
CHILD = """
import json, sys
from rlmca.data.errors import DataError
from rlmca.data.info import resolve
from rlmca.data.sources import read_rows
answers = {}
for name in sys.argv[2:]:
    try:
        answers[name] = read_rows(resolve([name], sys.argv[1])[0])
    except DataError as error:
        answers[name] = str(error)
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[str]]:
    """(name -> rows or error text, requests that the hub saw)"""
    folder = tmp_path_factory.mktemp("hub")
    (folder / "dataset_info.json").write_text(json.dumps(INFO))
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    environment |= {"HF_HOME": str(folder / "home"), "HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "127.0.0.1"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    with loopback_hub(REPOS) as (endpoint, seen):
        done = subprocess.run(
            [sys.executable, "-c", CHILD, str(folder), *INFO],
            env={**environment, "HF_ENDPOINT": endpoint},
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=600,
        )
    assert done.returncode == 0, (done.stderr, seen)
    return json.loads(done.stdout.strip().splitlines()[-1]), seen


@pytest.mark.parametrize(("name", "expected"), [("plain", TRAIN), ("split", OTHER), ("subset", OTHER), ("folder", TRAIN)])
def test_hub_data_set_through_loopback_endpoint(loaded: tuple[dict[str, Any], list[str]], name: str, expected: list[Any]) -> None:
    answers, seen = loaded
    assert answers[name] == expected, seen
    assert any(f"/datasets/{INFO[name]['hf_hub_url']}/resolve/" in request and ".jsonl" in request for request in seen)


def test_missing_hub_data_set_is_an_error_that_names_it(loaded: tuple[dict[str, Any], list[str]]) -> None:
    assert "'org/absent'" in loaded[0]["absent"] and "cannot be loaded" in loaded[0]["absent"]
