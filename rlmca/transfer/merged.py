"""A model's folder read with adapters merged into it: files -> files, files -> ranks and files -> rollout engines alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlmca.layouts import Coord, Form, ModelLayout, Topology
from rlmca.layouts.adapters import PREFIX
from rlmca.layouts.boxes import Box, Range, Shape, full
from rlmca.transfer.hf_folder import ROTARY_TABLE, HFFolder, HFFolderError, check_tensors
from rlmca.transfer.peft import AdapterFolder


class _Part(NamedTuple):
    """Rows of a stored tensor that are the linear layer `name`, of entry `expert` where experts are stacked."""

    name: str
    expert: int | None
    rows: Range


class Merge:
    """What adapters add to the tensors of a model: W + sum of scaling * B A, rounded once to W's type.

    `config` and `shapes` are those of the model in `path`. Raises HFFolderError for an adapter of a layer that the model does
    not have, or of another shape.
    """

    def __init__(self, path: Path, config: Mapping[str, Any], shapes: Mapping[str, Shape], adapters: Sequence[Path]) -> None:
        self._shapes = shapes
        self._adapters: list[AdapterFolder] = []
        self._stacked = _stacked_parts(config, shapes)
        try:
            for adapter in adapters:
                self._adapters.append(AdapterFolder(Path(adapter)))
                self._check(self._adapters[-1], path)
        except BaseException:
            self.close()
            raise

    def touches(self, name: str) -> bool:
        """Whether some adapter changes the tensor."""
        return any(_pair(part.name)[0] in adapter.shapes for part in self._parts(name) for adapter in self._adapters)

    def merged(self, name: str, value: Tensor, box: Box) -> Tensor:
        """The tensor inside `box`, in a type of more bits, given what is stored there; `value` itself where nothing is added."""
        total: Tensor | None = None
        for part in self._parts(name):
            for adapter in self._adapters:
                if (at := _inside(part, box)) is None or _pair(part.name)[0] not in adapter.shapes:
                    continue
                if total is None:
                    total = value.to(torch.promote_types(value.dtype, torch.float64 if value.dtype == torch.float32 else torch.float32))
                into = total[at[0]]
                into += _delta(adapter, part.name, at[1], box[-1], total.dtype)
        return value if total is None else total

    def close(self) -> None:
        """Close the adapters' files."""
        for adapter in self._adapters:
            adapter.close()

    def _parts(self, name: str) -> list[_Part]:
        return self._stacked.get(name) or [_Part(name, None, (0, self._shapes[name][0]))]

    def _check(self, adapter: AdapterFolder, path: Path) -> None:
        fits: set[str] = set()
        for name, shape in self._shapes.items():
            for part in self._parts(name):
                wants = (adapter.adapter.rank, shape[-1]), (part.rows[1] - part.rows[0], adapter.adapter.rank)
                pair = _pair(part.name)
                if all(adapter.shapes.get(matrix) == want for matrix, want in zip(pair, wants, strict=True)):
                    fits.update(pair)
        if wrong := [name for name in adapter.shapes if name not in fits]:
            raise HFFolderError(f"the adapter {adapter.path} does not fit the model {path}: {', '.join(wrong[:4])} has no place there")


