"""The layouts whose numbers must be the same, one a line.

    tp      tensor-parallel ranks: each holds a part of every layer
    sp      x: sequence parallel, tensor ranks share the tokens between the tensor-parallel parts of a layer
    pp      pipeline stages: each holds some layers
    vpp     chunks of layers on each stage (virtual pipeline)
    cp      context-parallel ranks: each holds some tokens of every row
    cp by   how attention sees the others' tokens: gather (keys and values) or a2a (heads exchanged for tokens)
    dp      data-parallel ranks: each holds some rows of the batch
    rows    of a micro-batch; all: the rank's share in one piece
    packed  most tokens of a micro-batch when rows are packed one behind the other (-: as many rows as without packing)
    also    recompute=HOW      activations are computed again in the backward pass: full, block (one layer of a chunk), parts
            stages=LAYOUT      layers dealt out by `pipeline_model_parallel_layout`: E embedding, t layer, L head, | next chunk
            replicated         every data-parallel rank holds all gradients (no distributed optimizer)
            ep=N, etp=N        groups of ranks that experts are dealt out to, ranks that an expert is split over
            alltoall           tokens are sent to the ranks of their experts alone (otherwise all to all of them)
            balance            the routers' losses are added: seq_aux_loss and the z-loss
            overlap            gradients are reduced during the backward pass, weights gathered during the forward pass

A line uses tp x pp x cp x dp processes. To add a layout, add a line.
"""

from __future__ import annotations

from typing import Any

from tests.helpers.engine import Layout

LAYERS = 8
ALL_ROWS = 9
"""Rows of the batch; see `numbers.BATCH`."""

TABLE = """
tp sp pp vpp cp  by      dp  rows packed  also

 1  -  1  1   1  -        1  all     -    -
 1  -  1  1   1  -        1    1    16    -
 1  -  1  1   1  -        1    2    24    -
 1  -  1  1   1  -        1    3    40    -
 1  -  1  1   1  -        1    2     -    recompute=full
 1  -  1  1   1  -        1    3     -    recompute=parts

 1  -  1  1   1  -        2    1    16    -
 1  -  1  1   1  -        2  all     -    -
 1  -  1  1   1  -        2    2    24    replicated
 1  -  1  1   1  -        2    3    40    overlap
 2  -  1  1   1  -        1  all     -    -
 2  -  1  1   1  -        1    2    24    -
 2  x  1  1   1  -        1    3    40    -
 2  x  1  1   1  -        1    1    16    recompute=parts
 1  -  2  1   1  -        1    1    16    -
 1  -  2  1   1  -        1  all     -    -
 1  -  2  1   1  -        1    2    24    stages=Et*5|t*3L
 1  -  2  2   1  -        1    2    24    -
 1  -  2  4   1  -        1    1    16    -
 1  -  2  2   1  -        1    3    40    stages=E|tt|t*4|ttL
 1  -  1  1   2  gather   1    2    24    -
 1  -  1  1   2  a2a      1    3    40    -
 1  -  1  1   2  gather   1    1    16    recompute=full
 1  -  1  1   2  a2a      1  all     -    replicated

 4  -  1  1   1  -        1    2    24    -
 4  x  1  1   1  -        1  all     -    -
 1  -  4  1   1  -        1    1    16    -
 1  -  4  2   1  -        1    2    24    -
 1  -  4  1   1  -        1    3    40    stages=Et|tt|t*3|ttL
 1  -  1  1   1  -        4    1    16    -
 1  -  1  1   1  -        4    2    24    replicated
 1  -  1  1   4  gather   1    2    24    -
 1  -  1  1   4  a2a      1    1    16    -
 2  -  2  1   1  -        1    2    24    -
 2  x  2  2   1  -        1    1    16    -
 2  x  2  1   1  -        1    3    40    recompute=block
 2  -  1  1   1  -        2    1    16    replicated
 2  x  1  1   1  -        2    2    24    overlap
 2  -  1  1   2  gather   1    2    24    -
 2  x  1  1   2  a2a      1    1    16    -
 1  -  2  1   1  -        2    1    16    -
 1  -  2  2   1  -        2    2    24    overlap
 1  -  2  1   2  gather   1    3    40    -
 1  -  2  2   2  a2a      1    2    24    -
 1  -  1  1   2  gather   2    1    16    -
 1  -  1  1   2  a2a      2  all     -    replicated

 2  -  2  1   1  -        2    1    16    -
 2  x  2  2   1  -        2    2    24    -
 2  x  2  1   2  gather   1    1    16    -
 2  -  2  2   2  a2a      1    3    40    -
 1  -  8  1   1  -        1    1    16    -
 1  -  1  1   1  -        8    1    16    -
 1  -  1  1   8  gather   1    2    24    -
 1  -  1  1   8  a2a      1    2    24    -
 4  x  2  1   1  -        1    2    24    stages=Et*3|t*5L
 2  x  1  1   4  a2a      1    2    24    -
 1  -  4  2   1  -        2    1    16    -
 1  -  4  1   2  gather   1    2    24    -
 1  -  2  1   2  gather   2    2    24    overlap
 2  -  1  1   2  a2a      2    1    16    replicated
"""

