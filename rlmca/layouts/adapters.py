"""The layout of low-rank adapters, derived from the rows of a family: no family says anything about adapters.

Every Hugging Face linear layer has its own pair of matrices, as in PEFT, also where Megatron has one parameter for several of
them (q, k and v; gate and up). A [rank, in] is cut as the columns of the layer's weight, B [out, rank] as its rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rlmca.layouts.boxes import Shape
from rlmca.layouts.plan import Copy, ModelLayout, ParamPlan
from rlmca.layouts.rows import REPLICATED, ROW, Row

PREFIX = "base_model.model."
"""Of every tensor in PEFT's files."""
ALL = "all"
BRANCHES = ".adapters."
"""Part of the name of every adapter parameter in a Megatron module."""


class UnknownTarget(ValueError):
    """A name in lora_target that no linear layer of the model has."""


@dataclass(frozen=True)
class Linear:
    """A Hugging Face linear layer inside a row: `name` is a template as in `Row.hf`, without ".weight"."""

    row: Row
    name: str
    shape: tuple[str, ...]

    @property
    def leaf(self) -> str:
        """Last part of the name, which PEFT calls the target module."""
        return self.name.rsplit(".", 1)[1]

    def matches(self, target: str) -> bool:
        """Whether a name in lora_target means this layer (PEFT: equal, or the end of its dotted name)."""
        return target == ALL or f".{self.name}".endswith(f".{target}")


def linears(rows: Sequence[Row]) -> list[Linear]:
    """The linear layers that can have an adapter: all but the head, the embedding and routers."""
    return [
        Linear(row, name.removesuffix(".weight"), shape)
        for row in rows
        if row.at == "layer" and ".linear_" in row.megatron and row.megatron.endswith(".weight")
        for name, shape in row.hf.items()
        if len(shape) == 2
    ]


class AdapterLayout(ModelLayout):
    """Where the matrices of the layers named by `targets` lie. Tensor names are PEFT's, parameter names those of `models.lora`.

    Raises UnknownTarget, with the names that exist.
    """

    def __init__(self, base: ModelLayout, targets: Sequence[str], rank: int) -> None:
        super().__init__(base.hf_config, base.spec)
        self.base, self.targets, self.rank = base, tuple(targets), rank
        known = linears(base.rows)
        if unknown := [target for target in targets if not any(linear.matches(target) for linear in known)]:
            raise UnknownTarget(
                f"lora_target: {', '.join(unknown)} is no linear layer of {self.family.model_type}; "
                f"write all, or some of {', '.join(dict.fromkeys(linear.leaf for linear in known))}"
            )
        self.linears = [linear for linear in known if any(linear.matches(target) for target in targets)]
        self.rows = [row for linear in self.linears for row in _pair(linear)]
        self._sizes = {**base.megatron.sizes(), "rank": rank}

    @property
    def target_modules(self) -> list[str]:
        """The targets as PEFT's configuration names them: never `all`, which there includes other layers."""
        return sorted({linear.leaf for linear in self.linears} if ALL in self.targets else self.targets)


def _pair(linear: Linear) -> tuple[Row, Row]:
    """The rows of A and B."""
    row, stem = linear.row, linear.row.megatron.removesuffix(".weight") + BRANCHES + linear.leaf
    out, into = linear.shape
    a = replace(
        row,
        megatron=f"{stem}.lora_A",
        te=None,
        stacked=None,
        hf={f"{PREFIX}{linear.name}.lora_A.weight": ("rank", into)},
        layout=ROW if row.layout.axis == 1 else REPLICATED,
    )
    b = replace(
        row,
        megatron=f"{stem}.lora_B",
        te=None,
        stacked=None,
        hf={f"{PREFIX}{linear.name}.lora_B.weight": (out, "rank")},
        layout=row.layout if row.layout.axis == 0 else REPLICATED,
    )
    return a, b


@dataclass(frozen=True)
class Branch:
    """One adapter of a parameter: the shapes of this rank's parts of A and B."""

    leaf: str
    a_shape: Shape
    b_shape: Shape


@dataclass(frozen=True)
class Branches:
    """The adapters of one Megatron parameter on a rank. Row j of the branches' B, one below the other, belongs to row
    `rows[j]` of the parameter; None: row j belongs to row j, and they are all of them."""

    branches: tuple[Branch, ...]
    rows: tuple[int, ...] | None


def branches_of(name: str, weight: ParamPlan, plan: Mapping[str, ParamPlan]) -> Branches | None:
    """The adapters of the parameter `name`, whose plan is `weight`, among those in `plan`; None without any."""
    stem = name.removesuffix(".weight") + BRANCHES
    leaves = [other[len(stem) : -len(".lora_A")] for other in plan if other.startswith(stem) and other.endswith(".lora_A")]
    if not leaves:
        return None
    rows: list[int] = []
    for leaf in leaves:
        b = plan[f"{stem}{leaf}.lora_B"]
        own = [-1] * b.shape[0]
        for copy in b.copies:
            for inside in weight.copies:
                if _linear(inside) == _linear(copy):
                    _match(copy, inside, own)
        rows += own
    found = tuple(Branch(leaf, plan[f"{stem}{leaf}.lora_A"].shape, plan[f"{stem}{leaf}.lora_B"].shape) for leaf in leaves)
    return Branches(found, None if rows == list(range(weight.shape[0])) else tuple(rows))


def _linear(copy: Copy) -> str:
    return copy.hf.removeprefix(PREFIX).removesuffix(".weight").removesuffix(".lora_B")


def _match(b: Copy, weight: Copy, rows: list[int]) -> None:
    """Note for the rows that two copies have in common where the parameter has them."""
    (b_from, b_to), (w_from, w_to) = b.src[0], weight.src[0]
    low, high = max(b_from, w_from), min(b_to, w_to)
    if low < high:
        at, to = b.dst[0][0] + low - b_from, weight.dst[0][0] + low - w_from
        rows[at : at + high - low] = range(to, to + high - low)
