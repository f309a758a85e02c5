"""Which weights partial training trains, by their Hugging Face names; both engines ask here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from rlmca.layouts import ModelLayout
from rlmca.models.options import FreezeOptions


class FreezeError(ValueError):
    """Parts to train that the model does not have, or none at all."""


def trained(hf_names: Iterable[str], num_layers: int, options: FreezeOptions) -> set[str]:
    """The Hugging Face tensors that partial training trains. FreezeError for a part that the model does not have, and for none.

    A module of a layer is named by the part of its name behind the layer's number, one outside of layers by the part
    before "weight", as in LLaMA-Factory.
    """
    names = list(hf_names)
    n = options.layers
    chosen = set(range(max(0, num_layers - n), num_layers) if n > 0 else range(min(-n, num_layers)))
    of_layer, outside = {name: _of_layer(name) for name in names}, {name: name.split(".")[-2] for name in names if _of_layer(name) is None}
    parts = {place[1] for place in of_layer.values() if place is not None}
    if unknown := [m for m in options.modules if m != "all" and m not in parts]:
        raise FreezeError(
            f"freeze_trainable_modules: {', '.join(unknown)} is no part of a layer; write all, or some of {', '.join(sorted(parts))}"
        )
    if unknown := [m for m in options.extra if m not in outside.values()]:
        raise FreezeError(
            f"freeze_extra_modules: {', '.join(unknown)} is no part outside of layers; there are {', '.join(sorted(set(outside.values())))}"
        )
    inside = {
        name
        for name, place in of_layer.items()
        if place is not None and place[0] in chosen and ("all" in options.modules or place[1] in options.modules)
    }
    found = inside | {name for name, part in outside.items() if part in options.extra}
    if not found:
        raise FreezeError(
            "finetuning_type: freeze trains nothing of this model; write freeze_trainable_layers and freeze_trainable_modules that "
            "name some of its layers, or freeze_extra_modules"
        )
    return found


def trained_of(layout: ModelLayout, options: FreezeOptions) -> set[str]:
    """The same of a layout, as the names of published files, where experts stand one by one.

    A part goes by its name in stacked files too (Mixtral's block_sparse_moe is mlp there).
    """
    single = layout.in_form("single")
    names = single.hf_tensors()
    published: dict[str, set[str]] = {}
    for row in single.rows:
        if row.at == "layer" and row.stacked is not None:
            published.setdefault(_part(row.stacked), set()).update(map(_part, row.hf))
    known = {place[1] for name in names if (place := _of_layer(name)) is not None}
    modules = [part for m in options.modules for part in ([m] if m in known or m not in published else sorted(published[m]))]
    return trained(names, layout.num_layers, replace(options, modules=tuple(modules)))


def _part(template: str) -> str:
    """Name of the part of a layer in a template of a row of layers."""
    place = _of_layer(template.format(l=0, e=0))
    assert place is not None, template
    return place[1]


def _of_layer(name: str) -> tuple[int, str] | None:
    """(number of the layer, name of the part in it) of a tensor; None outside of layers."""
    parts = name.split(".")
    at = next((i for i, part in enumerate(parts[:-1]) if part.isdecimal()), None)
    return None if at is None else (int(parts[at]), parts[at + 1])


def layer_count(names: Iterable[str]) -> int:
    """Number of layers that tensors of these names belong to."""
    return 1 + max((place[0] for name in names if (place := _of_layer(name)) is not None), default=-1)
