"""From options to Megatron's configuration and parts: what is followed, what is refused, what ranks must not share."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import pytest
import torch

from rlmca.layouts import ModelLayout, Topology
from rlmca.models.build import BuildOptions, transformer_config
from tests.helpers.config_mutations import base_config
from tests.helpers.ranks import rank_pool

IGNORED = {
    "window_size": (4, 0),
    "softmax_type": "off-by-one",
    "softmax_scale": 3.0,
    "attention_softmax_in_fp32": False,
    "apply_query_key_layer_scaling": True,
    "apply_residual_connection_post_layernorm": True,
    "layernorm_zero_centered_gamma": True,
    "fp32_residual_connection": True,
    "glu_linear_offset": 1.0,
    "no_rope_freq": 2,
    "qk_clip": True,
    "num_moe_experts": 2,
    "moe_aux_loss_coeff": 0.1,
    "multi_latent_attention": True,
    "fp8": "e4m3",
    "cpu_offloading": True,
    "cuda_graph_impl": "local",
    "enable_cuda_graph": True,
    "mtp_num_layers": 1,
    "params_dtype": torch.float16,
    "fp16": True,
    "perform_initialization": True,
}


def config(**additional: Any) -> Any:
    return transformer_config(ModelLayout(base_config("qwen3")), BuildOptions(additional_configs=additional), Topology())


@pytest.mark.parametrize("name", IGNORED)
def test_a_field_that_the_layers_do_not_follow_is_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=rf"additional_configs: {name}: not in this version.*attention_dropout"):
        config(**{name: IGNORED[name]})


def test_a_field_at_the_value_it_has_anyway_is_no_error() -> None:
    made, plain = config(window_size=None, attention_softmax_in_fp32=True, fp8=None), config()
    assert all(getattr(made, name) == value for name, value in vars(plain).items() if not callable(value))


def test_the_fields_that_work_arrive() -> None:
    made = config(attention_dropout=0.1, hidden_dropout=0.2, embedding_init_method_std=0.5)
    assert (made.attention_dropout, made.hidden_dropout, made.embedding_init_method_std) == (0.1, 0.2, 0.5)


def attention_under_dropout(sequence_parallel: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Two calls on the same heads, as a block makes them under sequence parallelism or without it."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker
    from megatron.core.transformer.enums import AttnMaskType

    from rlmca.models.attention import TorchCoreAttention
    from rlmca.parallel import megatron

    megatron.start(tp=2, rank=int(os.environ["RANK"]), world_size=2, seed=7)
    options = BuildOptions(sequence_parallel=sequence_parallel, additional_configs={"attention_dropout": 0.5})
    made = transformer_config(ModelLayout(base_config("qwen3")), options, Topology(tp=2))
    part = TorchCoreAttention(made, 1, AttnMaskType.causal, "self").train()
    heads = torch.ones(12, 2, 2, 16)
    value = torch.arange(heads.numel(), dtype=torch.float32).reshape(heads.shape)
    with get_cuda_rng_tracker().fork() if sequence_parallel else contextlib.nullcontext():
        return part(heads, heads, value, None), part(heads, heads, value, None)


@pytest.mark.serial
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_ranks_drop_different_attention_weights(sequence_parallel: bool) -> None:
    """They hold different heads: equal masks would tie head i of one rank to head i of the other."""
    (first, again), (other, _) = rank_pool(2).run(attention_under_dropout, sequence_parallel)
    assert not torch.equal(first, again), "dropout must act"
    assert not torch.equal(first, other)
