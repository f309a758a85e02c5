"""Megatron's distributed checkpoints (`torch_dist`) as a source, whoever wrote them and under whatever layout.

Keys of layers may be stacked or one a layer, those of experts too, gate and up may have a key each (`weight_w`, `weight_v`), and
a chunk may be any box of a key. The optimizer's keys are passed over.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from rlmca.layouts import Form, ModelLayout
from rlmca.layouts.boxes import Box, Shape, cut_box, extents, full, volume
from rlmca.layouts.distributed import EXPERTS, LAYERS, Whole, wholes
from rlmca.layouts.plan import EMBEDDING
from rlmca.transfer.convert import dcp_metadata
from rlmca.transfer.convert.archives import NAMES, Unreadable, load
from rlmca.transfer.convert.base import DTYPES, ConvertError, Format, Part, Slot, Stored, moved
from rlmca.transfer.convert.dcp_metadata import StoredChunk, StoredKey, read_metadata
from rlmca.transfer.convert.storage import Files
from rlmca.transfer.convert.torch_dist import FORMAT
from rlmca.transfer.hf_folder import HFFolderError, read_config

TRACKER = "latest_checkpointed_iteration.txt"
OPTIMIZER = re.compile(r"(chained_\d+\.)?(optimizer|opt_param_scheduler)\b")
LISTED = 60
"""Problems that a message lists; it counts the others."""
HALVES = {"_w": 0, "_v": 1}
"""Ends of the keys of gate and up where each has its own (`singleton_local_shards`)."""


def iteration_folder(path: Path) -> Path:
    """The folder with `.metadata`: the given one, or that of the iteration that Megatron's tracker names."""
    tracker = path / TRACKER
    if (path / dcp_metadata.FILE).is_file() or not tracker.is_file():
        return path
    word = tracker.read_bytes()[:40].decode("utf-8", "replace").strip()
    if not (word.isascii() and word.isdecimal()) and word != "release":
        raise ConvertError(f"{tracker} says {word!r}; it must be the number of an iteration, or release")
    return path / (f"iter_{int(word):07d}" if word.isdecimal() else word)


class _Found(NamedTuple):
    """Where a parameter lies: at `lead` of the axes in front of a key, from row `row` of the parameter on."""

    key: str
    lead: Shape
    dims: Shape
    row: int
    rows: int


