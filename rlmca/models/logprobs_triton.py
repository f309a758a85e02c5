"""The passes over a tile of logits as Triton kernels: a tile is read once for its statistics, and read and written once for
its gradient, without a copy in fp32. Importing this needs Triton; `choose_passes` decides who does.

Shape legend: R rows (tokens) and C columns (vocabulary entries) of a tile; B of the columns are taken at a time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlmca.models.logprobs_passes import Passes, plain_gradient, plain_statistics

WIDEST = 4096
"""Most columns that a program has in registers: 16 of them a thread, with 8 warps."""


@triton.jit
def statistics_kernel(
    logits: tl.tensor,
    temperature: tl.tensor,
    top_R: tl.tensor,
    total_R: tl.tensor,
    weighted_R: tl.tensor,
    columns: tl.tensor,
    row_stride: tl.tensor,
    column_stride: tl.tensor,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """A program a row: the online softmax (Milakov and Gimelshein, 2018), as `_merge` in logprobs_head.py has it for tiles.

    A logit of -inf has probability 0 and adds nothing to either sum, so a row of nothing else gives (-inf, 0, 0).
    """
    row = tl.program_id(0).to(tl.int64)
    if temperature is not None:
        divisor = tl.load(temperature)
    top = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    weighted = tl.full((), 0.0, tl.float32)
    for start in range(0, columns, BLOCK):
        column_B = start + tl.arange(0, BLOCK)
        place_B = logits + row * row_stride + column_B.to(tl.int64) * column_stride
        z_B = tl.load(place_B, mask=column_B < columns, other=float("-inf")).to(tl.float32)
        if temperature is not None:
            z_B = z_B / divisor
        whole = tl.maximum(top, tl.max(z_B, 0))
        s_B = z_B - tl.where(whole == float("-inf"), 0.0, whole)
        weight_B = tl.exp(s_B)
        down = tl.where(total == 0.0, 0.0, top - whole)
        shrink = tl.exp(down)
        if ENTROPY:
            weighted = (weighted + down * total) * shrink + tl.sum(weight_B * tl.where(s_B == float("-inf"), 0.0, s_B), 0)
        total = total * shrink + tl.sum(weight_B, 0)
        top = whole
    tl.store(top_R + row, top)
    tl.store(total_R + row, total)
    tl.store(weighted_R + row, weighted)


@triton.jit
def gradient_kernel(
    logits: tl.tensor,
    temperature: tl.tensor,
    column_R: tl.tensor,
    top_R: tl.tensor,
    constant_R: tl.tensor,
    slope_R: tl.tensor,
    columns: tl.tensor,
    row_stride: tl.tensor,
    column_stride: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """A program for each row and each block of its columns, in place. A logit of -inf has no gradient."""
    row = tl.program_id(0).to(tl.int64)
    column_B = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside_B = column_B < columns
    place_B = logits + row * row_stride + column_B.to(tl.int64) * column_stride
    z_B = tl.load(place_B, mask=inside_B, other=float("-inf")).to(tl.float32)
    if temperature is not None:
        z_B = z_B / tl.load(temperature)
    s_B = tl.where(z_B == float("-inf"), 0.0, z_B - tl.load(top_R + row))
    factor = tl.load(constant_R + row)
    if slope_R is not None:
        factor = factor + tl.load(slope_R + row) * s_B
    nothing_B = (column_B == tl.load(column_R + row)) | (z_B == float("-inf"))
    tl.store(place_B, tl.where(nothing_B, 0.0, -tl.exp(s_B) * factor).to(logits.dtype.element_ty), mask=inside_B)


def triton_statistics(logits_RC: Tensor, temperature: Tensor | None, entropy: bool) -> tuple[Tensor, Tensor, Tensor]:
    """See `Passes.statistics`. Float64, which is for tests, goes the plain way: the kernels compute in fp32."""
    if logits_RC.dtype == torch.float64:
        return plain_statistics(logits_RC, temperature, entropy)
    rows, columns = logits_RC.shape
    top_R, total_R, weighted_R = (logits_RC.new_empty(rows, dtype=torch.float32) for _ in range(3))
    if rows:
        with torch.cuda.device_of(logits_RC):  # Triton starts on the current device, wherever the tensors are
            statistics_kernel[(rows,)](
                logits_RC, temperature, top_R, total_R, weighted_R, columns, *logits_RC.stride(), ENTROPY=entropy, **_launch(columns)
            )
    return top_R, total_R, weighted_R


def triton_gradient(
    logits_RC: Tensor, temperature: Tensor | None, column_R: Tensor, top_R: Tensor, constant_R: Tensor, slope_R: Tensor | None
) -> Tensor:
    """See `Passes.gradient`; in place. Float64 goes the plain way."""
    if logits_RC.dtype == torch.float64:
        return plain_gradient(logits_RC, temperature, column_R, top_R, constant_R, slope_R)
    rows, columns = logits_RC.shape
    vectors = [None if values is None else values.contiguous() for values in (column_R, top_R, constant_R, slope_R)]
    launch = _launch(columns)
    if logits_RC.numel():
        with torch.cuda.device_of(logits_RC):
            gradient_kernel[(rows, triton.cdiv(columns, launch["BLOCK"]))](
                logits_RC, temperature, *vectors, columns, *logits_RC.stride(), **launch
            )
    return logits_RC


def _launch(columns: int) -> dict[str, int]:
    """Columns a program takes at a time, and the warps for them."""
    block = min(WIDEST, triton.next_power_of_2(max(columns, 1)))
    return {"BLOCK": block, "num_warps": min(max(block // 512, 1), 8)}


TRITON = Passes(triton_statistics, triton_gradient)
