"""What is computed and compared: the batch, the losses, and a layout's numbers on the ranks of a pool.

Shape legend: B rows, T tokens of the padded row.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from torch import Tensor
from torch.overrides import TorchFunctionMode

from rlmca.algorithms.losses import PolicyLoss, PolicyOptions, SftLoss
from rlmca.types import Batch, batch_of_examples
from tests.helpers.engine import Layout, loss_and_gradients, make_engine
from tests.invariance.compare import CHOICES, Numbers
from tests.invariance.table import ALL_ROWS, ALSO_OF_EXPERTS, LAYERS

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_tied": {"num_hidden_layers": LAYERS, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8},
    "qwen2": {"num_hidden_layers": LAYERS, "num_attention_heads": 8, "num_key_value_heads": 4},
    "llama": {"num_hidden_layers": LAYERS, "num_attention_heads": 8, "num_key_value_heads": 4},
}
"""Family of `helpers.models` -> sizes: heads for four tensor ranks and, exchanged, for eight context ranks; an odd vocabulary."""
MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "num_hidden_layers": LAYERS, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8, "mlp_only_layers": [1, 6],
        "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "seed": 42,
    },
    "qwen2_moe": {
        "num_hidden_layers": LAYERS, "num_attention_heads": 8, "num_key_value_heads": 4, "mlp_only_layers": [1, 6],
        "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24, "seed": 54,
    },
    "mixtral": {"num_hidden_layers": LAYERS, "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 16, "seed": 141},
    "deepseek_v3": {
        "num_hidden_layers": LAYERS, "num_attention_heads": 8, "num_key_value_heads": 8, "moe_intermediate_size": 16,
        "n_shared_experts": 1, "first_k_dense_replace": 2, "seed": 65,
    },
}  # fmt: skip
"""Families with experts, whose layouts are those of `table.EXPERTS`. Choices between experts have margins that rounding leaves alone."""
EXPERTS = 8
BALANCE = ALSO_OF_EXPERTS["balance"]
VOCABULARY = 67
TEMPERATURE, ENTROPY_WEIGHT = 0.8, 0.1
LOSSES = {
    "sft": SftLoss(),
    "policy": PolicyLoss(PolicyOptions(temperature=TEMPERATURE, entropy_coef=ENTROPY_WEIGHT)),
}
"""Mean over targets; and mean over rows of means, with the entropy (a gradient of its own through the head) at a temperature."""


def make_batch() -> Batch:
    """Rows of 1 to 16 tokens; the first and the fifth have no target, as a rank's whole share has in some layouts."""
    draw = torch.Generator().manual_seed(3)
    lengths = [1, 13, 2, 16, 5, 9, 3, 7, 11]
    ids = [torch.randint(0, VOCABULARY, (n,), generator=draw).tolist() for n in lengths]
    masks = [[row != 4 and bool(torch.rand((), generator=draw) < 0.7) for _ in range(n)] for row, n in enumerate(lengths)]
    masks[2][1] = True
    batch = batch_of_examples(ids, masks)
    assert len(batch) == ALL_ROWS
    return batch.replace(advantage_BT=torch.randn(len(batch), 1, generator=draw).expand(batch.ids_BT.shape).contiguous())


def numbers_on_rank(folder: Path, layout: Layout, dtype: torch.dtype) -> Numbers | None:
    """The numbers of the batch under a layout; rank 0 answers."""
    from rlmca.workers import SpmdGroup

    batch = make_batch()
    with _any_type_of_weights():
        engine = make_engine(folder, _of_type(layout, dtype))
    if dtype == torch.float64:
        for chunk in engine.chunks:
            _angles_without_float32_islands(chunk)
    with _routers_without_float32_islands(dtype) as choices:
        out = SpmdGroup(engine, engine.parallel).log_probs(batch, entropy=True)
        assert out.entropy_BT is not None
        numbers = {"log-prob": out.logp_BT, "entropy": out.entropy_BT}
        if engine.layout.megatron.num_experts:
            numbers[CHOICES] = _over_ranks(choices)
        for kind, loss in LOSSES.items():
            value, gradients = loss_and_gradients(engine, batch, loss)
            numbers[f"{kind}: loss"] = torch.tensor(value, dtype=torch.float64)
            numbers.update({f"{kind}: gradient of {name}": gradient for name, gradient in gradients.items()})
        numbers.update({name: torch.tensor(value, dtype=torch.float64) for name, value in engine.router_losses.metrics().items()})
    return numbers if engine.parallel.rank == 0 else None