class TorchDistSource:
    """A checkpoint's model. `hf_config` is the folder whose config.json says what the model is, None the checkpoint's own;
    `form` how its experts are to be named.

    Raises ConvertError, with everything that is wrong, for a checkpoint that is not whole or does not fit its config.
    """

    format: Format = "torch_dist"

    def __init__(self, path: str | Path, hf_config: str | Path | None = None, form: Form = "single") -> None:
        self._folder = iteration_folder(Path(path))
        self._path = _config_folder(Path(path), self._folder, hf_config)
        self._layout = ModelLayout(_config(self._path), form=form)
        self._keys = _read_keys(self._folder)
        self._problems: list[str] = []
        self._slots: dict[tuple[str, Shape], Slot | None] = {}
        self._by_lead: dict[str, dict[Shape, list[StoredChunk]]] = {}
        self._table = _table(self._keys)
        self._files = Files()
        try:
            self._parts = self._find_all()
        finally:
            self._files.close()
        self._tensors = self._settle()

    @property
    def path(self) -> Path:
        """See `Source`."""
        return self._path

    @property
    def layout(self) -> ModelLayout:
        """See `Source`."""
        return self._layout

    @property
    def tensors(self) -> Mapping[str, Stored]:
        """See `Source`."""
        return self._tensors

    def parts(self, name: str) -> Sequence[Part]:
        """See `Source`."""
        return self._parts[name]

    def read(self, name: str, box: Box) -> Tensor:
        """See `Source`; every tensor here has parts."""
        raise ConvertError(f"{name} is stored, not computed; its parts say where")

    def close(self) -> None:
        """See `Source`. Nothing is open once the parts are found."""

    def _find_all(self) -> dict[str, list[Part]]:
        parts: dict[str, list[Part]] = {name: [] for name in self._layout.hf_tensors()}
        missing, used = [], _Used()
        for whole in wholes(self._layout):
            used.add(whole)
            found = self._find(whole)
            if not found:
                missing.append(_title(whole))
            fits = [self._fits(whole, place) for place in found]
            pieces = [piece for place in found for piece in self._pieces(whole, place)] if all(fits) else []
            if found and all(fits) and not _covers([box for box, _ in pieces], whole.shape):
                self._problems.append(f"the chunks of {found[0].key} do not make up {_title(whole)}")
            for box, slot in pieces:
                for hf, src, dst in whole.tiles:
                    if slot is not None and (common := cut_box(dst, box)) is not None:
                        parts[hf].append(Part(slot, moved(common, box, full(extents(box))), moved(common, dst, src)))
        self._problems = [f"missing: {title}" for title in missing] + self._problems
        self._problems += [f"no part of the model: {key}" for name, key in self._table.items() if not used.knows(*name)]
        return parts

    def _find(self, whole: Whole) -> list[_Found]:
        """The key, or the two keys, that hold a parameter; none when it is missing."""
        layers = [(None, ((whole.layer, self._layout.num_layers),)), (whole.layer, ())] if whole.layer is not None else [(None, ())]
        experts = (
            [(None, ((whole.expert, self._layout.megatron.num_experts),)), (whole.expert, ())] if whole.expert is not None else [(None, ())]
        )
        rows = whole.shape[0]
        for name, (layer, one), (expert, two) in itertools.product(whole.names, layers, experts):
            lead, dims = tuple(at for at, _ in one + two), tuple(n for _, n in one + two)
            if (key := self._table.get((name, layer, expert, None))) is not None:
                return [_Found(key, lead, dims, 0, rows)]
            halves = [self._table.get((name, layer, expert, half)) for half in (0, 1)]
            if whole.halves and None not in halves:
                return [_Found(str(key), lead, dims, row, rows // 2) for key, row in zip(halves, (0, rows // 2), strict=True)]
        return []

    def _fits(self, whole: Whole, place: _Found) -> bool:
        """Whether the key has the right shape; a vocabulary may be padded."""
        have, want = self._keys[place.key].shape, (*place.dims, place.rows, *whole.shape[1:])
        if have == want or (whole.padded and len(have) == len(want) and have[0] >= want[0] and have[1:] == want[1:]):
            return True
        problem = f"{place.key} has shape {list(have)}, config.json says {list(want)}"
        if problem not in self._problems:
            self._problems.append(problem)
        return False

    def _pieces(self, whole: Whole, place: _Found) -> Iterator[tuple[Box, Slot | None]]:
        """Boxes of the parameter, and the stored tensors that they are, without axes of layers and experts."""
        axes = len(place.lead)
        if place.key not in self._by_lead:
            self._by_lead[place.key] = _by_lead(self._keys[place.key].chunks, axes)
        for chunk in self._by_lead[place.key].get(place.lead, ()):
            offset, shape = list(chunk.offset[axes:]), chunk.size[axes:]
            offset[0] += place.row
            box = tuple((a, a + n) for a, n in zip(offset, shape, strict=True))
            slot = self._slot(place.key, chunk)
            if slot is not None:
                before = 0
                for at, first, n in zip(place.lead, chunk.offset, chunk.size, strict=False):
                    before = before * n + at - first
                size = math.prod(shape) * DTYPES[slot.dtype].itemsize
                slot = slot._replace(offset=slot.offset + before * size, shape=shape)
            yield box, slot

    def _slot(self, key: str, chunk: StoredChunk) -> Slot | None:
        """Where the chunk's tensor lies in its file; None, with a problem noted, when it cannot be read."""
        if (key, chunk.offset) not in self._slots:
            self._slots[key, chunk.offset] = self._open(key, chunk)
        return self._slots[key, chunk.offset]

    def _open(self, key: str, chunk: StoredChunk) -> Slot | None:
        path, where = self._folder / chunk.place.file, f"{key} at {list(chunk.offset)} in {chunk.place.file}"
        try:
            found = load(path, self._files.reader(path), chunk.place.start, chunk.place.length)
        except (ConvertError, OSError) as error:
            self._problems.append(f"{where}: {error}")
            return None
        if isinstance(found, Unreadable):
            self._problems.append(f"{where}: {found.why}")
        elif not isinstance(found, Slot) or found.shape != chunk.size or found.dtype != NAMES.get(self._keys[key].dtype):
            self._problems.append(f"{where} is no tensor of type {self._keys[key].dtype} and shape {list(chunk.size)}, as .metadata says")
        else:
            return found
        return None

    def _settle(self) -> dict[str, Stored]:
        """The tensors with their types, if nothing is wrong."""
        shapes, kinds = self._layout.hf_tensors(), {name: {part.slot.dtype for part in parts} for name, parts in self._parts.items()}
        self._problems += [f"{name} would be made of {' and '.join(sorted(kind))}" for name, kind in kinds.items() if len(kind) > 1]
        if self._problems:
            more = f"\nand {len(self._problems) - LISTED} more" if len(self._problems) > LISTED else ""
            listed = "\n".join(self._problems[:LISTED]) + more
            raise ConvertError(f"{self._folder} does not hold the model that {self._path / 'config.json'} describes:\n{listed}")
        return {name: Stored(shape, next(iter(kinds[name]))) for name, shape in shapes.items()}


class _Used:
    """Which keys some parameter answers to."""

    def __init__(self) -> None:
        self._layers: dict[str, set[int | None]] = {}
        self._experts: dict[str, set[int | None]] = {}

    def add(self, whole: Whole) -> None:
        for name in whole.names:
            self._layers.setdefault(name, {None}).add(whole.layer)
            self._experts.setdefault(name, {None}).add(whole.expert)

    def knows(self, name: str, layer: int | None, expert: int | None, half: int | None) -> bool:
        return layer in self._layers.get(name, ()) and expert in self._experts.get(name, ())


_Name = tuple[str, int | None, int | None, int | None]


def _table(keys: Mapping[str, StoredKey]) -> dict[_Name, str]:
    """Keys by what they mean: (stacked key, layer, expert, half), None where the key says nothing of it.

    What stands in front of the embedding's key stands in front of all keys of the model.
    """
    fronts = [key[: -len(EMBEDDING)] for key in keys if key.endswith(EMBEDDING)]
    front = min(fronts, key=len, default="")
    return {_meaning(key.removeprefix(front)): key for key in keys}


def _meaning(name: str) -> _Name:
    numbers = []
    for before in (LAYERS, EXPERTS):
        match = re.search(rf"(?<={re.escape(before)})(\d+)\.", name)
        numbers.append(int(match[1]) if match else None)
        name = name[: match.start()] + name[match.end() :] if match else name
    half = HALVES.get(name[-2:])
    return name if half is None else name[:-2], numbers[0], numbers[1], half


def _read_keys(folder: Path) -> dict[str, StoredKey]:
    """The checkpoint's tensors, without the optimizer's."""
    if not (folder / dcp_metadata.FILE).is_file():
        raise ConvertError(f"{folder} has no {dcp_metadata.FILE}; a distributed checkpoint (torch_dist) has one")
    if (folder / FORMAT).is_file():
        try:
            form: Any = json.loads((folder / FORMAT).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConvertError(f"{folder / FORMAT} is not JSON: {error}") from error
        if not isinstance(form, dict) or form.get("sharded_backend", "torch_dist") != "torch_dist":
            raise ConvertError(f"{folder / FORMAT} says {form}; only checkpoints of the format torch_dist are read")
    return {key: stored for key, stored in read_metadata(folder).items() if not OPTIMIZER.match(key)}


def _config_folder(path: Path, folder: Path, given: str | Path | None) -> Path:
    found = [Path(given)] if given is not None else [place for place in (path, folder, folder.parent) if (place / "config.json").is_file()]
    if not found:
        raise ConvertError(
            f"{path} has no config.json that says what the model is: write --hf_config FOLDER, of a folder that has the model's"
        )
    return found[0]


def _config(folder: Path) -> dict[str, Any]:
    try:
        return read_config(folder)
    except HFFolderError as error:
        raise ConvertError(f"{error}; write --hf_config FOLDER, of a folder that has the model's config.json") from error


def _by_lead(found: Sequence[StoredChunk], axes: int) -> dict[Shape, list[StoredChunk]]:
    """The chunks by where they are on the axes in front."""
    by: dict[Shape, list[StoredChunk]] = {}
    for chunk in found:
        for lead in itertools.product(*(range(o, o + n) for o, n in zip(chunk.offset[:axes], chunk.size[:axes], strict=True))):
            by.setdefault(lead, []).append(chunk)
    return by


def _covers(boxes: Sequence[Box], shape: Shape) -> bool:
    """Whether the boxes hold every element of the shape once; they may stick out."""
    inside = [box for box in (cut_box(box, full(shape)) for box in boxes) if box is not None]
    apart = all(cut_box(one, two) is None for one, two in itertools.combinations(inside, 2))
    return apart and sum(map(volume, inside)) == math.prod(shape)


def _title(whole: Whole) -> str:
    place = [f"{word} {number}" for word, number in (("layer", whole.layer), ("expert", whole.expert)) if number is not None]
    return whole.names[0] + (f" ({', '.join(place)})" if place else "")
