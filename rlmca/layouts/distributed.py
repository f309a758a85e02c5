"""The layout of Megatron's distributed checkpoint (`torch_dist`): the parameters whole, as one rank alone would hold them.

Keys of layers are stacked (one key for all layers, which are its first axis) where all layers are alike, else one key a layer;
all experts of a layer have one key, with the experts as an axis behind that of the layers. Source: `sharded_state_dict` of
megatron-core 0.16.1's TransformerBlock, MLP and SequentialMLP, and the key map of its local layer spec.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rlmca.layouts.boxes import Shape, Tile, interleave, stack
from rlmca.layouts.plan import ModelLayout
from rlmca.layouts.rows import Row

LAYERS = "decoder.layers."
LOCAL_NORMS = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_", "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}
"""Keys of the local layer spec (not of that with latent attention): as if norms were fused into what follows them."""
EXPERTS = "mlp.experts.experts."


class Whole(NamedTuple):
    """A parameter of the model, whole.

    `names` are its keys without the numbers of its layer and expert (None where it has none): several where the local and the
    Transformer Engine layer spec call it differently. `tiles` fill a tensor of `shape`, `halves`: gate above up, which Megatron
    stores as two chunks. `padded`: a checkpoint may have more rows, which are padding.
    """

    names: tuple[str, ...]
    layer: int | None
    expert: int | None
    shape: Shape
    tiles: tuple[Tile, ...]
    halves: bool
    padded: bool


class Chunk(NamedTuple):
    """A box of a key of the checkpoint: `shape` is the key's, `offset` and `size` the box's, axes of layers and experts included.

    `copies` fill a tensor of the shape `body`, which is `size` without these axes (they have length 1).
    """

    key: str
    shape: Shape
    offset: Shape
    size: Shape
    body: Shape
    copies: tuple[Tile, ...]


def layers_alike(layout: ModelLayout) -> bool:
    """Whether a plain user's Megatron asks for stacked keys: all layers have experts or none has, so no list says which do."""
    return len({layout.megatron.has_experts(layer) for layer in range(layout.num_layers)}) == 1


def wholes(layout: ModelLayout) -> Iterator[Whole]:
    """Every parameter in the order of the model; its tiles name the tensors of the form that the layout has."""
    makers = {id(row): _Maker(row, layout) for row in layout.rows}
    for at in ("first", "layer", "last"):
        for layer in range(layout.num_layers) if at == "layer" else [0]:
            rows = [row for row in layout.rows if row.at == at and (at != "layer" or row.of(layout.megatron, layer))]
            yield from (makers[id(row)].whole(layer, None) for row in rows if not row.expert)
            experts = [makers[id(row)] for row in rows if row.expert]
            for expert in range(layout.megatron.num_experts):
                yield from (maker.whole(layer, expert) for maker in experts)


class _Maker:
    """The parameters of a row, which differ in the names of their tensors alone."""

    def __init__(self, row: Row, layout: ModelLayout) -> None:
        sizes = layout.megatron.sizes()
        shapes = {name: tuple(sizes[n] for n in shape) for name, shape in row.hf.items()}
        tiles = list(interleave(shapes, int(layout.megatron.config["num_query_groups"]) if row.layout.groups == "kv" else 1))
        self._stacked = row.expert and row.stacked is not None and layout.form == "stacked"
        if row.stacked is not None and layout.form == "stacked":
            tiles = list(stack(tiles, shapes, row.stacked, 0 if row.expert else None))
        self._row, self._tiles = row, tiles
        _, *rest = next(iter(shapes.values()))
        self._shape = (sum(shape[0] for shape in shapes.values()), *rest)
        self._names = keys_of(row, layout.megatron.latent)

    def whole(self, layer: int, expert: int | None) -> Whole:
        row, layer_text, expert_text = self._row, str(layer), str(expert)
        tiles = tuple(Tile(hf.replace("{l}", layer_text).replace("{e}", expert_text), src, dst) for hf, src, dst in self._tiles)
        if self._stacked and expert is not None:
            tiles = tuple(Tile(hf, ((expert, expert + 1), *src[1:]), dst) for hf, src, dst in tiles)
        place = layer if row.at == "layer" else None
        return Whole(self._names, place, expert, self._shape, tiles, row.layout.groups == "tp", row.layout.padded)


