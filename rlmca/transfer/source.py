"""Where a model's files are: a local folder, a run's output, or a repository of the Hugging Face hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from rlmca.config.model import ModelConfig

FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.py"]


class ModelNotFound(ValueError):
    """No usable model files where the configuration points."""


def resolve_model(name: str, options: ModelConfig) -> Path:
    """The folder of an HF model: `name` itself, the `hf/` folder of a finished run, or a download from the hub.

    Raises ModelNotFound, saying what is missing, before anything is loaded.
    """
    local = Path(name).expanduser()
    for folder in (local, local / "hf"):
        if (folder / "config.json").is_file():
            return folder
    if local.exists():
        raise ModelNotFound(f"model_name_or_path: {name} has no config.json (nor hf/config.json): it is no Hugging Face model folder")
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ModelNotFound(f"model_name_or_path: the folder {name} does not exist")
    try:
        return Path(
            snapshot_download(
                name, revision=options.model_revision, cache_dir=options.cache_dir, token=options.hf_hub_token, allow_patterns=FILES
            )
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ModelNotFound(
            f"model_name_or_path: {name} is neither a local folder nor could it be fetched from the hub ({error})"
        ) from error


def read_hf_config(folder: Path) -> dict[str, Any]:
    """config.json of a model folder as plain data; no code of the repository runs."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return config