EXPERTS = """
tp sp pp vpp cp  by      dp  rows packed  also

 1  -  1  1   1  -        1  all     -    -
 1  -  1  1   1  -        1  all     -    balance
 1  -  1  1   1  -        1    2    24    balance recompute=full
 1  -  1  1   1  -        1    1    16    balance recompute=parts

 1  -  1  1   1  -        2    1    16    ep=2
 1  -  1  1   1  -        2    2    24    ep=2 alltoall balance
 2  x  1  1   1  -        1    3    40    etp=1 balance
 2  x  1  1   1  -        1    1    16    etp=1 ep=2 alltoall
 2  x  1  1   1  -        1    2    24    balance recompute=full
 1  -  2  1   1  -        1    1    16    balance recompute=block
 1  -  2  2   1  -        1    2    24    balance recompute=full
 1  -  1  1   2  gather   1    2    24    ep=2 balance
 1  -  1  1   2  a2a      1    3    40    ep=2 alltoall balance

 1  -  1  1   1  -        4    1    16    ep=4 alltoall balance
 1  -  1  1   1  -        4    2    24    ep=4
 1  -  1  1   1  -        4    2    24    ep=2 balance overlap
 2  x  1  1   1  -        2    2    24    ep=2 balance
 2  x  1  1   1  -        2    1    16    ep=4 etp=1 alltoall replicated
 1  -  2  1   1  -        2    3    40    ep=2 alltoall balance
 2  x  2  2   1  -        1    2    24    etp=1 balance recompute=parts
 2  x  2  1   1  -        1    1    16    ep=2 etp=1 balance
 2  x  1  1   2  gather   1    1    16    ep=2 etp=1 alltoall balance

 2  x  2  1   1  -        2    1    16    ep=2 alltoall balance
 2  x  2  2   1  -        2    2    24    ep=4 etp=1 balance
 1  -  2  1   2  gather   2    2    24    ep=4 alltoall balance
"""
"""Those of families with experts, in float64; tensor parallelism of such models needs sequence parallelism."""

RECOMPUTE: dict[str, dict[str, Any]] = {
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "block": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
    "parts": {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "layernorm", "mlp"]},
}
BY = {"-": {}, "gather": {"cp_comm_type": "all_gather"}, "a2a": {"cp_comm_type": "a2a"}}
ALSO_OF_EXPERTS: dict[str, dict[str, Any]] = {
    "alltoall": {"moe_token_dispatcher_type": "alltoall"},
    "balance": {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.5, "moe_z_loss_coeff": 0.1},
}
ALSO_OF_DATA_PARALLEL: dict[str, dict[str, Any]] = {
    "replicated": {"use_distributed_optimizer": False},
    "overlap": {"overlap_grad_reduce": True, "overlap_param_gather": True},
}


def layouts(table: str = TABLE) -> list[Layout]:
    """The lines of the table, the one-process layout first; then all of them again, their rows packed."""
    lines = [line for line in table.splitlines() if line.strip()]
    return [layout_of(line, packed) for packed in (False, True) for line in lines[1:]]


