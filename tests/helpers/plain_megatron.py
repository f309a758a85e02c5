"""GPTModels of plain Megatron-Core, written by hand from Hugging Face configs: nothing of this package says what is in them.

What a CPU needs comes from `rlmca.parallel`, process groups too. Everything here runs on the ranks of a pool.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def start(tp: int = 1, pp: int = 1, ep: int = 1, etp: int | None = None) -> None:
    """Process groups of this rank of a pool, whose size they must fit."""
    from rlmca.parallel import megatron

    world = int(os.environ.get("WORLD_SIZE", 1))
    megatron.start(tp=tp, pp=pp, ep=ep, etp=etp, rank=int(os.environ.get("RANK", 0)), world_size=world)


def mixture_layers(hf: dict[str, Any]) -> list[int]:
    """1 for every layer with experts."""
    layers = range(hf["num_hidden_layers"])
    if hf["model_type"] == "deepseek_v3":
        return [int(layer >= hf["first_k_dense_replace"]) for layer in layers]
    if hf["model_type"] == "mixtral":
        return [1 for _ in layers]
    return [int("moe" in hf["model_type"] and layer not in hf["mlp_only_layers"]) for layer in layers]


def experts_config(hf: dict[str, Any]) -> dict[str, Any]:
    """Fields of a mixture. A user whose layers all have experts leaves moe_layer_freq alone."""
    mixture, kind = mixture_layers(hf), hf["model_type"]
    number = hf.get("num_experts") or hf.get("num_local_experts") or hf["n_routed_experts"]
    own: dict[str, Any] = {
        "num_moe_experts": number,
        "moe_router_topk": hf["num_experts_per_tok"],
        "moe_ffn_hidden_size": hf.get("moe_intermediate_size", hf["intermediate_size"]),
        "moe_layer_freq": 1 if all(mixture) else mixture,
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_pre_softmax": kind == "qwen2_moe",  # its test model divides nothing by the sum of the chosen weights
    }
    if kind == "qwen2_moe":
        own |= {"moe_shared_expert_intermediate_size": hf["shared_expert_intermediate_size"], "moe_shared_expert_gate": True}
    if kind == "deepseek_v3":
        own |= {
            "moe_shared_expert_intermediate_size": hf["n_shared_experts"] * hf["moe_intermediate_size"],
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_num_groups": hf["n_group"],
            "moe_router_group_topk": hf["topk_group"],
            "moe_router_topk_scaling_factor": hf["routed_scaling_factor"],
            "moe_router_dtype": "fp32",
        }
    return own


def latent_config(hf: dict[str, Any]) -> dict[str, Any]:
    """Fields of multi-latent attention with YaRN."""
    rope = hf["rope_parameters"]
    names = ("original_max_position_embeddings", "mscale", "mscale_all_dim")
    return {
        "multi_latent_attention": True,
        "q_lora_rank": hf["q_lora_rank"],
        "kv_lora_rank": hf["kv_lora_rank"],
        "qk_head_dim": hf["qk_nope_head_dim"],
        "qk_pos_emb_head_dim": hf["qk_rope_head_dim"],
        "v_head_dim": hf["v_head_dim"],
        "qk_layernorm": True,
        "rope_type": "yarn",
        "rotary_base": rope["rope_theta"],
        "rotary_scaling_factor": rope["factor"],
        **{name: rope[name] for name in names},
    }


class LatentCore(torch.nn.Module):
    """Attention of heads whose values are not as long as their keys: 0.16.1's local core does not take them."""

    def __init__(self, config: Any, *args: Any, softmax_scale: float | None = None, **kwargs: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(self, q_TBHD: Tensor, k_TBHD: Tensor, v_TBHD: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q_TBHD, k_TBHD, v_TBHD))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        return out.permute(2, 0, 1, 3).flatten(2)

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {}


