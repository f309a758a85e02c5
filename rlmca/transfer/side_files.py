"""What a Hugging Face folder holds besides weights: config, generation defaults, tokenizer, chat template, code."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "merges.txt", "vocab.txt",
             "special_tokens_map.json", "added_tokens.json", "*.tiktoken", "spiece.model")  # fmt: skip
OTHERS = ("config.json", "generation_config.json", "chat_template.jinja", "chat_template.json", "additional_chat_templates", "**/*.py",
          "*processor_config.json", "LICENSE*", "NOTICE*")  # fmt: skip


class Tokenizer(Protocol):
    """What export asks of a tokenizer."""

    def save_pretrained(self, save_directory: str) -> object:
        """Write the tokenizer's files into a folder."""


def copy_side_files(source: Path, out: Path) -> list[str]:
    """Copy the files byte for byte where the source has them; returns the names copied."""
    copied = []
    for pattern in (*OTHERS, *TOKENIZER):
        for path in sorted(source.glob(pattern)):
            name = path.relative_to(source)
            if any(part.startswith(".") for part in name.parts):
                continue
            if path.is_dir():
                shutil.copytree(path, out / name, dirs_exist_ok=True)
            else:
                (out / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, out / name)
            copied.append(str(name))
    return copied


def has_tokenizer(folder: Path) -> bool:
    """Whether the folder holds a tokenizer's files."""
    return any(True for pattern in TOKENIZER for _ in folder.glob(pattern))


def settle_config(out: Path, hf_config: Mapping[str, Any], dtype: torch.dtype | None, drop: Sequence[str] = ()) -> None:
    """Make config.json of the new folder fit the weights: written if the source had none, its dtype changed if it names another.

    Transformers loads weights in the type that config.json names, so a stale entry would round them silently. Fields in `drop`
    are left out. With `dtype` None, for weights of several types, the entry stays. A config that already fits keeps its bytes.
    """
    path, name = out / "config.json", str(dtype).removeprefix("torch.")
    config = json.loads(path.read_text(encoding="utf-8")) if path.exists() else dict(hf_config)
    stale = [key for key in ("dtype", "torch_dtype") if dtype is not None and config.get(key) not in (None, name)]
    if stale or not path.exists() or config.keys() & set(drop):
        config = {key: value for key, value in (config | dict.fromkeys(stale, name)).items() if key not in drop}
        path.write_text(json.dumps(config, indent=2) + "\n")
