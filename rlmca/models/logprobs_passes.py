"""The elementwise work on a tile of logits, forward and backward: plain torch, the same compiled into one loop each, Triton.

Shape legend: R rows (tokens) and C columns (vocabulary entries) of a tile.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import shutil
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

Statistics = Callable[[Tensor, "Tensor | None", bool], tuple[Tensor, Tensor, Tensor]]
Gradient = Callable[[Tensor, "Tensor | None", Tensor, Tensor, Tensor, "Tensor | None"], Tensor]


@dataclass(frozen=True)
class Passes:
    """The two passes over a tile. Whoever has a faster kernel for a device makes another instance and names it in `choose_passes`.

    `statistics(logits_RC, temperature, entropy)` -> (top_R, total_R, weighted_R): with z = logits / temperature, the
    largest z, sum exp(z - top), and with `entropy` sum exp(z - top) (z - top), else zeros.

    `gradient(logits_RC, temperature, column_R, top_R, constant_R, slope_R)` -> [R, C] of the logits' type: with z as above
    and s = z - top, -exp(s) (constant + slope s), where a slope of None is zero, and 0 where the target is: `column_R` is
    the target's place in the tile, or beside it. The logits may be overwritten.

    The temperature is a scalar tensor (a number would be compiled in), or None for 1. Sums and exponentials are taken in
    fp32, in fp64 for fp64 logits; all other tensors have that type.
    """

    statistics: Statistics
    gradient: Gradient


def scaled(logits: Tensor, temperature: Tensor | None, *, copy: bool = False) -> Tensor:
    """logits / temperature in fp32 (fp64 for fp64 logits)."""
    z = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=copy)
    return z if temperature is None else z / temperature


def overwrite(tile_RC: Tensor, column_R: Tensor, value: float) -> Tensor:
    """Write `value` where each row's column is, in place; rows whose column is not in the tile stay. (scatter_ copies the tile.)"""
    row_R, index_R = torch.arange(tile_RC.shape[0], device=tile_RC.device), column_R.clamp(0, tile_RC.shape[1] - 1)
    return tile_RC.index_put_((row_R, index_R), tile_RC[row_R, index_R].where(index_R != column_R, value))


def statistics(logits_RC: Tensor, temperature: Tensor | None, entropy: bool) -> tuple[Tensor, Tensor, Tensor]:
    """See `Passes.statistics`."""
    z_RC = scaled(logits_RC, temperature)
    top_R = z_RC.amax(1)
    z_RC = z_RC - top_R[:, None]
    weight_RC = z_RC.exp()
    total_R = weight_RC.sum(1)
    return top_R, total_R, (weight_RC * z_RC).sum(1) if entropy else torch.zeros_like(total_R)


def gradient(
    logits_RC: Tensor, temperature: Tensor | None, column_R: Tensor, top_R: Tensor, constant_R: Tensor, slope_R: Tensor | None
) -> Tensor:
    """See `Passes.gradient`."""
    s_RC = scaled(logits_RC, temperature) - top_R[:, None]
    factor_RC = constant_R[:, None] if slope_R is None else constant_R[:, None] + slope_R[:, None] * s_RC
    is_target_RC = torch.arange(logits_RC.shape[1], device=logits_RC.device)[None] == column_R[:, None]
    return torch.where(is_target_RC, 0.0, -s_RC.exp() * factor_RC).to(logits_RC.dtype)


# ---- plain torch


