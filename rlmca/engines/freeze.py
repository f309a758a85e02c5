"""Which weights partial training trains, by their Hugging Face names; both engines ask here."""

from __future__ import annotations

from collections.abc import Iterable

from rlmca.models.options import FreezeOptions


def trained(hf_names: Iterable[str], num_layers: int, options: FreezeOptions) -> set[str]:
    """The Hugging Face tensors that partial training trains. ValueError for a part that the model does not have.

    A module of a layer is named by the part of its name behind the layer's number, one outside of layers by the part
    before "weight", as in LLaMA-Factory.
    """
    names = list(hf_names)
    n = options.layers
    chosen = set(range(max(0, num_layers - n), num_layers) if n > 0 else range(min(-n, num_layers)))
    of_layer, outside = {name: _of_layer(name) for name in names}, {name: name.split(".")[-2] for name in names if _of_layer(name) is None}
    parts = {place[1] for place in of_layer.values() if place is not None}
    if unknown := [m for m in options.modules if m != "all" and m not in parts]:
        raise ValueError(
            f"freeze_trainable_modules: {', '.join(unknown)} is no part of a layer; write all, or some of {', '.join(sorted(parts))}"
        )
    if unknown := [m for m in options.extra if m not in outside.values()]:
        raise ValueError(
            f"freeze_extra_modules: {', '.join(unknown)} is no part outside of layers; there are {', '.join(sorted(set(outside.values())))}"
        )
    inside = {
        name
        for name, place in of_layer.items()
        if place is not None and place[0] in chosen and ("all" in options.modules or place[1] in options.modules)
    }
    return inside | {name for name, part in outside.items() if part in options.extra}


def _of_layer(name: str) -> tuple[int, str] | None:
    """(number of the layer, name of the part in it) of a tensor; None outside of layers."""
    parts = name.split(".")
    at = next((i for i, part in enumerate(parts[:-1]) if part.isdecimal()), None)
    return None if at is None else (int(parts[at]), parts[at + 1])


def layer_count(names: Iterable[str]) -> int:
    """Number of layers that tensors of these names belong to."""
    return 1 + max((place[0] for name in names if (place := _of_layer(name)) is not None), default=-1)
