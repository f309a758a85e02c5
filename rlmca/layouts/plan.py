"""The copy plan: which slice of which Hugging Face tensor is which slice of which parameter on which rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rlmca.layouts.boxes import Box, Shape, Tile, cut, extents, interleave, shard, stack
from rlmca.layouts.families import family_of
from rlmca.layouts.rows import Form, Row, Spec
from rlmca.layouts.topology import Coord, LayoutError, Topology

Copy = Tile
"""Box `src` of Hugging Face tensor `hf` fills box `dst` of the parameter; `src` may have an axis of length 1 more in front."""
EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"


@dataclass(frozen=True)
class ParamPlan:
    """A parameter of one rank: its shape and the copies that fill it. Elements that no copy fills are padding (zero).

    `axis` is the axis that tensor parallelism cuts, None where every tensor-parallel rank holds a copy. `expert`: a part of
    one expert, so the ranks of expert parallelism hold it, not those of tensor parallelism. `buffer`: a float32 buffer of the
    module, which is not trained.
    """

    shape: Shape
    copies: tuple[Copy, ...]
    axis: int | None = None
    expert: bool = False
    buffer: bool = False


class Piece(NamedTuple):
    """Box `param_box` of parameter `param` on `coord` is box `hf_box` of a Hugging Face tensor."""

    coord: Coord
    param: str
    param_box: Box
    hf_box: Box


@dataclass(frozen=True)
class HFPlan:
    """A Hugging Face tensor: its shape and the pieces that make it up, each element in exactly one."""

    shape: Shape
    pieces: tuple[Piece, ...]


class _Place(NamedTuple):
    """A parameter on a rank. `primary` is False for a copy of what another place already holds."""

    coord: Coord
    param: str
    plan: ParamPlan
    primary: bool


def in_chunk(name: str, chunk: int, topology: Topology) -> str:
    """Name of a parameter on its rank: with several chunks a stage the number of the chunk stands in front."""
    return name if topology.vpp == 1 else f"{chunk // topology.pp}:{name}"


class ModelLayout:
    """Layout of one model. `hf_config` is the mapping in config.json; `spec` names the layer spec of the Megatron model, `form`
    how experts are held on the Hugging Face side.

    Raises ValueError for an unknown model type and UnsupportedField for a config that cannot be represented.
    """

    def __init__(self, hf_config: Mapping[str, Any], spec: Spec = "local", form: Form = "single") -> None:
        self.hf_config = dict(hf_config)
        self.spec, self.form = spec, form
        self.family = family_of(hf_config)
        self.megatron = self.family.megatron(hf_config)
        self.rows = self.family.rows_of(self.megatron)
        self.num_layers = int(self.megatron.config["num_layers"])
        self._sizes = self.megatron.sizes()

    def in_form(self, form: Form) -> ModelLayout:
        """The same model with its experts held in `form`."""
        return self if form == self.form else ModelLayout(self.hf_config, self.spec, form)

    def as_stored(self, names: Iterable[str]) -> ModelLayout:
        """The same model with its experts held as in a folder that has tensors of these names."""
        single, stacked = self.in_form("single"), self.in_form("stacked")
        return stacked if (stacked.hf_tensors().keys() - single.hf_tensors().keys()) & set(names) else single

    def hf_tensors(self) -> dict[str, Shape]:
        """Name and shape of every Hugging Face tensor, in the order of the model (no lm_head when tied)."""
        return {name: shape for place in self._rows_in_order() for name, shape in self._stored(*place).items()}

    def hf_buffers(self) -> frozenset[str]:
        """Those of `hf_tensors` that are float32 whatever the others are, and are not trained."""
        return frozenset(name for place in self._rows_in_order() if place[0].buffer for name in self._shapes(*place))

    def padded_vocab(self, topology: Topology) -> int:
        """Rows of the embedding over all ranks: the vocabulary rounded up to `vocab_multiple * tp`."""
        unit = topology.vocab_multiple * topology.tp
        return -(-self._sizes["vocab"] // unit) * unit

    def check(self, topology: Topology) -> None:
        """Raises LayoutError, with the numbers and what fits, when the model does not split over `topology`."""
        topology.chunk_layers(self.num_layers)
        self.check_width(topology)
        self.check_experts(topology)

    def check_width(self, topology: Topology) -> None:
        """Raises LayoutError when a layer's heads or its feed-forward rows do not split over the tensor-parallel ranks."""
        config = self.megatron.config
        sizes = {} if self.megatron.latent else {"num_key_value_heads": int(config["num_query_groups"])}
        sizes["num_attention_heads"] = int(config["num_attention_heads"])
        if self.megatron.latent and self.spec == "local":  # Megatron makes these ways down split before torch's parts replace them
            sizes |= {"q_lora_rank": self._sizes["q_latent"], "kv_lora_rank + qk_rope_head_dim": self._sizes["kv_down"]}
        if any(not self.megatron.has_experts(layer) for layer in range(self.num_layers)):
            sizes["intermediate_size"] = int(config["ffn_hidden_size"])
        if "shared_ffn" in self._sizes:
            several = "n_shared_experts" in self.family.fields
            field = "n_shared_experts x moe_intermediate_size" if several else "shared_expert_intermediate_size"
            sizes[field] = self._sizes["shared_ffn"]
        for hf, size in sizes.items():
            if size % topology.tp:
                fits = [tp for tp in range(1, topology.tp) if not any(n % tp for n in sizes.values())]
                raise LayoutError(
                    f"tensor_model_parallel_size is {topology.tp}, but {hf} is {size} and does not split over {topology.tp} ranks "
                    f"(copies of KV heads: not in this version); use one of {fits}"
                )

    def check_experts(self, topology: Topology) -> None:
        """Raises LayoutError when experts do not come out even over the expert-parallel ranks."""
        experts = self.megatron.num_experts
        if not experts:
            if topology.ep > 1:
                raise LayoutError(f"expert_model_parallel_size is {topology.ep}, but the model has no experts; leave it out")
            return
        if experts % topology.ep:
            fits = [n for n in range(1, experts + 1) if experts % n == 0]
            raise LayoutError(f"expert_model_parallel_size is {topology.ep}, but {experts} experts do not split over it; use one of {fits}")
        ffn = self._sizes["moe_ffn"]
        if ffn % topology.expert_tp:
            fits = [n for n in range(1, topology.expert_tp) if ffn % n == 0]
            field = next(name for name in ("moe_intermediate_size", "intermediate_size") if name in self.family.fields)
            raise LayoutError(
                f"expert_tensor_parallel_size is {topology.expert_tp}, but {field} is {ffn} and does not split over it; use one of {fits}"
            )

    def check_context(self, topology: Topology, cp: int, exchange: str) -> None:
        """Raises LayoutError when context-parallel ranks cannot share out the heads that a tensor-parallel rank holds."""
        heads = int(self.megatron.config["num_attention_heads"])
        if exchange == "a2a" and heads % (topology.tp * cp):
            raise LayoutError(
                f"cp_comm_type a2a deals out {heads} attention heads to tensor {topology.tp} x context {cp} = {topology.tp * cp} ranks, "
                "which does not come out even; write cp_comm_type: all_gather"
            )

    def check_recompute(self, topology: Topology, method: str, number: int) -> None:
        """Raises LayoutError when units of `number` layers (uniform) do not fill the chunks, or no chunk has `number` layers (block)."""
        sizes = sorted({len(chunk) for chunk in topology.chunk_layers(self.num_layers)} - {0}, reverse=True)
        held = " and ".join(str(size) for size in sizes)
        if method == "uniform" and any(size % number for size in sizes):
            fits = [n for n in range(1, sizes[-1] + 1) if not any(size % n for size in sizes)]
            raise LayoutError(
                f"recompute_num_layers is {number} with recompute_method uniform, but a chunk of the pipeline holds {held} layers, "
                f"which units of {number} do not fill; use one of {fits}"
            )
        if method == "block" and number > sizes[0]:
            raise LayoutError(
                f"recompute_num_layers is {number} with recompute_method block, but a chunk of the pipeline holds {held} layers; "
                f"{sizes[0]} recomputes all of them"
            )

    def rank_plan(self, topology: Topology, coord: Coord) -> dict[str, ParamPlan]:
        """Plan of every parameter of the rank at `coord`, by its name in the module there (layers counted in the chunk, see
        `in_chunk`)."""
        return {place.param: place.plan for place in self._places(topology, [coord])}

    def hf_plan(self, topology: Topology) -> dict[str, HFPlan]:
        """Where every element of every Hugging Face tensor is read from: replicated weights from tensor-parallel rank 0,
        a tied embedding from the first stage."""
        pieces: dict[str, list[Piece]] = {name: [] for name in self.hf_tensors()}
        for place in self._places(topology, topology.coords()):
            if place.primary:
                for hf, src, dst in place.plan.copies:
                    pieces[hf].append(Piece(place.coord, place.param, dst, src))
        return {name: HFPlan(shape, tuple(pieces[name])) for name, shape in self.hf_tensors().items()}

    def _rows_in_order(self) -> Iterator[tuple[Row, int, int]]:
        """(row, layer, expert) of every parameter in the order of the model; 0 where a row has none."""
        for at in ("first", "layer", "last"):
            for layer in range(self.num_layers) if at == "layer" else [0]:
                rows = [row for row in self.rows if row.at == at and (at != "layer" or row.of(self.megatron, layer))]
                yield from ((row, layer, 0) for row in rows if not row.expert)
                for expert in range(self.megatron.num_experts):
                    yield from ((row, layer, expert) for row in rows if row.expert)

    def _shapes(self, row: Row, layer: int, expert: int) -> dict[str, Shape]:
        return {name.format(l=layer, e=expert): tuple(self._sizes[n] for n in shape) for name, shape in row.hf.items()}

    def _stored(self, row: Row, layer: int, expert: int) -> dict[str, Shape]:
        """The tensors that the folder holds for the row."""
        shapes = self._shapes(row, layer, expert)
        if row.stacked is None or self.form == "single":
            return shapes
        rows, (_, *rest) = sum(shape[0] for shape in shapes.values()), next(iter(shapes.values()))
        return {row.stacked.format(l=layer): (*((self.megatron.num_experts,) if row.expert else ()), rows, *rest)}

    def _places(self, topology: Topology, coords: Sequence[Coord]) -> Iterator[_Place]:
        self.check(topology)
        chunks = topology.chunk_layers(self.num_layers)
        home = {layer: (k, layer - held.start) for k, held in enumerate(chunks) for layer in held}
        last, held_experts = len(chunks) - 1, self.megatron.num_experts // topology.ep
        for row, layer, expert in self._rows_in_order():
            chunk, local = home[layer] if row.at == "layer" else (0 if row.at == "first" else last, 0)
            stage = chunk % topology.pp
            places = {stage: in_chunk(row.name(self.spec, local, expert % max(held_experts, 1)), chunk, topology)}
            if row.megatron == EMBEDDING and self.megatron.tied and topology.pp > 1:
                places[topology.pp - 1] = in_chunk(OUTPUT, last, topology)  # the last stage computes logits with its own copy
            here = [c for c in coords if c.pp in places and (not row.expert or topology.expert_place(c)[1] == expert // held_experts)]
            if not here:
                continue
            shapes = self._shapes(row, layer, expert)
            width = topology.expert_tp if row.expert else topology.tp
            groups = {"one": 1, "kv": self.megatron.config["num_query_groups"], "tp": width}[row.layout.groups]
            tiles = list(interleave(shapes, groups))
            extent = next(iter(shapes.values()))
            rows = self.padded_vocab(topology) if row.layout.padded else sum(s[0] for s in shapes.values())
            for coord in here:
                place, _, first = topology.expert_place(coord) if row.expert else (coord.tp, 0, coord.block == 0)
                box = shard((rows, *extent[1:]), row.layout.axis, width, place)
                primary = coord.pp == stage and first and (row.layout.axis is not None or place == 0)
                copies = cut(tiles, box)
                if row.stacked is not None and self.form == "stacked":
                    copies = stack(copies, shapes, row.stacked.format(l=layer), expert if row.expert else None)
                plan = ParamPlan(extents(box), tuple(copies), row.layout.axis, row.expert, row.buffer)
                yield _Place(coord, places[coord.pp], plan, primary)