def _strips(logits_RC: Tensor) -> list[slice]:
    """Rows to take at a time: on a CPU what its cache holds of them in fp32, on an accelerator all."""
    rows, columns = logits_RC.shape
    step = rows if logits_RC.device.type != "cpu" else max(1, 2**17 // max(columns, 1))
    return [slice(start, start + step) for start in range(0, rows, step)]


def plain_statistics(logits_RC: Tensor, temperature: Tensor | None, entropy: bool) -> tuple[Tensor, Tensor, Tensor]:
    """`statistics` in place and in strips."""
    found_3R = logits_RC.new_zeros(3, logits_RC.shape[0], dtype=torch.promote_types(logits_RC.dtype, torch.float32))
    for rows in _strips(logits_RC):
        z = scaled(logits_RC[rows], temperature, copy=temperature is None)
        torch.amax(z, 1, out=found_3R[0, rows])
        z.sub_(found_3R[0, rows, None])
        weight = z.exp() if entropy else z.exp_()
        torch.sum(weight, 1, out=found_3R[1, rows])
        if entropy:
            torch.sum(z.mul_(weight), 1, out=found_3R[2, rows])
    top_R, total_R, weighted_R = found_3R
    return top_R, total_R, weighted_R


def plain_gradient(
    logits_RC: Tensor, temperature: Tensor | None, column_R: Tensor, top_R: Tensor, constant_R: Tensor, slope_R: Tensor | None
) -> Tensor:
    """`gradient` in place and in strips."""
    for rows in _strips(logits_RC):
        s = scaled(logits_RC[rows], temperature, copy=temperature is None).sub_(top_R[rows, None])
        if slope_R is None:
            logits_RC[rows] = s.exp_().mul_(-constant_R[rows, None])
        else:
            logits_RC[rows] = s.exp().mul_(s.mul_(-slope_R[rows, None]).sub_(constant_R[rows, None]))
    return overwrite(logits_RC, column_R, 0.0)


PLAIN = Passes(plain_statistics, plain_gradient)


# ---- compiled


class _Compiled:
    """A function through torch.compile, or, from the first failure on, its plain form."""

    def __init__(self, function: Callable[..., Any], plain: Callable[..., Any]) -> None:
        self._function, self._plain = function, plain
        self._run: Callable[..., Any] | None = None

    def __call__(self, *args: Any) -> Any:
        try:
            if self._run is None:
                # in this process: two short loops are not worth the helper processes that torch would start
                self._run = torch.compile(self._function, dynamic=True, options={"compile_threads": 1})
            return self._run(*args)
        except Exception as error:  # no compiler, no Triton, a bug in either: not a reason to end a run
            logger.info("log-probs go on without torch.compile: %s: %s", type(error).__name__, str(error).partition("\n")[0])
            self._run = self._plain
            return self._plain(*args)


@functools.cache
def compiled_passes() -> Passes:
    """Both passes through torch.compile, each turned into its plain form where that fails; decided once in a process."""
    return Passes(_Compiled(statistics, plain_statistics), _Compiled(gradient, plain_gradient))


# ---- Triton


@functools.cache
def triton_passes() -> Passes | None:
    """Both passes as Triton kernels, None where Triton cannot make kernels; looked up once in a process.

    What makes an installed Triton fail is not hidden: it would be the wrong kernels, or none, for a whole run.
    """
    missing = _missing_for_triton()
    if missing is not None:
        logger.info("log-probs go on without Triton: no %s", missing)
        return None
    from rlmca.models.logprobs_triton import TRITON  # imports triton, which not everybody has

    return TRITON


def _missing_for_triton() -> str | None:
    """What Triton lacks here. It builds the part that starts its kernels with a C compiler, against Python's headers."""
    if importlib.util.find_spec("triton") is None:
        return "package triton in this environment"
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "C compiler found (gcc, clang or what the variable CC names)"
    headers = Path(sysconfig.get_path("include", "posix_prefix"))
    return None if (headers / "Python.h").exists() else f"Python.h in {headers} (a package such as python3-dev has it)"


def choose_passes(device: torch.device, elements: int, compile_from: int | None) -> Passes:
    """On CUDA Triton's kernels where there are any, for every size: they take a second to build, once, and a disk keeps them.

    Else compiled passes for problems of at least `compile_from` logits (None: never), since compiling takes many seconds,
    and that again in every process.
    """
    found = triton_passes() if device.type == "cuda" else None
    if found is not None:
        return found
    return compiled_passes() if compile_from is not None and elements >= compile_from else PLAIN