def plain_model(hf: dict[str, Any], tp: int = 1, pp: int = 1, ep: int = 1, etp: int | None = None, dtype: Any = torch.float32) -> Any:
    """This rank's GPTModel with Megatron's local layers, all of it NaN: what loading forgets stays visible."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    moe_utils.te_general_gemm = getattr(moe_utils, "te_general_gemm", None)  # 0.16.1 asks for both without Transformer Engine
    multi_latent_attention.HAVE_TE = False
    start(tp, pp, ep, etp)
    kind, mixture, latent = hf["model_type"], any(mixture_layers(hf)), hf["model_type"] == "deepseek_v3"
    bias = bool(hf.get("attention_bias")) and kind == "llama"
    config = (MLATransformerConfig if latent else TransformerConfig)(
        num_layers=hf["num_hidden_layers"],
        hidden_size=hf["hidden_size"],
        ffn_hidden_size=hf["intermediate_size"],
        num_attention_heads=hf["num_attention_heads"],
        num_query_groups=hf["num_key_value_heads"],
        kv_channels=hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"],
        layernorm_epsilon=hf["rms_norm_eps"],
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=bias,
        add_qkv_bias=kind in ("qwen2", "qwen2_moe"),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        use_cpu_initialization=True,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp or tp,
        **({"qk_layernorm": kind in ("qwen3", "qwen3_moe")} if not latent else latent_config(hf)),
        **(experts_config(hf) if mixture else {}),
    )
    if mixture and isinstance(config.moe_layer_freq, list):
        spec: Any = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    else:
        spec = get_gpt_layer_local_spec(
            num_experts=config.num_moe_experts,
            qk_layernorm=config.qk_layernorm,
            multi_latent_attention=latent,
            normalization="RMSNorm",
        )
    if latent:
        for layer in spec.layer_specs if hasattr(spec, "layer_specs") else [spec]:
            layer.submodules.self_attention.submodules.core_attention = LatentCore
    unit = 4 * tp
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=-(-hf["vocab_size"] // unit) * unit,
        max_sequence_length=hf["max_position_embeddings"],
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        parallel_output=False,
        share_embeddings_and_output_weights=bool(hf.get("tie_word_embeddings")),
        position_embedding_type="rope",
        rotary_base=hf["rope_parameters"]["rope_theta"],
    ).eval()
    with torch.no_grad():
        for tensor in (*model.parameters(), *(b for n, b in model.named_buffers() if n.endswith("expert_bias"))):
            tensor.fill_(float("nan"))
    return model


def load_plain(folder: Path, model: Any, strict: str = "raise_unexpected") -> None:
    """Megatron's own strict loading of a distributed checkpoint."""
    from megatron.core import dist_checkpointing

    state = model.sharded_state_dict()
    loaded = dist_checkpointing.load(state, str(folder), strict=strict)
    model.load_state_dict(loaded, strict=True)


def logits_BTV(model: Any, ids_BT: Tensor, vocab: int) -> Tensor | None:
    """Logits of the real vocabulary; None on ranks before the last stage."""
    from megatron.core import parallel_state

    B, T = ids_BT.shape
    if not parallel_state.is_pipeline_first_stage():
        hidden = torch.empty(T, B, model.config.hidden_size)
        dist.recv(hidden, parallel_state.get_pipeline_model_parallel_prev_rank())
        model.set_input_tensor(hidden)
    mask = torch.ones(T, T, dtype=torch.bool).triu(1)[None, None]
    with torch.no_grad():
        out = model(ids_BT, torch.arange(T)[None].expand(B, T), mask)
    if parallel_state.is_pipeline_last_stage():
        return out[..., :vocab].float()
    dist.send(out.contiguous(), parallel_state.get_pipeline_model_parallel_next_rank())
    return None


def plain_logits(folder: Path, hf: dict[str, Any], ids_BT: Tensor, sizes: dict[str, int]) -> Tensor | None:
    """Load a folder into a fresh plain model under these sizes and compute; runs on every rank."""
    model = plain_model(hf, **sizes)
    load_plain(folder, model)
    return logits_BTV(model, ids_BT, hf["vocab_size"])


def config_of(folder: Path) -> dict[str, Any]:
    """config.json."""
    return dict(json.loads((folder / "config.json").read_text()))


def save_plain(folder: Path, out: Path, hf: dict[str, Any], sizes: dict[str, int], metadata: dict[str, Any]) -> None:
    """Load a folder into a plain model under these sizes and let Megatron save it; runs on every rank."""
    from megatron.core import dist_checkpointing, parallel_state

    model = plain_model(hf, **sizes)
    load_plain(folder, model)
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    dist_checkpointing.save(model.sharded_state_dict(metadata={**metadata, "dp_cp_group": group}), str(out), ("torch_dist", 1))
