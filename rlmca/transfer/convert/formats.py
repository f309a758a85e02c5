"""Which kind of folder a path is."""

from __future__ import annotations

from pathlib import Path

from rlmca.transfer.convert.base import ConvertError, Format, Source
from rlmca.transfer.convert.hf import HFSource
from rlmca.transfer.hf_folder import INDEX, SINGLE

TRACKER = "latest_checkpointed_iteration.txt"


def format_of(path: Path) -> Format:
    """Read off the files' names. ConvertError saying what was looked for when it is none of them."""
    if not path.is_dir():
        raise ConvertError(f"{path} {'is a file' if path.exists() else 'does not exist'}; name a folder")
    if any((path / name).is_file() for name in (SINGLE, INDEX)):
        return "hf"
    if (path / ".metadata").is_file() or any(path.glob("iter_*/.metadata")):
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
        return HFSource(path)
    raise ConvertError(f"{path} is a Megatron checkpoint ({kind}): not in this version")
