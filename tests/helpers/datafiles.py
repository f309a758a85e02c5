"""Options of the data section and data set folders for tests."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Options:
    """The fields of the data section that the data room reads, with the configuration's defaults."""

    dataset: list[str] = field(default_factory=list)
    eval_dataset: list[str] = field(default_factory=list)
    dataset_dir: str = "data"
    cutoff_len: int = 2048
    train_on_prompt: bool = False
    mask_history: bool = False
    max_samples: int | None = None
    val_size: float = 0.0
    eval_on_each_dataset: bool = False
    mix_strategy: str = "concat"
    interleave_probs: list[float] = field(default_factory=list)
    preprocessing_batch_size: int = 1000


def write_set(folder: Path, content: bytes | list[Any], *, name: str = "toy", file: str = "toy.jsonl", **entry: Any) -> Options:
    """Writes a data file (a list becomes JSON lines) and its entry, keeping entries already there; options that name the set."""
    if isinstance(content, list):
        content = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in content).encode()
    (folder / file).write_bytes(content)
    path = folder / "dataset_info.json"
    info = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**info, name: {"file_name": file, **entry}}))
    return Options(dataset=[name], dataset_dir=str(folder))