class WithoutFloat32(TorchFunctionMode):
    """What casts float64 to float32 leaves it as it is."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if func is Tensor.float or (func is Tensor.type and torch.float32 in args):
                return args[0]
            if kwargs.get("dtype") == torch.float32:
                kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


def _angles_without_float32_islands(model: torch.nn.Module) -> None:
    """See `reference.without_float32_islands`."""
    for module in model.modules():
        if isinstance(module, YarnRotaryEmbedding):
            module.get_emb = _yarn_in_float64(module)  # type: ignore[method-assign]
        elif isinstance(module, RotaryEmbedding):
            module.inv_freq = module.inv_freq.double()


def _yarn_in_float64(module: YarnRotaryEmbedding) -> Any:
    angles, scale = module.get_emb(2)
    inv_freq = angles[1, 0, 0].double()  # those of position 1

    def get_emb(max_seq_len: int, offset: int = 0) -> tuple[Tensor, float]:
        return torch.outer(torch.arange(max_seq_len, dtype=torch.float64) + offset, inv_freq)[:, None, None, :], scale

    return get_emb


@contextlib.contextmanager
def _routers_without_float32_islands(dtype: torch.dtype) -> Iterator[Tensor]:
    """Megatron's choice of experts in the type of its logits; yields what will be the number of choices outside of training."""
    from rlmca.models import router

    choices = torch.zeros(LAYERS, EXPERTS, dtype=torch.float64)
    choose, routing = router.topk_routing_with_score_function, router.Router.routing

    def choose_in_float64(*args: Any, **kwargs: Any) -> Any:
        with WithoutFloat32() if dtype == torch.float64 else contextlib.nullcontext():
            return choose(*args, **kwargs)

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        weight_XE, chosen_XE = routing(self, *args, **kwargs)
        if not self.training:
            choices[self.layer_number - 1] += (chosen_XE & (self.sequence_X >= 0)[:, None]).sum(0)
        return weight_XE, chosen_XE

    with (
        mock.patch.object(router, "topk_routing_with_score_function", choose_in_float64),
        mock.patch.object(router.Router, "routing", counted),
    ):
        yield choices


def _over_ranks(choices: Tensor) -> Tensor:
    whole = choices.clone()
    if dist.get_world_size() > 1:
        dist.all_reduce(whole)
    return whole


def _of_type(layout: Layout, dtype: torch.dtype) -> Layout:
    """With weights of this type, and gradients too: by default they are summed up in float32."""
    return dataclasses.replace(
        layout,
        options={**layout.options, "dtype": dtype, "moe_router_dtype": "fp64" if dtype == torch.float64 else "fp32"},
        data_parallel={**layout.data_parallel, "accumulate_allreduce_grads_in_fp32": dtype == torch.float32},
    )


@contextlib.contextmanager
def _any_type_of_weights() -> Iterator[None]:
    """Engines whose optimizer holds all states.

    Megatron's distributed optimizer takes no float64. Gradients do not depend on it: that each rank keeps its share of their
    sum is the business of DDP and of its own option, which stays as the layout says.
    """
    from rlmca.engines import megatron

    build = megatron.build_optimizer

    def build_whole(models: Any, options: Any, data_parallel: Any, dtype: torch.dtype, *more: Any) -> Any:
        whole = dataclasses.replace(data_parallel, use_distributed_optimizer=False, overlap_param_gather=False)
        return build(models, options, whole if dtype == torch.float64 else data_parallel, dtype, *more)

    with mock.patch.object(megatron, "build_optimizer", build_whole):
        yield
