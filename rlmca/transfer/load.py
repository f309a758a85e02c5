"""Executor files -> ranks: fill this rank's parameters from a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

from rlmca.layouts import Coord, ModelLayout, ParamPlan, Topology
from rlmca.layouts.boxes import Box, extents, volume
from rlmca.transfer.hf_folder import HFFolder, check_tensors, open_hf_folder
from rlmca.transfer.narrow import check_fits


def load_ranks(folder: str | Path | HFFolder, layout: ModelLayout, topology: Topology, coord: Coord, params: Mapping[str, Tensor]) -> None:
    """Write the weights of the folder into `params` (name -> parameter of the module at `coord`), cast to each one's type.

    Reads only the slices this rank holds, one at a time; padding rows of the vocabulary become zero. Every check comes before
    the first write: HFFolderError for missing, unexpected or misshapen tensors in the folder, ValueError for `params`
    that are not those of the layout. Only numbers too large for parameters in float16 are found (HFFolderError) on the way.
    """
    plan = layout.rank_plan(topology, coord)
    check_params(plan, params)
    if isinstance(folder, HFFolder):
        _load(folder, layout, plan, params)
    else:
        with open_hf_folder(folder) as opened:
            _load(opened, layout, plan, params)


def _load(folder: HFFolder, layout: ModelLayout, plan: Mapping[str, ParamPlan], params: Mapping[str, Tensor]) -> None:
    check_tensors(folder, layout.hf_tensors(), layout.megatron.tied, layout.megatron.kept)
    fill(plan, params, folder.read)


def fill(plan: Mapping[str, ParamPlan], params: Mapping[str, Tensor], read: Callable[[str, Box], Tensor]) -> None:
    """Write what `read(Hugging Face name, box)` gives into `params` as the plan says, and zeros where it says nothing."""
    for name, param in plan.items():
        target = params[name].detach()
        if sum(volume(copy.dst) for copy in param.copies) < target.numel():
            target.zero_()
        for copy in param.copies:
            part = read(copy.hf, copy.src)
            check_fits(copy.hf, part, target.dtype)
            target[index(copy.dst)].copy_(part.reshape(extents(copy.dst)))


def index(box: Box) -> tuple[slice, ...]:
    """The box as an index into a tensor."""
    return tuple(slice(a, b) for a, b in box)


def check_params(plan: Mapping[str, ParamPlan], params: Mapping[str, Tensor]) -> None:
    """Raises ValueError when the parameters of a module are not those of its plan, all differences in one message."""
    problems = [f"the module lacks {name}" for name in plan if name not in params]
    problems += [f"the layout has no place for {name}" for name in params if name not in plan]
    problems += [
        f"{name} has shape {tuple(params[name].shape)}, the layout says {param.shape}"
        for name, param in plan.items()
        if name in params and tuple(params[name].shape) != param.shape
    ]
    if problems:
        raise ValueError("the module does not fit the layout:\n" + "\n".join(problems))
