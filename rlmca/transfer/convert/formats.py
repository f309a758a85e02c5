"""Which kind of folder a path is."""

from __future__ import annotations

from pathlib import Path

from rlmca.transfer.convert.base import ConvertError, Format, Source
from rlmca.transfer.convert.headers import read_header
from rlmca.transfer.convert.hf import HFSource
from rlmca.transfer.convert.kept import KEPT, KeptSource
from rlmca.transfer.convert.rank_source import RankFilesSource
from rlmca.transfer.convert.torch_dist_source import TorchDistSource
from rlmca.transfer.hf_folder import INDEX, SINGLE

RUN_WEIGHTS = "weights"
"""Where a training run of this package has the weights in its checkpoint-N."""


def format_of(path: Path) -> Format:
    """Read off the files' names. ConvertError saying what was looked for when it is none of them."""
    if not path.is_dir():
        raise ConvertError(f"{path} {'is a file' if path.exists() else 'does not exist'}; name a folder")
    if _has(path, SINGLE, INDEX):
        return "hf"
    if _has(path, ".metadata", "iter_*/.metadata", "release/.metadata", f"{RUN_WEIGHTS}/.metadata"):
        return "torch_dist"
    if _has(path, "mp_rank_*", "iter_*/mp_rank_*", "release/mp_rank_*"):
        return "ranks"
    raise ConvertError(
        f"{path} is no model that can be converted: it has neither {SINGLE} nor {INDEX} (Hugging Face), nor .metadata (torch_dist), "
        f"nor mp_rank_* (a file per rank), itself or in iter_*, release or {RUN_WEIGHTS}"
    )


def open_source(path: Path, hf_config: Path | None = None) -> Source:
    """The model in a folder, whatever its format. `hf_config`: the folder of config.json where a Megatron checkpoint has none."""
    kind = format_of(path)
    if kind == "hf":
        if hf_config is not None:
            raise ConvertError(f"--hf_config is for Megatron checkpoints; {path} has a config.json of its own: leave it out")
        return HFSource(path)
    if kind == "torch_dist":
        of_run = _has(path, f"{RUN_WEIGHTS}/.metadata") and not _has(path, ".metadata")
        source: Source = TorchDistSource(path / RUN_WEIGHTS if of_run else path, hf_config)
    else:
        source = RankFilesSource(path, hf_config)
    kept = next((folder / KEPT for folder in (path, path.parent) if (folder / KEPT).is_file()), None)
    return source if kept is None else KeptSource(source, read_header(kept))


def _has(path: Path, *patterns: str) -> bool:
    return any(True for pattern in patterns for _ in path.glob(pattern))
