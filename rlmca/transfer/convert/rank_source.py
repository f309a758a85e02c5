"""A source that reads one file for each rank: Megatron-LM's checkpoints and mcore_adapter's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from torch import Tensor

from rlmca.layouts import Coord, ModelLayout, ParamPlan, Piece
from rlmca.layouts.boxes import Box, Shape, full
from rlmca.transfer.convert.base import ConvertError, Part, Stored, moved
from rlmca.transfer.convert.rank_files import rank_folders, without_experts
from rlmca.transfer.convert.rank_folder import (
    Tensors,
    expert_names,
    folder_of,
    hf_config_of,
    is_iteration,
    iteration_of,
    mca_config,
    read_ranks,
    spec_of,
    topology_of,
)
from rlmca.transfer.convert.rank_views import Held


class _Copy(NamedTuple):
    """A parameter in a file, and what the plan says about it."""

    name: str
    plan: ParamPlan
    held: Held


class RankFilesSource:
    """The model in a folder with one file for each rank.

    `path` is the checkpoint's folder (the tracker in it says which iteration is read) or that of an iteration. `hf_config` is
    the model's config.json, as a mapping, a file or a folder; without it the one beside the files counts, or mcore_adapter's copy.
    `check_copies`: read what several ranks hold copies of, and refuse copies that are not the same bit for bit.

    Raises ConvertError for missing files, tensors that lack or are too many, wrong shapes, types that do not agree and copies
    that differ; UnsupportedField and LayoutError as `ModelLayout` does.
    """

    format: Literal["ranks"] = "ranks"

    def __init__(self, path: str | Path, hf_config: Mapping[str, Any] | str | Path | None = None, *, check_copies: bool = True) -> None:
        self._folder = iteration_of(Path(path))
        named_alone = self._folder == Path(path) and is_iteration(self._folder) and not (self._folder / "config.json").is_file()
        checkpoint = self._folder.parent if named_alone else Path(path)
        mca = mca_config(checkpoint)
        plain = ModelLayout(hf_config_of(checkpoint, hf_config, mca))
        self._path = checkpoint if hf_config is None or isinstance(hf_config, Mapping) else folder_of(Path(hf_config))
        sizes, vpp, files = read_ranks(self._folder, mca)
        spec = spec_of(plain, files.values())
        self._layout = plain if spec == "local" else ModelLayout(plain.hf_config, spec)
        named = {place: {expert_names(name, spec): held for name, held in tensors.items()} for place, tensors in files.items()}
        self.topology = without_experts(self._layout, topology_of(self._layout, sizes, vpp, named, mca))
        self._ranks: dict[Coord, Tensors] = {}
        self._copies: list[_Copy] = []
        self._match(named)
        self._parts = self._find_parts()
        self._tensors = {name: self._stored(name, shape) for name, shape in self._layout.hf_tensors().items()}
        if check_copies:
            self._check_copies()

    @property
    def path(self) -> Path:
        """The checkpoint's folder, or that of the config.json that was named."""
        return self._path

    @property
    def layout(self) -> ModelLayout:
        """The model, with the parameter names of the files, its experts one by one."""
        return self._layout

    @property
    def tensors(self) -> Mapping[str, Stored]:
        """Every Hugging Face tensor, in the order of the model."""
        return self._tensors

    def parts(self, name: str) -> Sequence[Part]:
        """Where the tensor's elements are, each once."""
        return self._parts[name]

    def read(self, name: str, box: Box) -> Tensor:
        """No tensor of such a folder has to be computed."""
        raise ConvertError(f"{name} is stored as it is; its parts say where")

    def close(self) -> None:
        """Nothing is held open."""

    def _match(self, files: Mapping[tuple[int, int, int], Tensors]) -> None:
        """Hold the files against the plans of all ranks."""
        places = {
            (coord.tp, coord.pp, self.topology.expert_place(coord)[1] if self.topology.ep > 1 else 0): (name, coord)
            for name, coord in rank_folders(self.topology).items()
        }
        problems = [f"{name} is missing" for place, (name, _) in places.items() if place not in files]
        problems += [
            f"the file of tensor-parallel rank {tp}, stage {pp}, expert-parallel rank {ep} is one too many for {self.topology}"
            for tp, pp, ep in files
            if (tp, pp, ep) not in places
        ]
        for place, (folder, coord) in places.items():
            tensors, plans = files.get(place), self._layout.rank_plan(self.topology, coord)
            if tensors is None:
                continue
            problems += [f"{folder} lacks {name}" for name in plans if name not in tensors]
            problems += [f"{folder} has {name}, which the model has not" for name in tensors if name not in plans]
            both = {name: (plan, tensors[name]) for name, plan in plans.items() if name in tensors}
            problems += [
                f"{folder}: {name} has shape {held.shape}, config.json says {plan.shape}"
                for name, (plan, held) in both.items()
                if held.shape != plan.shape
            ]
            self._ranks[coord] = tensors
            self._copies += [_Copy(f"{name} in {held.slot.path}", plan, held) for name, (plan, held) in both.items()]
        if problems:
            more = [f"and {len(problems) - 12} more"] if len(problems) > 12 else []
            raise ConvertError("\n".join([f"{self._folder} does not hold the model of its config.json:", *problems[:12], *more]))

    def _find_parts(self) -> dict[str, tuple[Part, ...]]:
        return {name: tuple(map(self._part, plan.pieces)) for name, plan in self._layout.hf_plan(self.topology).items()}

    def _part(self, piece: Piece) -> Part:
        held = self._ranks[piece.coord][piece.param]
        return Part(held.slot, moved(piece.param_box, full(held.shape), held.box), piece.hf_box)

    def _stored(self, name: str, shape: Shape) -> Stored:
        kinds = {part.slot.dtype: part.slot.path for part in self._parts[name]}
        if len(kinds) > 1:
            held = ", ".join(f"{kind} in {path}" for kind, path in sorted(kinds.items()))
            raise ConvertError(f"parts of {name} are of different types: {held}; the checkpoint is damaged")
        return Stored(shape, next(iter(kinds)))

    def _check_copies(self) -> None:
        """What the plan fills from the same elements has the same bits on all ranks that hold it."""
        first: dict[Any, _Copy] = {}
        for copy in self._copies:
            if not copy.plan.copies:
                continue
            other = first.setdefault((copy.plan.shape, copy.plan.copies), copy)
            if other is not copy and not _same(other, copy):
                raise ConvertError(
                    f"{other.name} and {copy.name} must be copies of each other and differ: the ranks trained apart, "
                    "or one of the files is of another step"
                )


def _same(one: _Copy, two: _Copy) -> bool:
    """Whether the elements that the plan speaks of are the same; padding of the vocabulary is free."""
    if one.held.slot.dtype != two.held.slot.dtype:
        return False
    rows = max(copy.dst[0][1] for copy in one.plan.copies)
    return all(a == b for a, b in zip(one.held.blocks(rows), two.held.blocks(rows), strict=True))
