"""Where a model's files are: a local folder, a run's output, or a repository of the Hugging Face hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from rlmca.config.model import ModelConfig
from rlmca.transfer.peft import CONFIG

FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.py"]


class ModelNotFound(ValueError):
    """No usable model files where the configuration points, or more than a model."""


def resolve_model(name: str, options: ModelConfig) -> Path:
    """The folder of an HF model: `name` itself, the `hf/` folder of a finished run, or a download from the hub.

    Raises ModelNotFound, saying what is missing or what should not be there, before anything is loaded.
    """
    if (local := local_folder(name)) is not None:
        return local
    try:
        folder = snapshot_download(
            name, revision=options.model_revision, cache_dir=options.cache_dir, token=options.hf_hub_token, allow_patterns=FILES
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise _unfetched(name, error) from error
    return _alone(Path(folder))


def find_config(name: str, options: ModelConfig) -> Path | None:
    """config.json of that model; of a name on the hub this one file is fetched.

    None where the hub cannot be reached and its cache has no such file. Raises ModelNotFound as `resolve_model` does.
    """
    if (local := local_folder(name)) is not None:
        return local / "config.json"
    place = {"revision": options.model_revision, "cache_dir": options.cache_dir}
    try:
        if not isinstance(try_to_load_from_cache(name, "config.json", **place), str):
            # asked once: a download asks a hub that does not answer for half a minute
            get_hf_file_metadata(hf_hub_url(name, "config.json", revision=options.model_revision), token=options.hf_hub_token)
        file = hf_hub_download(name, "config.json", **place, token=options.hf_hub_token)
    except LocalEntryNotFoundError:
        return None
    except (RepositoryNotFoundError, RevisionNotFoundError, EntryNotFoundError, HFValidationError) as error:
        raise _unfetched(name, error) from error
    except Exception:  # whatever the client's transport raises; who needs the model asks again, and says why it is not there
        return None
    return Path(file)


def local_folder(name: str) -> Path | None:
    """The folder of a model on this machine; None for a name on the hub. ModelNotFound for a folder that holds no model."""
    local = Path(name).expanduser()
    for folder in (local, local / "hf"):
        if (folder / "config.json").is_file():
            return _alone(folder)
    if local.exists():
        raise ModelNotFound(f"model_name_or_path: {name} has no config.json (nor hf/config.json): it is no Hugging Face model folder")
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ModelNotFound(f"model_name_or_path: the folder {name} does not exist")
    return None


def adapter_beside(folder: Path) -> str | None:
    """What to do about an adapter in the folder of a model, which Transformers would load with it, unasked; None without one."""
    if not (folder / CONFIG).is_file():
        return None
    return f"{folder} holds an adapter beside the model ({CONFIG}): move it to a folder of its own, and name that in adapter_name_or_path"


def _alone(folder: Path) -> Path:
    if (text := adapter_beside(folder)) is not None:
        raise ModelNotFound(f"model_name_or_path: {text}")
    return folder


def _unfetched(name: str, error: Exception) -> ModelNotFound:
    return ModelNotFound(f"model_name_or_path: {name} is neither a local folder nor could it be fetched from the hub ({error})")


def read_hf_config(folder: Path) -> dict[str, Any]:
    """config.json of a model folder as plain data; no code of the repository runs."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return config
