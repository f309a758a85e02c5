"""Low-rank adapters beside Megatron's linear layers, under tensor, sequence and expert parallelism.

Shape legend: X leading axes of activations, I inputs and O outputs of a layer on this rank, R rank, K ranks of all
branches of a layer one after the other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, get_cuda_rng_tracker
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor, nn

from rlmca.layouts.adapters import Branches, branches_of
from rlmca.layouts.plan import ParamPlan
from rlmca.models.latent import WholeLinear
from rlmca.models.options import LoraOptions

NAME = "adapters"
"""Of the module that `attach` adds to a linear layer."""


class Branch(nn.Module):
    """The matrices of one Hugging Face linear layer: A [R, I] and B [O, R], this rank's parts."""

    def __init__(self, a_shape: tuple[int, ...], b_shape: tuple[int, ...], like: Tensor) -> None:
        super().__init__()
        self.lora_A = nn.Parameter(torch.zeros(a_shape, dtype=like.dtype, device=like.device))
        self.lora_B = nn.Parameter(torch.zeros(b_shape, dtype=like.dtype, device=like.device))

    def forward(self) -> tuple[Tensor, Tensor]:
        """Both matrices. A call and no look at attributes: with `overlap_param_gather` DDP waits for the weights of a module when
        that is called."""
        return self.lora_A, self.lora_B


class Adapters(nn.ModuleDict):
    """The branches of one Megatron linear layer. `forward(input)` is what they add to its output.

    Where collectives stand: A of a layer split by rows sees a part of the inputs, so its outputs are summed; the outputs
    of A of one split by columns are copies, whose gradients from each rank's part of B are summed. With sequence
    parallelism A (or B, by rows; both, of a layer that every rank holds whole) sees a part of the tokens: Megatron sums the
    gradients of parameters that are marked `sequence_parallel`. Experts leave sums to the token dispatcher; what each rank
    holds whole gets its gradient summed.
    """

    def __init__(self, linear: Any, branches: Branches, options: LoraOptions) -> None:
        super().__init__({b.leaf: Branch(b.a_shape, b.b_shape, linear.weight) for b in branches.branches})
        self.scaling, self.dropout, self.enabled = options.scaling, options.dropout, True
        whole = isinstance(linear, WholeLinear)
        self._columns = isinstance(linear, ColumnParallelLinear)
        self._group = None if whole else linear.tp_group
        self._split = self._group is not None and self._group.size() > 1
        self._expert = not whole and bool(linear.is_expert)
        self._sequence = bool(linear.config.sequence_parallel) and not self._expert and (self._split or whole)
        self._outputs = linear.weight.shape[0]
        rows = None if branches.rows is None else torch.tensor(branches.rows, device=linear.weight.device)
        self.register_buffer("_rows", rows, persistent=False)
        if self._sequence:
            for branch in self._branches():
                shared = branch.parameters() if whole else [branch.lora_A if self._columns else branch.lora_B]
                for matrix in shared:
                    matrix.sequence_parallel = True  # type: ignore[attr-defined]

    def forward(self, input_XI: Tensor) -> Tensor:
        a_s, b_s = map(list, zip(*(branch() for branch in self._branches()), strict=True))
        if self._split and self._expert:
            whole = a_s if self._columns else b_s
            whole[:] = [copy_to_tensor_model_parallel_region(matrix, group=self._group) for matrix in whole]
        low_XK = torch.cat([F.linear(self._dropped(input_XI), a) for a in a_s], dim=-1)
        if self._split and not self._expert:
            low_XK = self._exchanged(low_XK)
        parts = [F.linear(low, b) for low, b in zip(low_XK.split([a.shape[0] for a in a_s], dim=-1), b_s, strict=True)]
        out_XO = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        rows: Tensor | None = self._rows  # type: ignore[assignment]
        if rows is not None:
            out_XO = out_XO.new_zeros(*out_XO.shape[:-1], self._outputs).index_copy(-1, rows, out_XO)
        return out_XO * self.scaling

    def delta(self, at: tuple[slice, ...]) -> Tensor | None:
        """What merging adds to the box `at` of the layer's weight on this rank, in the wider type than the weight's;
        None where no branch has rows. Each entry is one sum over R, so how a weight is cut changes no number."""
        rows_O = self._owner_rows()[at[0]]
        out, start = None, 0
        for branch in self._branches():
            end = start + branch.lora_B.shape[0]
            here_O = (rows_O >= start) & (rows_O < end)
            if bool(here_O.any()):
                wide = torch.float64 if branch.lora_A.dtype in (torch.float32, torch.float64) else torch.float32
                b_OR, a_RI = branch.lora_B.detach()[rows_O[here_O] - start].to(wide), branch.lora_A.detach()[:, at[1]].to(wide)
                if out is None:
                    out = torch.zeros(len(rows_O), a_RI.shape[1], dtype=wide, device=a_RI.device)
                out[here_O] = (b_OR @ a_RI) * self.scaling
            start = end
        return out

    def _branches(self) -> list[Branch]:
        return list(self.values())  # type: ignore[arg-type]

    def _owner_rows(self) -> Tensor:
        """For each row of the weight the row of the branches' B that belongs to it, -1 where there is none."""
        rows: Tensor | None = self._rows  # type: ignore[assignment]
        device = self._branches()[0].lora_A.device
        if rows is None:
            return torch.arange(self._outputs, device=device)
        owner_O = torch.full((self._outputs,), -1, device=device)
        owner_O[rows] = torch.arange(len(rows), device=device)
        return owner_O

    def _exchanged(self, low_XK: Tensor) -> Tensor:
        if self._columns:
            if self._sequence:
                return gather_from_sequence_parallel_region(low_XK, tensor_parallel_output_grad=True, group=self._group)
            return copy_to_tensor_model_parallel_region(low_XK, group=self._group)
        if self._sequence:
            return reduce_scatter_to_sequence_parallel_region(low_XK, group=self._group)
        return reduce_from_tensor_model_parallel_region(low_XK, group=self._group)

    def _dropped(self, input_XI: Tensor) -> Tensor:
        if not (self.training and self.dropout):
            return input_XI
        # Inputs that tensor-parallel ranks hold as copies must lose the same entries on all of them; elsewhere each
        # rank draws from a state of its own, so that the common one stays in step.
        common = (self._columns or self._group is None) and not self._sequence and not self._expert
        with contextlib.nullcontext() if common else get_cuda_rng_tracker().fork():
            return F.dropout(input_XI, self.dropout)


