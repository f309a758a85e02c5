"""What a folder of rank files holds: which checkpoint in it is meant, its files, their tensors, and how the model is split.

Nothing has to be told but the model's config.json: sizes follow from the names of the files (`rank_files.rank_folder`), the
chunks of a pipeline from the keys and layers in them, the split of experts from a shape. `mca_config.json`, which mcore_adapter
writes, is held against that.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rlmca.layouts import ModelLayout, Topology
from rlmca.layouts.rows import Spec
from rlmca.transfer.convert.base import ConvertError
from rlmca.transfer.convert.rank_files import FILE, RELEASE, TRACKER, iteration_folder
from rlmca.transfer.convert.rank_views import Held, held_tensors
from rlmca.transfer.hf_folder import read_config

MCA_CONFIG = "mca_config.json"
_FOLDER = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")
_MODEL = re.compile(r"model(\d*)")
_LAYER = re.compile(r"(?:\d+:)?decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12]\.(?:weight|bias))$")
_GROUPED = re.compile(r"\.mlp\.experts\.(linear_fc[12]\.(?:weight|bias))(\d+)$")
EMBEDDING = "embedding.word_embeddings.weight"

Place = tuple[int, int, int]
"""Tensor-parallel rank, pipeline stage and expert-parallel rank in the name of a file."""
Tensors = dict[str, Held]
"""A file's parameters by their names in a rank's plan: with several chunks a stage, `{chunk}:` stands in front."""


class Sizes(NamedTuple):
    """How many ranks there are of each kind."""

    tp: int
    pp: int
    ep: int


def iteration_of(path: Path) -> Path:
    """The folder with the ranks' folders: `path` itself, or the one in it that its tracker names. Raises ConvertError."""
    if not path.is_dir():
        raise ConvertError(f"{path} is not a folder")
    if _rank_folders(path):
        return path
    held = sorted(child for child in path.iterdir() if is_iteration(child))
    tracker = path / TRACKER
    if tracker.is_file():
        text = tracker.read_bytes()[:40].decode("utf-8", "replace").strip()
        if text != RELEASE and not (text.isascii() and text.isdecimal()):
            raise ConvertError(f"{tracker} says {text!r}; it must be the number of an iteration, or {RELEASE}")
        chosen = path / iteration_folder(None if text == RELEASE else int(text))
        if not chosen.is_dir():
            there = ", ".join(child.name for child in held) or "no other"
            raise ConvertError(f"{tracker} names {chosen.name}, which is not there; there is {there}: name a folder of these as the input")
    elif len(held) == 1:
        chosen = held[0]
    else:
        there = f"{len(held)} of them ({', '.join(child.name for child in held)})" if held else "no iter_* or release folder"
        raise ConvertError(f"{path} has no {TRACKER} and {there}; name the folder that holds mp_rank_* as the input")
    if not _rank_folders(chosen):
        raise ConvertError(f"{chosen} has no mp_rank_* folders: it is no checkpoint with one file for each rank")
    return chosen


def is_iteration(path: Path) -> bool:
    """Whether a folder has the name of an iteration's, or of a release."""
    return path.name == RELEASE or path.name.startswith("iter_")


def folder_of(config: Path) -> Path:
    """The folder of a config.json that is named by itself or by its folder."""
    return config.parent if config.name == "config.json" else config


def _rank_folders(path: Path) -> dict[tuple[int, ...], Path]:
    found = {child: _FOLDER.fullmatch(child.name) for child in path.iterdir() if child.is_dir()}
    return {tuple(int(part) for part in match.groups() if part): child for child, match in sorted(found.items()) if match}


