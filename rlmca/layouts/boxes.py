"""Index arithmetic of the copy plan.

A box is a tuple of half-open ranges, one per axis. A tile says that box `src` of the Hugging Face tensor `hf`
lies at box `dst` (same extents) of a Megatron tensor; a Megatron tensor is fully described by its tiles, and
what no tile covers is padding. `interleave` makes every layout there is here; after it, tensor parallelism is a
contiguous cut along one axis.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from typing import NamedTuple

Range = tuple[int, int]
Box = tuple[Range, ...]
Shape = tuple[int, ...]


class Tile(NamedTuple):
    """Box `src` of Hugging Face tensor `hf` is box `dst` of the Megatron tensor: the same extents, but for an axis of length 1
    that `src` may have in front."""

    hf: str
    src: Box
    dst: Box


def full(shape: Shape) -> Box:
    """The box of a whole tensor."""
    return tuple((0, n) for n in shape)


def extents(box: Box) -> Shape:
    """Length of the box along each axis."""
    return tuple(b - a for a, b in box)


def volume(box: Box) -> int:
    """Number of elements in the box."""
    return math.prod(extents(box))


def cut_box(one: Box, two: Box) -> Box | None:
    """What two boxes have in common; None when that is nothing."""
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, two, strict=True))
    return common if all(a < b for a, b in common) else None


def interleave(shapes: Mapping[str, Shape], groups: int = 1) -> Iterator[Tile]:
    """Tiles of the concatenation along axis 0, group by group: group g holds the g-th of `groups` equal parts of each.

    One group: a plain or concatenated tensor. One group per KV head: fused QKV. One group per tensor-parallel
    rank: gate and up as ranks hold them. `groups` must divide axis 0 of every tensor.
    """
    at = 0
    for g in range(groups):
        for name, shape in shapes.items():
            rows, rest = shape[0] // groups, full(shape[1:])
            if rows * groups != shape[0]:
                raise ValueError(f"{name}: {shape[0]} rows do not split into {groups} groups")
            yield Tile(name, ((g * rows, (g + 1) * rows), *rest), ((at, at + rows), *rest))
            at += rows


def stack(tiles: Iterable[Tile], shapes: Mapping[str, Shape], name: str, at: int | None) -> Iterator[Tile]:
    """The tiles with the tensors in `shapes` as parts of one tensor `name`: behind each other along axis 0, and all of them at
    index `at` of an axis in front (None: there is no such axis)."""
    starts = dict(zip(shapes, accumulate((shape[0] for shape in shapes.values()), initial=0), strict=False))
    front = () if at is None else ((at, at + 1),)
    for hf, ((a, b), *rest), dst in tiles:
        yield Tile(name, (*front, (a + starts[hf], b + starts[hf]), *rest), dst)


def cut(tiles: Iterable[Tile], box: Box) -> Iterator[Tile]:
    """The parts of the tiles inside `box`, with `dst` relative to the box."""
    for hf, src, dst in tiles:
        if (cap := cut_box(dst, box)) is not None:
            inside = tuple((s + a - d, s + b - d) for (s, _), (d, _), (a, b) in zip(src, dst, cap, strict=True))
            yield Tile(hf, inside, tuple((a - o, b - o) for (a, b), (o, _) in zip(cap, box, strict=True)))


def shard(shape: Shape, axis: int | None, size: int, rank: int) -> Box:
    """Box of the rank-th of `size` equal parts along `axis`; the whole tensor when `axis` is None."""
    box = list(full(shape))
    if axis is not None:
        rows = shape[axis] // size
        if rows * size != shape[axis]:
            raise ValueError(f"an axis of {shape[axis]} does not split over {size} ranks")
        box[axis] = (rank * rows, (rank + 1) * rows)
    return tuple(box)
