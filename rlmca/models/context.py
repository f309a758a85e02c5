"""Context parallelism: which tokens of a row a rank holds, and how what it computes becomes whole again.

A sequence (its length a multiple of 2 CP) is cut into 2 CP chunks; rank r holds chunks r and 2 CP - 1 - r, so that under
a causal mask every rank has the same work (Megatron-Core's layout; Li et al. 2024, "Striped"/zigzag ring attention). A
row is one sequence, or, packed, several behind each other; `borders` says where they begin and, last, where the row ends.

Shape legend: B rows, T tokens of the whole row, S tokens of this rank, N targets of the whole micro-batch in row-major
order, n those whose predecessor this rank holds, H heads, D head size.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Borders = tuple[int, ...]


def held_places(borders: Borders, size: int, rank: int, device: torch.device | str = "cpu") -> Tensor:
    """Places [T / size] of the row that rank `rank` of `size` holds, in the order in which it holds them: sequence by sequence."""
    if size == 1:
        return torch.arange(borders[-1], device=device)
    parts = []
    for begin, end in itertools.pairwise(borders):
        chunk, rest = divmod(end - begin, 2 * size)
        if rest:
            raise ValueError(f"{end - begin} tokens do not split into 2 x {size} chunks of context parallelism")
        parts += [torch.arange(begin + k * chunk, begin + (k + 1) * chunk, device=device) for k in (rank, 2 * size - 1 - rank)]
    return torch.cat(parts)


def natural_order(borders: Borders, size: int, device: torch.device | str = "cpu") -> Tensor:
    """Index [T] that puts the tokens of all ranks, gathered rank by rank, into the order of the row."""
    return torch.cat([held_places(borders, size, r, device) for r in range(size)]).argsort()


def own_targets(mask_BT: Tensor, held_S: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(row_n, index_n, number_n) of the targets that this rank predicts.

    The state at place `held_S[index]` predicts the token after it: target `number` of the whole micro-batch in row-major
    order. Every target is predicted by exactly one rank.
    """
    number_BT = mask_BT.reshape(-1).cumsum(0).reshape(mask_BT.shape) - 1
    after_S = held_S + 1
    inside_S = after_S < mask_BT.shape[1]
    wanted_BS = mask_BT[:, after_S.clamp(max=mask_BT.shape[1] - 1)] & inside_S
    row_n, index_n = wanted_BS.nonzero(as_tuple=True)
    return row_n, index_n, number_BT[row_n, after_S[index_n]]


def whole_outputs(raw_2n: Tensor, number_n: Tensor, N: int, group: dist.ProcessGroup | None) -> Tensor:
    """[2, N] on every rank of the group from what each rank computed; differentiable.

    All ranks then compute the same loss from the same numbers, so the gradient of an output is taken once: by the rank that
    made it.
    """
    return _Whole.apply(raw_2n, number_n, N, group)


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, raw_2n: Tensor, number_n: Tensor, N: int, group: Any) -> Tensor:
        ctx.save_for_backward(number_n)
        whole_2N = raw_2n.new_zeros(raw_2n.shape[0], N)
        whole_2N[:, number_n] = raw_2n
        dist.all_reduce(whole_2N, group=group)  # every column comes from one rank, the others add zeros
        return whole_2N

    @staticmethod
    def backward(ctx: Any, grad_2N: Tensor) -> tuple[Tensor, None, None, None]:
        (number_n,) = ctx.saved_tensors
        return grad_2N[:, number_n], None, None, None


def tokens_to_heads(x_SBHD: Tensor, borders: Borders, group: dist.ProcessGroup) -> Tensor:
    """[S, B, H, D] of this rank's tokens -> [T, B, H / CP, D]: all tokens of some heads, in the order of the row.

    Jacobs et al. 2023, DeepSpeed Ulysses. The number of heads must be a multiple of CP.
    """
    size = dist.get_world_size(group)
    S, B, H, D = x_SBHD.shape
    if H % size:
        raise ValueError(f"{H} heads cannot be dealt out to {size} context-parallel ranks; write cp_comm_type: all_gather")
    sent = x_SBHD.reshape(S, B, size, H // size, D).permute(2, 0, 1, 3, 4)
    got = _AllToAll.apply(sent, group).reshape(size * S, B, H // size, D)
    return got[natural_order(borders, size, got.device)]


def heads_to_tokens(x_TBHD: Tensor, borders: Borders, group: dist.ProcessGroup) -> Tensor:
    """The inverse: [T, B, H / CP, D] in the order of the row -> [S, B, H, D]."""
    size = dist.get_world_size(group)
    T, B, H, D = x_TBHD.shape
    held = torch.cat([held_places(borders, size, r, x_TBHD.device) for r in range(size)])
    got = _AllToAll.apply(x_TBHD[held].reshape(size, T // size, B, H, D), group)
    return got.permute(1, 2, 0, 3, 4).reshape(T // size, B, size * H, D)


class _AllToAll(torch.autograd.Function):
    """Part i of the first axis goes to rank i; the gradient goes back the same way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        x = x.contiguous()  # first: empty_like would copy permuted strides, and parts would be mixed up
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _AllToAll.apply(grad, ctx.group), None