def mca_config(path: Path) -> dict[str, Any] | None:
    """mcore_adapter's configuration, None where there is none."""
    file = path / MCA_CONFIG
    if not file.is_file():
        return None
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConvertError(f"{file} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConvertError(f"{file} does not hold a JSON object")
    return config


def hf_config_of(path: Path, given: Mapping[str, Any] | str | Path | None, mca: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """The model's config.json: what was given (a mapping, the file or its folder), the one in `path`, or mcore_adapter's copy."""
    if isinstance(given, Mapping):
        return given
    if given is not None:
        return read_config(folder_of(Path(given)))
    if (path / "config.json").is_file():
        return read_config(path)
    if mca is not None and isinstance(mca.get("hf_config_json"), str):
        try:
            config = json.loads(mca["hf_config_json"])
        except ValueError as error:
            raise ConvertError(f"hf_config_json in {path / MCA_CONFIG} is not JSON: {error}") from error
        if isinstance(config, dict):
            return config
    raise ConvertError(f"{path} has no config.json; write --hf_config with that of the Hugging Face model")


def read_ranks(folder: Path, mca: Mapping[str, Any] | None) -> tuple[Sizes, int, dict[Place, Tensors]]:
    """(sizes, chunks a stage, the tensors of each file). Raises ConvertError for files that are missing or cannot be read."""
    folders = _rank_folders(folder)
    if len(lengths := {len(key) for key in folders}) > 1:
        raise ConvertError(f"the folders of ranks in {folder} have names of different kinds: {_some(p.name for p in folders.values())}")
    if missing := [child.name for child in folders.values() if not (child / FILE).is_file()]:
        raise ConvertError(f"no {FILE} in {_some(missing)} of {folder}; is the checkpoint whole?")
    files = {key: _read_file(child / FILE) for key, child in folders.items()}
    files, vpp = _chunks(folder, files)
    (length,) = lengths
    second = _second_number(files, mca) if length == 2 else "both"
    places = {
        (key[0], key[1] if length > 1 and second != "ep" else 0, key[-1] if length > 1 and second != "pp" else 0): key for key in files
    }
    sizes = Sizes(*(max(place[axis] for place in places) + 1 for axis in range(3)))
    if mca is not None:
        sizes, vpp = _as_declared(folder, mca, sizes, vpp)
    return sizes, vpp, {place: files[key] for place, key in places.items()}


def _read_file(path: Path) -> Tensors:
    """The parameters in a file, behind the number of their chunk: nothing where there is one chunk without a number."""
    tensors: Tensors = {}
    for (key, *names), held in held_tensors(path, _is_weight).items():
        name = ".".join(map(str, names))
        while name.startswith("module."):  # what wraps a model writes it
            name = name.removeprefix("module.")
        tensors[f"{str(key).removeprefix('model')}:{name}"] = held
    return tensors


def _is_weight(keys: tuple[Any, ...]) -> bool:
    return bool(_MODEL.fullmatch(str(keys[0]))) and not str(keys[-1]).endswith("_extra_state")


def _chunks(folder: Path, files: Mapping[tuple[int, ...], Tensors]) -> tuple[dict[tuple[int, ...], Tensors], int]:
    """The files with the names of a rank's plan, and the chunks of a stage. A chunk without weights need not be in its file."""
    numbers = {name.partition(":")[0] for tensors in files.values() for name in tensors}
    if not numbers or ("" in numbers and len(numbers) > 1):
        keys = " and ".join(f"model{number}" for number in sorted(numbers)) or "no model"
        raise ConvertError(f"the files in {folder} hold {keys}; those of Megatron-LM hold model, or model0, model1 and so on")
    vpp = 1 if "" in numbers else 1 + max(map(int, numbers))
    plain = {key: {name.partition(":")[2] if vpp == 1 else name: held for name, held in tensors.items()} for key, tensors in files.items()}
    return plain, vpp


def _second_number(files: Mapping[tuple[int, ...], Tensors], mca: Mapping[str, Any] | None) -> str:
    """Whether the second number of names with two is a pipeline stage or an expert-parallel rank: all of the latter embed."""
    if mca is not None and int(mca.get("pipeline_model_parallel_size") or 1) > 1:
        return "pp"
    embeds = [any(name.endswith(EMBEDDING) for name in tensors) for key, tensors in files.items() if key[1] > 0]
    return "ep" if embeds and all(embeds) else "pp"


def _as_declared(folder: Path, mca: Mapping[str, Any], sizes: Sizes, vpp: int) -> tuple[Sizes, int]:
    names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")
    said = Sizes(*(int(mca.get(name) or 1) for name in names))
    chunks = int(mca.get("virtual_pipeline_model_parallel_size") or 1)
    for name, is_said, is_there in zip((*names, "virtual_pipeline_model_parallel_size"), (*said, chunks), (*sizes, vpp), strict=True):
        if is_there > is_said or (is_there < is_said and name == "virtual_pipeline_model_parallel_size"):
            raise ConvertError(f"{MCA_CONFIG} says {name} {is_said}, the files in {folder} are those of {is_there}")
    return said, chunks


def spec_of(layout: ModelLayout, files: Iterable[Tensors]) -> Spec:
    """Whose parameter names these are: Transformer Engine's modules hold a norm together with what follows it."""
    names = {_plain(name) for tensors in files for name in tensors}
    theirs = {_plain(row.name("te", 0)) for row in layout.rows}
    ours = {_plain(row.name("local", 0)) for row in layout.rows}
    return "te" if len(names & (theirs - ours)) > len(names & (ours - theirs)) else "local"


def _plain(name: str) -> str:
    """The name of a parameter whatever its chunk, layer and expert are, and however experts are kept."""
    return re.sub(r"\.layers\.\d+\.", ".layers.0.", expert_names(re.sub(r"^\d+:", "", name), "local", expert="0"))


def expert_names(name: str, spec: Spec, expert: str | None = None) -> str:
    """The name of an expert's parameter as a layout of `spec` has it: one by one, or numbered weights of one grouped module.

    Both are found beside either kind of names. `expert`: the number to put instead of its own.
    """
    if match := _EXPERT.search(name):
        number, rest = match.groups()
    elif match := _GROUPED.search(name):
        rest, number = match.groups()
    else:
        return name
    number = number if expert is None else expert
    tail = f".mlp.experts.{rest}{number}" if spec == "te" else f".mlp.experts.local_experts.{number}.{rest}"
    return name[: match.start()] + tail


def topology_of(layout: ModelLayout, sizes: Sizes, vpp: int, files: Mapping[Place, Tensors], mca: Mapping[str, Any] | None) -> Topology:
    """How the model is split, as far as the files tell: missing ones and wrong shapes are found when all are held against it."""
    stages: dict[int, list[Tensors]] = {}
    for (_, stage, _), tensors in sorted(files.items()):
        stages.setdefault(stage, []).append(tensors)
    chunks = [_layers(stages.get(k % sizes.pp, []), f"{k // sizes.pp}:" if vpp > 1 else "") for k in range(sizes.pp * vpp)]
    if len(stages) == sizes.pp and sum(chunks) != layout.num_layers:
        raise ConvertError(f"the chunks of the pipeline hold {chunks} layers: {sum(chunks)}, and config.json says {layout.num_layers}")
    rows = next((held.shape[0] for name, held in stages.get(0, [{}])[0].items() if name.endswith(EMBEDDING)), 0)
    whole = rows * sizes.tp >= layout.megatron.sizes()["vocab"]
    etp = _expert_split(layout, files.values()) if mca is None else int(mca.get("expert_tensor_parallel_size") or sizes.tp)
    return Topology(
        sizes.tp,
        sizes.pp,
        vocab_multiple=rows if whole else 1,
        chunks=tuple(chunks) if sum(chunks) == layout.num_layers else None,
        ep=sizes.ep,
        etp=etp if layout.megatron.num_experts else None,
    )


def _layers(files: Iterable[Tensors], chunk: str) -> int:
    """Layers of a chunk, the most that a rank of its stage has: one that has fewer is found later."""
    names = (name for tensors in files for name in tensors if name.startswith(chunk))
    return max((int(match[1]) + 1 for name in names if (match := _LAYER.match(name))), default=0)


def _expert_split(layout: ModelLayout, files: Iterable[Tensors]) -> int | None:
    """Over how many ranks an expert is split: its way down has so many times fewer columns."""
    whole = layout.megatron.sizes().get("moe_ffn", 0)
    for tensors in files:
        for name, held in tensors.items():
            down = expert_names(name, "local", "0").endswith("experts.local_experts.0.linear_fc2.weight")
            if down and len(held.shape) == 2 and held.shape[1]:
                return max(whole // held.shape[1], 1)
    return None


def _some(names: Iterable[str], most: int = 8) -> str:
    listed = list(names)
    return ", ".join(listed[:most]) + (f" and {len(listed) - most} more" if len(listed) > most else "")