def keys_of(row: Row, latent: bool) -> tuple[str, ...]:
    """Stacked keys of a row: under the local layer spec, and under Transformer Engine's where that has another."""
    names = (row.megatron, row.te or row.megatron)
    local, engine = (name.replace("{l}.", "").replace("mlp.experts.local_experts.{e}.", EXPERTS) for name in names)
    if row.expert and row.te:  # one module for all experts, and a parameter for each
        engine = engine.replace("mlp.experts.", EXPERTS).replace("{e}", "")
    if not latent:
        for module, fused in LOCAL_NORMS.items():
            local = local.replace(LAYERS + module, LAYERS + fused)
    return tuple(dict.fromkeys((local, engine)))


def chunks(layout: ModelLayout, stacked: bool | None = None) -> Iterator[Chunk]:
    """What a checkpoint of the model is made of: every key it has, one chunk for each layer and expert, gate and up apart.

    A reader fetches whole chunks, so none is larger than what a model asks for. A parameter with two names is there twice.
    `stacked` None: as `layers_alike` says.
    """
    stacked = layers_alike(layout) if stacked is None else stacked
    for whole in wholes(layout):
        lead, dims = _lead(whole, layout, stacked)
        half = (whole.shape[0] // 2, *whole.shape[1:])
        for name in whole.names:
            key = name if stacked or whole.layer is None else name.replace(LAYERS, f"{LAYERS}{whole.layer}.")
            for start in (0, half[0]) if whole.halves else (0,):
                body = half if whole.halves else whole.shape
                inside = [tile for tile in whole.tiles if start <= tile.dst[0][0] < start + body[0]]  # a half is one tensor
                copies = tuple(Tile(hf, src, ((a - start, b - start), *rest)) for hf, src, ((a, b), *rest) in inside)
                offset = (*lead, start, *(0 for _ in body[1:]))
                yield Chunk(key, dims + whole.shape, offset, (1,) * len(lead) + body, body, copies)


def _lead(whole: Whole, layout: ModelLayout, stacked: bool) -> tuple[Shape, Shape]:
    """Where the parameter is on the axes of layers and experts, and how long these are."""
    axes = []
    if whole.layer is not None and stacked:
        axes.append((whole.layer, layout.num_layers))
    if whole.expert is not None:
        axes.append((whole.expert, layout.megatron.num_experts))
    return tuple(at for at, _ in axes), tuple(n for _, n in axes)


def extra_states(layout: ModelLayout, stacked: bool | None = None) -> Sequence[str]:
    """Keys of the objects that strict loading asks for beside the tensors: one of each linear layer, norm and core attention.

    Local layers ask for those of linear layers; a surplus is passed over. Source: `ShardedObject.unique_key`.
    """
    stacked = layers_alike(layout) if stacked is None else stacked
    found: dict[str, None] = {}
    for whole in wholes(layout):
        lead, dims = _lead(whole, layout, stacked)
        shard = f"shard_{'.'.join(map(str, lead or (0,)))}_{'.'.join(map(str, dims or (1,)))}"
        for name in whole.names:
            module = name.rpartition(".")[0]
            last = module.rpartition(".")[2]
            if not (last.startswith("linear_") or last.endswith("layernorm")):
                continue
            also = [f"{LAYERS}self_attention.core_attention"] if last == "linear_proj" else []
            for path in (module, *also):
                key = path if stacked or whole.layer is None else path.replace(LAYERS, f"{LAYERS}{whole.layer}.")
                found[f"{key}._extra_state/{shard}"] = None
    return list(found)