class MergedFolder(HFFolder):
    """A folder read with adapters merged into it, see `Merge`."""

    def __init__(self, path: Path, adapters: Sequence[Path]) -> None:
        super().__init__(path)
        try:
            self._merge = Merge(path, self.config, self.shapes, adapters)
        except BaseException:
            super().close()
            raise

    @property
    def changed(self) -> list[str]:
        """Names of the tensors that some adapter changes."""
        return [name for name in self.shapes if self._merge.touches(name)]

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """See `HFFolder.read`."""
        value = super().read(name, box)
        return self._merge.merged(name, value, full(self.shapes[name]) if box is None else box).to(value.dtype)

    def tensors(self, form: Form | None) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of all that a module of the model has, experts held in `form` (None: as the files hold them).

        Copies of a tied embedding, tables of rotary angles and layers that no part of the model reads stay behind. Raises
        HFFolderError at once when the tensors are not those of config.json.
        """
        try:
            own = ModelLayout(self.config)
        except ValueError:  # a family that only Transformers knows
            names = [name for name in self.shapes if not name.endswith(ROTARY_TABLE) and not self._is_copy(name)]
            return ((name, self.read(name)) for name in names)
        stored = own.as_stored(self.shapes)
        check_tensors(self, stored.hf_tensors(), own.megatron.tied, own.megatron.kept)
        wanted = stored if form is None else stored.in_form(form)
        parts = {} if wanted.form == stored.form else _parts_of(own.in_form("stacked"), own.in_form("single"))
        return ((name, self._in_form(name, shape, parts)) for name, shape in wanted.hf_tensors().items())

    def close(self) -> None:
        """Close the files."""
        super().close()
        self._merge.close()

    def _is_copy(self, name: str) -> bool:
        """Whether the tensor is a head that repeats the embedding."""
        embeddings = [other for other in self.shapes if other.endswith(("embed_tokens.weight", "wte.weight", "embed_in.weight"))]
        return name == "lm_head.weight" and any(self.same_bits(name, other) for other in embeddings)

    def _in_form(self, name: str, shape: Shape, parts: Mapping[str, Sequence[_Part]]) -> Tensor:
        """A tensor of a form in which the files need not hold it; `parts` of those that are stacked, by way of single ones."""
        if name in self.shapes:
            return self.read(name)
        if name in parts:
            whole: Tensor | None = None
            for part in parts[name]:
                value = self.read(part.name)
                whole = value.new_empty(shape) if whole is None else whole
                (whole if part.expert is None else whole[part.expert])[slice(*part.rows)] = value
            assert whole is not None, f"{name} has no parts"
            return whole
        at, part = next((at, part) for at, found in parts.items() for part in found if part.name == name)
        front = () if part.expert is None else ((part.expert, part.expert + 1),)
        return self.read(at, (*front, part.rows, (0, shape[-1]))).reshape(shape)


def _stacked_parts(config: Mapping[str, Any], shapes: Mapping[str, Shape]) -> dict[str, list[_Part]]:
    """The layers inside stacked tensors, by way of the Megatron parameters that both forms describe."""
    try:
        single = ModelLayout(config)
    except ValueError:
        return {}  # a family that only Transformers knows has nothing stacked here
    stored = single.as_stored(shapes)
    if stored.form == single.form:
        return {}
    return _parts_of(stored, single)


def _parts_of(stacked: ModelLayout, single: ModelLayout) -> dict[str, list[_Part]]:
    parts: dict[str, list[_Part]] = {}
    plans = (layout.rank_plan(Topology(), Coord()) for layout in (stacked, single))
    for whole, own in zip(*(plan.values() for plan in plans), strict=True):
        for inside in own.copies:
            for outer in whole.copies:
                (low, high), (first, last) = inside.dst[0], outer.dst[0]
                if outer.hf != inside.hf and first <= low and high <= last:
                    start = outer.src[-2][0] + low - first
                    expert = outer.src[0][0] if len(outer.src) == 3 else None
                    parts.setdefault(outer.hf, []).append(_Part(inside.hf, expert, (start, start + high - low)))
    return parts


def _pair(name: str) -> tuple[str, str]:
    stem = PREFIX + name.removesuffix(".weight")
    return f"{stem}.lora_A.weight", f"{stem}.lora_B.weight"


def _inside(part: _Part, box: Box) -> tuple[tuple[int | slice, ...], Range] | None:
    """Where the part lies in what was read of `box`, and which rows of the layer these are; None where they miss."""
    rows = box[-2] if len(box) > 1 else box[0]
    low, high = max(part.rows[0], rows[0]), min(part.rows[1], rows[1])
    if low >= high or (part.expert is not None and not box[0][0] <= part.expert < box[0][1]):
        return None
    at = (slice(low - rows[0], high - rows[0]),)
    return (at if part.expert is None else (part.expert - box[0][0], *at)), (low - part.rows[0], high - part.rows[0])


def _delta(adapter: AdapterFolder, name: str, rows: Range, columns: Range, wide: torch.dtype) -> Tensor:
    a_name, b_name = _pair(name)
    ranks = (0, adapter.adapter.rank)
    return (adapter.read(b_name, (rows, ranks)).to(wide) @ adapter.read(a_name, (ranks, columns)).to(wide)) * adapter.adapter.scaling
