"""How the layers of a model are dealt out to the chunks of a pipeline, and what Megatron calls that.

A pipeline of `pp` stages with `vpp` chunks each has pp * vpp chunks in the order of the model: chunk k lies on stage
k mod pp and is its (k div pp)-th. Everything that a user can write comes down to one tuple: the layers of each chunk.
"""

from __future__ import annotations

import re

from rlmca.config import layout_chunks
from rlmca.layouts.topology import LayoutError, Topology


def pipeline_topology(
    num_layers: int,
    *,
    tp: int,
    pp: int,
    vpp: int = 1,
    ep: int = 1,
    etp: int | None = None,
    embedding_counts: bool = False,
    loss_counts: bool = False,
    layout: str | None = None,
) -> Topology:
    """The split of a model of `num_layers` layers. Raises LayoutError when they do not come out even."""
    if vpp == 1 and not embedding_counts and not loss_counts and layout is None:
        return Topology(tp=tp, pp=pp, ep=ep, etp=etp)
    sizes = chunk_sizes(num_layers, pp, vpp, embedding_counts=embedding_counts, loss_counts=loss_counts, layout=layout)
    return Topology(tp=tp, pp=pp, chunks=sizes, ep=ep, etp=etp)


def chunk_sizes(
    num_layers: int, pp: int, vpp: int = 1, *, embedding_counts: bool = False, loss_counts: bool = False, layout: str | None = None
) -> tuple[int, ...]:
    """Layers of each chunk. Raises LayoutError with the numbers when they do not come out even.

    `embedding_counts` and `loss_counts`: the embedding (the head) takes the place of one layer in the first (last) chunk.
    `layout` says it all by itself, in Megatron's letters: `Et*3|t*4|t*4|t*3L` is an embedding and 3 layers, twice 4 layers,
    3 layers and the head.
    """
    if vpp > 1 and pp == 1:
        raise LayoutError(f"virtual_pipeline_model_parallel_size is {vpp} and pipeline_model_parallel_size 1: only a pipeline has chunks")
    if layout is not None:
        return _of_layout(layout, num_layers, pp, vpp)
    chunks = pp * vpp
    places = num_layers + embedding_counts + loss_counts
    if places % chunks:
        parts = [f"{num_layers} layers", *(["the embedding"] * embedding_counts), *(["the head"] * loss_counts)]
        virtual = f" x virtual_pipeline_model_parallel_size {vpp}" if vpp > 1 else ""
        fits = [n for n in range(1, places + 1) if places % (n * vpp) == 0]
        raise LayoutError(
            f"pipeline_model_parallel_size is {pp}, but {' and '.join(parts)} do not split evenly over pipeline_model_parallel_size "
            f"{pp}{virtual} = {chunks} chunks; use a pipeline of one of {fits}, or write pipeline_model_parallel_layout"
        )
    sizes = [places // chunks] * chunks
    sizes[0] -= embedding_counts
    sizes[-1] -= loss_counts
    return tuple(sizes)


def _of_layout(layout: str, num_layers: int, pp: int, vpp: int) -> tuple[int, ...]:
    where = f"pipeline_model_parallel_layout {layout!r}"
    parts = layout_chunks(layout)
    text = "|".join(parts)
    if "m" in text:
        raise LayoutError(f"{where}: m is a multi-token prediction layer, which is not in this version")
    if not re.fullmatch(r"E[t|]*L", text):
        raise LayoutError(f"{where}: write E (embedding) first, t for each layer, | between chunks, L (the head) last: Et*3|t*3L")
    sizes = tuple(part.count("t") for part in parts)
    if len(sizes) % pp or (vpp > 1 and len(sizes) != pp * vpp):
        raise LayoutError(f"{where} has {len(sizes)} chunks: pipeline_model_parallel_size {pp} x {vpp} chunks a stage are {pp * vpp}")
    if sum(sizes) != num_layers:
        raise LayoutError(f"{where} holds {sum(sizes)} layers, the model has {num_layers}")
    return sizes


def megatron_layout(sizes: tuple[int, ...]) -> list[list[str]]:
    """The chunks as `TransformerConfig.pipeline_model_parallel_layout` takes them."""
    rows = [["decoder"] * size for size in sizes]
    rows[0].insert(0, "embedding")
    rows[-1].append("loss")
    return rows