def attach(model: nn.Module, weights: Mapping[str, ParamPlan], plan: Mapping[str, ParamPlan], options: LoraOptions) -> dict[str, Adapters]:
    """Give every linear layer that has branches in `plan` its adapters; {name of the layer's weight: its adapters}.

    `weights` and `plan` are the rank plans of the model and of its adapters, under the names that parameters have in
    `model`. The matrices are zero: fill them before use.
    """
    attached: dict[str, Adapters] = {}
    for path, linear in list(model.named_modules()):
        name = f"{path}.weight"
        if not isinstance(linear, (ColumnParallelLinear, RowParallelLinear, WholeLinear)) or name not in weights:
            continue
        if (branches := branches_of(name, weights[name], plan)) is not None:
            adapters = Adapters(linear, branches, options)
            linear.add_module(NAME, adapters)
            linear.register_forward_hook(_add)
            attached[name] = adapters
    return attached


def _add(linear: nn.Module, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor | None]:
    adapters: Any = linear.adapters
    return (output[0] + adapters(inputs[0]), output[1]) if adapters.enabled else output


@contextlib.contextmanager
def without(attached: Sequence[Adapters]) -> Iterator[None]:
    """The model as its base inside the block."""
    before = [adapters.enabled for adapters in attached]
    for adapters in attached:
        adapters.enabled = False
    try:
        yield
    finally:
        for adapters, enabled in zip(attached, before, strict=True):
            adapters.enabled = enabled


def require_input_gradients(model: Any) -> None:
    """Make what the embedding gives need a gradient, though its weight does not.

    Megatron's recomputation gives the parameters inside a recomputed part no gradient at all when its inputs need none, and
    without an error; the backward pass of a pipeline stage without trainable weights needs it too.
    """
    if (embedding := getattr(model, "embedding", None)) is not None:
        embedding.register_forward_hook(lambda module, inputs, output: output.requires_grad_() if torch.is_grad_enabled() else output)
