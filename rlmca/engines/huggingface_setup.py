"""From a run's configuration to the Hugging Face engine's options, and what would stop it, found without loading weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlmca.config import RunConfig
from rlmca.engines.budget import micro_batch_tokens
from rlmca.engines.finetuning_setup import freeze_options, lora_options
from rlmca.engines.loss_scale import loss_scale_options
from rlmca.engines.options import HuggingFaceOptions, OptimizerOptions

ATTENTION = {"auto": None, "disabled": "eager", "sdpa": "sdpa", "fa2": "flash_attention_2", "fa3": "flash_attention_3"}
"""LLaMA-Factory's names of attention kernels -> Transformers' `attn_implementation`."""


def huggingface_options(cfg: RunConfig) -> HuggingFaceOptions:
    """The engine's part of a run configuration.

    In RL the log-probs of the old policy run in the update's own micro-batches, so that the first ratio is exactly 1.
    """
    own, train = cfg.huggingface, cfg.train
    return HuggingFaceOptions(
        bf16=train.bf16,
        loss_scale=loss_scale_options(train),
        attention=ATTENTION[cfg.model.flash_attn],
        gradient_checkpointing=own.gradient_checkpointing,
        use_reentrant=own.gradient_checkpointing_kwargs.get("use_reentrant", False),
        find_unused_parameters=bool(own.ddp_find_unused_parameters),
        bucket_cap_mb=own.ddp_bucket_cap_mb,
        trust_remote_code=cfg.model.trust_remote_code,
        optimizer=OptimizerOptions(
            weight_decay=train.weight_decay,
            adam_beta1=train.adam_beta1,
            adam_beta2=train.adam_beta2,
            adam_epsilon=train.adam_epsilon,
            max_grad_norm=train.max_grad_norm,
        ),
        lora=lora_options(cfg),
        freeze=freeze_options(cfg),
        micro_batch_size=train.per_device_train_batch_size,
        eval_batch_size=train.per_device_train_batch_size if cfg.stage == "grpo" else train.per_device_eval_batch_size,
        packing=cfg.data.packs,
        max_tokens_per_microbatch=micro_batch_tokens(cfg),
        save_optimizer=not train.save_only_model,
    )


def setup_errors(cfg: RunConfig, hf_config: Mapping[str, Any] | None) -> list[str]:
    """What this machine, or the model's config.json where it is known, does not let the engine do."""
    errors = attention_errors(cfg.model.flash_attn)
    return errors if hf_config is None else errors + model_errors(hf_config, trust_remote_code=cfg.model.trust_remote_code)


def attention_errors(flash_attn: str) -> list[str]:
    """Empty when Transformers says that it can run this kernel here."""
    if flash_attn not in ("fa2", "fa3"):
        return []
    from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

    if is_flash_attn_2_available() if flash_attn == "fa2" else is_flash_attn_3_available():
        return []
    package = "flash-attn" if flash_attn == "fa2" else "FlashAttention 3"
    return [f"flash_attn: {flash_attn} needs the package {package} and a CUDA device, which Transformers does not find; write sdpa"]


def model_errors(hf_config: Mapping[str, Any], *, trust_remote_code: bool) -> list[str]:
    """Why a model with this config.json cannot be trained."""
    from transformers import __version__
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kind, code = hf_config.get("model_type"), "AutoModelForCausalLM" in (hf_config.get("auto_map") or {})
    errors = []
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not (code and trust_remote_code):
        fix = "write trust_remote_code: true to run the code that comes with it" if code else "another model_type, or another version"
        errors.append(f"model_name_or_path: Transformers {__version__} has no causal language model of model_type {kind!r}; {fix}")
    if get_checkpoint_conversion_mapping(str(kind)) is not None:
        errors.append(
            f"model_name_or_path: Transformers renames or fuses weights of {kind} models while it loads them, and this engine could not "
            "write them back under the names of the files; set USE_MCA=1 where the family is one of Megatron's, or use a dense model"
        )
    if hf_config.get("quantization_config"):
        errors.append("model_name_or_path: quantization_config in config.json: training quantised weights is not in this version")
    if hf_config.get("output_router_logits"):
        errors.append(
            "model_name_or_path: output_router_logits is true in config.json, but the router's auxiliary loss is not in this version; "
            "write output_router_logits: false there to train without it"
        )
    return errors
