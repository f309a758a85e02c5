"""One file for each rank, `mp_rank_TT[_PPP[_EEE]]/model_optim_rng.pt`: their names, and a target that writes them.

The form is Megatron-LM's "torch" format (megatron/training/checkpointing.py: get_checkpoint_name, save_checkpoint,
load_checkpoint). Its loader asks for an optimizer and random states in a numbered iteration, and for neither in a folder
`release` that the tracker names, where training begins at iteration 0: so weights alone are written as a release, and load
without further flags. There is no `args` in the files: Megatron-LM takes its own then, and a Namespace would keep
`torch.load(weights_only=True)` from reading them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlmca.layouts import Coord, ModelLayout, ParamPlan, Topology
from rlmca.transfer.convert.archives import Empty, Hollow, hollow
from rlmca.transfer.convert.base import ConvertError, Item, Slot

FILE = "model_optim_rng.pt"
TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
CHECKPOINT_VERSION = 3.0
"""Older ones order the rows of the fused projection otherwise."""


def iteration_folder(iteration: int | None) -> str:
    """The folder of an iteration, or of a release."""
    return RELEASE if iteration is None else f"iter_{iteration:07d}"


def rank_folder(topology: Topology, coord: Coord) -> str:
    """The folder of a rank's file."""
    stage = f"_{coord.pp:03d}" if topology.pp > 1 else ""
    experts = f"_{topology.expert_place(coord)[1]:03d}" if topology.ep > 1 else ""
    return f"mp_rank_{coord.tp:02d}{stage}{experts}"


def rank_folders(topology: Topology) -> dict[str, Coord]:
    """Every rank's folder. Raises ConvertError where ranks that hold different weights would have the same."""
    found: dict[str, Coord] = {}
    for coord in topology.coords():
        name = rank_folder(topology, coord)
        if name in found:
            raise ConvertError(
                f"expert_tensor_parallel_size {topology.expert_tp} beside tensor_model_parallel_size {topology.tp}: ranks with different "
                f"parts of an expert would both write {name}, since names of rank files do not count the former; choose one that "
                f"divides {topology.tp}, or write torch_dist, which fits every layout"
            )
        found[name] = coord
    return found


def without_experts(layout: ModelLayout, topology: Topology) -> Topology:
    """The topology, less what only experts are split over where a model has none."""
    return topology if layout.megatron.num_experts else replace(topology, etp=None)


def model_key(param: str, topology: Topology) -> tuple[str, str]:
    """(key of the state dict in a file, name of the parameter there) for a parameter's name in a rank's plan."""
    if topology.vpp == 1:
        return "model", param
    chunk, _, name = param.partition(":")
    return f"model{chunk}", name


class RankFilesTarget:
    """The files of all ranks under `topology`, with the parameter names of `layout.spec`.

    `dtypes` says for every Hugging Face tensor as what it is written (keys of `base.DTYPES`). `iteration` None writes a release.
    Raises LayoutError for a model that does not fit the topology, ConvertError for a topology that the names of the files
    cannot tell, and for tensors of different types that make up one parameter.
    """

    archives = True

    def __init__(self, layout: ModelLayout, topology: Topology, dtypes: Mapping[str, str], iteration: int | None = None) -> None:
        self.layout, self.topology, self.iteration = layout, without_experts(layout, topology), iteration
        layout.check(self.topology)
        self._items: list[Item] = []
        self._archives: dict[Path, Hollow] = {}
        self._names: dict[Path, dict[str, str]] = {}
        types: dict[str, str] = {}
        for folder, coord in sorted(rank_folders(self.topology).items()):
            plans = layout.rank_plan(self.topology, coord)
            for name, plan in plans.items():
                if plan.copies:  # else all of it is padding of the vocabulary, and an earlier rank holds the rest
                    types[name] = _one_type(name, plan, dtypes)
            self._add_file(Path(iteration_folder(iteration)) / folder / FILE, plans, types)

    def _add_file(self, path: Path, plans: Mapping[str, ParamPlan], types: Mapping[str, str]) -> None:
        keys = ["model"] if self.topology.vpp == 1 else [f"model{chunk}" for chunk in range(self.topology.vpp)]
        tree: dict[str, Any] = {"checkpoint_version": CHECKPOINT_VERSION, "iteration": self.iteration or 0, **{key: {} for key in keys}}
        for name, plan in plans.items():
            key, inner = model_key(name, self.topology)
            tree[key][inner] = Empty(name, plan.shape, types[name])
        archive = self._archives[path] = hollow(tree)
        names = self._names[path] = {name: f"{path.parent.name}/{name}" for name in plans}
        self._items += [
            Item(names[name], Slot(path, archive.payloads[name].offset, plan.shape, types[name]), plan.copies)
            for name, plan in plans.items()
        ]

    @property
    def items(self) -> Sequence[Item]:
        """Every parameter of every rank, file by file."""
        return self._items

    def begin(self, folder: Path) -> None:
        """Make the files and the tracker."""
        for path, archive in self._archives.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(folder / path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
            try:
                os.ftruncate(descriptor, archive.size)
                archive.write(descriptor)
            finally:
                os.close(descriptor)
        (folder / TRACKER).write_text(RELEASE if self.iteration is None else str(self.iteration), encoding="utf-8")

    def finish(self, folder: Path, crc32: Mapping[str, int] | None) -> None:
        """Put the checksums into the archives."""
        if crc32 is None:
            return
        for path, archive in self._archives.items():
            descriptor = os.open(folder / path, os.O_RDWR)
            try:
                archive.seal(descriptor, {name: crc32[item] for name, item in self._names[path].items()})
            finally:
                os.close(descriptor)


def _one_type(param: str, plan: ParamPlan, dtypes: Mapping[str, str]) -> str:
    kinds: dict[str, str] = {}
    for copy in plan.copies:
        kinds.setdefault(dtypes[copy.hf], copy.hf)
    if len(kinds) > 1:
        held = " and ".join(f"{name} is {kind}" for kind, name in sorted(kinds.items()))
        raise ConvertError(f"{held}, and both are parts of {re.sub('^[0-9]+:', '', param)}; choose one type with --dtype")
    return next(iter(kinds))
