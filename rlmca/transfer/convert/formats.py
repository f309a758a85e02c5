"""Which kind of folder a path is."""

from __future__ import annotations

from pathlib import Path

from rlmca.transfer.convert.base import ConvertError, Format, Source
from rlmca.transfer.convert.hf import HFSource
from rlmca.transfer.convert.torch_dist_source import TorchDistSource
from rlmca.transfer.hf_folder import INDEX, SINGLE


def format_of(path: Path) -> Format:
    """Read off the files' names. ConvertError saying what was looked for when it is none of them."""
    if not path.is_dir():
        raise ConvertError(f"{path} {'is a file' if path.exists() else 'does not exist'}; name a folder")
    if any((path / name).is_file() for name in (SINGLE, INDEX)):
        return "hf"
    if (path / ".metadata").is_file() or any(True for pattern in ("iter_*", "release") for _ in path.glob(f"{pattern}/.metadata")):
        return "torch_dist"
    if any(True for pattern in ("mp_rank_*", "iter_*/mp_rank_*", "release/mp_rank_*") for _ in path.glob(pattern)):
        return "ranks"
    raise ConvertError(
        f"{path} is no model that can be converted: it has neither {SINGLE} nor {INDEX} (Hugging Face), nor .metadata (torch_dist), "
        "nor mp_rank_* (a file per rank), itself or in iter_*"
    )


def open_source(path: Path, hf_config: Path | None = None) -> Source:
    """The model in a folder, whatever its format."""
    kind = format_of(path)
    if kind == "hf":
        if hf_config is not None:
            raise ConvertError(f"--hf_config is for Megatron checkpoints; {path} has a config.json of its own: leave it out")
        return HFSource(path)
    if kind == "torch_dist":
        return TorchDistSource(path, hf_config)
    raise ConvertError(f"{path} is a Megatron checkpoint ({kind}): not in this version")
