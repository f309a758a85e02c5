"""Which module makes each part of a transformer layer: Transformer Engine's, or torch's when it is not installed."""

from __future__ import annotations

import importlib.util
from typing import Any, Literal

from megatron.core.models.common.embeddings import rope_utils
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from rlmca.models.attention import TorchCoreAttention, TorchRMSNorm
from rlmca.models.latent import LATENT_EPS, use_latent_attention
from rlmca.models.options import BuildOptions
from rlmca.models.router import Router
from rlmca.parallel import platform

Spec = Literal["local", "te"]

if not hasattr(moe_utils, "te_general_gemm"):
    # megatron-core 0.16.1 asks whether this is None, but defines it only where Transformer Engine is installed
    moe_utils.te_general_gemm = None


def choose_spec(transformer_impl: str) -> Spec:
    """`auto` takes Transformer Engine where it is installed on a CUDA machine; asking for it elsewhere is an error."""
    usable = platform.is_cuda() and importlib.util.find_spec("transformer_engine") is not None
    if transformer_impl == "transformer_engine" and not usable:
        raise ValueError(
            "transformer_impl: transformer_engine needs a CUDA device and the package transformer-engine; "
            "write `transformer_impl: local` or leave the key out"
        )
    return "te" if usable and transformer_impl != "local" else "local"


def kernel_errors(options: BuildOptions, *, packing: bool = False) -> list[str]:
    """What this machine lacks for the kernels that the options ask for, or what excludes them."""
    errors = []
    spec: Spec = "local"
    try:
        spec = choose_spec(options.transformer_impl)
    except ValueError as error:
        errors.append(str(error))
    if options.apply_rope_fusion:
        lacking = [] if platform.is_cuda() else ["a CUDA device"]
        if rope_utils.fused_apply_rotary_pos_emb is None:
            lacking.append("the package transformer-engine")
        if lacking:
            errors.append(
                f"apply_rope_fusion: true takes Transformer Engine's fused kernel, and {' and '.join(lacking)} "
                f"{'are' if len(lacking) > 1 else 'is'} missing here; write apply_rope_fusion: false, the result is the same"
            )
    if spec == "te" and not options.masked_softmax_fusion:
        errors.append(
            "masked_softmax_fusion: false is for torch's attention, and Transformer Engine's is always fused; "
            "write transformer_impl: local, or leave masked_softmax_fusion out"
        )
    if spec == "te" and not options.moe_grouped_gemm:
        errors.append("moe_grouped_gemm: false is for torch's parts; with Transformer Engine write transformer_impl: local, or true")
    if spec == "te" and packing and options.context_parallel > 1 and options.cp_comm_type == "all_gather":
        errors.append(
            "packing with context_parallel_size above 1: Transformer Engine does not gather keys of packed rows; "
            "write cp_comm_type: a2a, or transformer_impl: local"
        )
    return errors


def block_spec(config: TransformerConfig, spec: Spec, vp_stage: int | None = None) -> Any:
    """The decoder block of this pipeline stage (of its chunk `vp_stage`) under `spec`."""
    if spec == "te":
        if config.multi_latent_attention and config.layernorm_epsilon != LATENT_EPS:
            raise ValueError(
                f"rms_norm_eps is {config.layernorm_epsilon}, and Transformer Engine would use it for latent vectors, whose norms have "
                f"{LATENT_EPS}; write transformer_impl: local"
            )
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

        block = get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
        for layer in block.layer_specs:
            _take_own_router(layer)
        return block
    number, first = get_num_layers_to_build(config, vp_stage), get_transformer_layer_offset(config, vp_stage)
    mixtures = config.moe_layer_freq if isinstance(config.moe_layer_freq, list) else [0] * config.num_layers
    made = {has_experts: _local_layer(config, bool(has_experts)) for has_experts in set(mixtures)}
    specs = [made[has_experts] for has_experts in mixtures[first : first + number]]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=TorchRMSNorm)


def _local_layer(config: TransformerConfig, has_experts: bool) -> Any:
    experts = config.num_moe_experts if has_experts else None
    layer = get_gpt_layer_local_spec(
        num_experts=experts,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
        normalization="RMSNorm",
    )
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = TorchRMSNorm
    attention = parts.self_attention.submodules
    attention.core_attention = TorchCoreAttention
    if config.multi_latent_attention:
        use_latent_attention(layer)
    elif config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = TorchRMSNorm
    _take_own_router(layer)
    return layer


def _take_own_router(layer: Any) -> None:
    mlp = layer.submodules.mlp
    if mlp.module is MoELayer:
        mlp.submodules.router = Router