def layout_of(line: str, packed: bool = False) -> Layout:
    """The layout of a line, its rows packed or not. ValueError for one that is not written as the table's head says."""
    try:
        tp, sp, pp, vpp, cp, by, dp, rows, tokens, *also = line.split()
        build, data_parallel, pipeline, experts = dict(BY[by]), {}, {}, {}
        for word in also if also != ["-"] else []:
            key, _, value = word.partition("=")
            if key == "recompute":
                build.update(RECOMPUTE[value])
            elif key == "stages":
                pipeline["layout"] = value
            elif key in ("ep", "etp"):
                experts[key] = int(value)
            elif word in ALSO_OF_EXPERTS:
                build.update(ALSO_OF_EXPERTS[word])
            else:
                data_parallel.update(ALSO_OF_DATA_PARALLEL[word])
        return Layout(
            name=_name(line) + "_packed" * packed,
            tp=int(tp),
            sp={"x": True, "-": False}[sp],
            pp=int(pp),
            vpp=int(vpp),
            cp=int(cp),
            dp=int(dp),
            **experts,
            micro_batch=ALL_ROWS if rows == "all" else int(rows),
            packing=packed,
            max_tokens=int(tokens) if packed and tokens != "-" else None,
            options=build,
            data_parallel=data_parallel,
            pipeline=pipeline,
        )
    except (ValueError, KeyError) as error:
        raise ValueError(f"the line {line!r} is no layout ({error}); write it under the head: {TABLE.split(chr(10))[1]}") from error


def _name(line: str) -> str:
    """`tp2_sp_pp2_rows1`: the columns that are not at their least, then what comes besides."""
    tp, sp, pp, vpp, cp, by, dp, rows, _, *also = line.split()
    sizes = [f"{key}{size}" for key, size in (("tp", tp), ("pp", pp), ("vpp", vpp), ("cp", cp), ("dp", dp)) if size != "1"]
    if sp == "x":
        sizes.insert(1, "sp")
    if by == "a2a":
        sizes.insert([size[:2] for size in sizes].index("cp") + 1, "a2a")
    return "_".join([*(sizes or ["one"]), f"rows{rows}", *(word for word in also if word != "-")])


def balanced(layout: Layout) -> bool:
    """Whether the routers' losses are part of the layout's numbers."""
    return "moe_aux_loss_coeff" in layout.options


def kinds(layout: Layout) -> set[str]:
    """Which kinds of parallelism, and of splitting the batch, a layout has."""
    options, data_parallel = layout.options, layout.data_parallel
    has = {
        "tensor parallel": layout.tp > 1,
        "sequence parallel": layout.sp,
        "pipeline": layout.pp > 1,
        "virtual pipeline": layout.vpp > 1,
        "uneven stages": "layout" in layout.pipeline,
        "context parallel, gather": layout.cp > 1 and options["cp_comm_type"] == "all_gather",
        "context parallel, a2a": layout.cp > 1 and options["cp_comm_type"] == "a2a",
        "data parallel": layout.dp > 1,
        "recompute": "recompute_granularity" in options,
        "distributed optimizer": layout.dp * layout.cp > 1 and data_parallel.get("use_distributed_optimizer", True),
        "replicated optimizer": layout.dp * layout.cp > 1 and not data_parallel.get("use_distributed_optimizer", True),
        "overlap": "overlap_grad_reduce" in data_parallel,
        "three at once": sum(size > 1 for size in (layout.tp, layout.pp, layout.cp, layout.dp)) > 2,
        "packed": layout.packing,
        f"micro-batches of {layout.micro_batch} rows": True,
        f"{layout.world} processes": True,
    }
    return {kind for kind, present in has.items() if present}


def kinds_of_experts(layout: Layout) -> set[str]:
    """What a layout has that matters to experts, and how it takes a row and a batch apart under the routers' losses."""
    has = {
        "experts on groups of ranks": layout.ep > 1,
        "experts split unlike the rest": (layout.etp or layout.tp) != layout.tp,
        "tokens sent to their experts alone": "moe_token_dispatcher_type" in layout.options,
        "tokens sent to all": layout.ep > 1 and "moe_token_dispatcher_type" not in layout.options,
    }
    losses = {
        "padded": not layout.packing,
        "packed": layout.packing,
        "sequence parallel": layout.sp,
        "pipeline": layout.pp > 1,
        "context parallel": layout.cp > 1,
        "data parallel": layout.dp > 1,
        "recompute": "recompute_granularity" in layout.options,
    }
    return {kind for kind, present in has.items() if present} | {f"losses, {kind}" for kind in losses if losses[kind] and balanced(layout)}
