"""LLaMA-Factory's own options that are not honoured, by meaning."""

from __future__ import annotations

from collections.abc import Mapping

from rlmca.config.foreign.entry import Foreign, always, no_effect, refuse

_LATER = "not in this version"

TOKENIZER: Mapping[str, Foreign] = {
    **always("use_fast_tokenizer", "slow tokenizers are not in this version", "write true"),
    **refuse(
        "add_tokens add_special_tokens new_special_tokens_config resize_vocab split_special_tokens", f"changing the vocabulary is {_LATER}"
    ),
    **refuse("init_special_tokens", f"changing the vocabulary is {_LATER}", "", "noise_init"),
    **refuse("model_max_length block_diag_attn", "set by the program that knows it, not by a user", "write cutoff_len for the row length"),
}
LOADING: Mapping[str, Foreign] = {
    **no_effect("low_cpu_mem_usage", "weights are read tensor by tensor always"),
    **refuse(
        "device_map",
        "every rank places its own part of the model: the Hugging Face engine all of it, Megatron what the parallel sizes say",
        "leave it out; to split a model set USE_MCA=1 and write tensor_model_parallel_size or pipeline_model_parallel_size",
        "auto",
    ),
    **refuse("offload_folder", f"offloading to disk is {_LATER}", "", "offload"),
    **refuse("compute_dtype", "set by bf16 and fp16", "write bf16: true or fp16: true, or leave it out for float32"),
    **refuse("infer_dtype", f"the dtype of rollouts follows bf16 and fp16; another one is {_LATER}", "write auto", "auto"),
    **refuse("infer_backend", f"other backends are {_LATER}", "write huggingface", "huggingface", "hf"),
    **always("use_kv_cache", "replies are always written with a KV cache", "write true"),
    **refuse("ms_hub_token om_hub_token", f"ModelScope and Modelers hubs are {_LATER}", "use the Hugging Face hub or a local folder"),
    **refuse("print_param_status", f"{_LATER}", "rlmca-cli train ... --dry_run prints the parameters of each rank"),
}
ARCHITECTURE: Mapping[str, Foreign] = {
    **refuse("rope_scaling", f"changing the model's RoPE is {_LATER}", "write it into the model's config.json"),
    **refuse("shift_attn mixture_of_depths", f"changing the model's attention is {_LATER}"),
    **refuse("moe_aux_loss_coef", "the Hugging Face engine trains no mixture of experts", "with USE_MCA=1 write moe_aux_loss_coeff", 0),
}
KERNELS: Mapping[str, Foreign] = {
    **refuse("use_unsloth use_unsloth_gc", f"Unsloth's kernels are {_LATER}", "leave it out: they change speed and memory alone"),
    **refuse("enable_liger_kernel", f"Liger's kernels are {_LATER}", "leave it out: they change speed and memory alone"),
    **refuse("use_v1_kernels", f"LLaMA-Factory's own kernels are {_LATER}", "leave it out: they change speed and memory alone"),
    **no_effect(
        "disable_gradient_checkpointing",
        "activations are recomputed only with gradient_checkpointing (Hugging Face engine) or recompute_granularity (Megatron)",
    ),
    **no_effect(
        "use_reentrant_gc",
        "both ways recompute the same; on the Hugging Face engine gradient_checkpointing_kwargs: {use_reentrant: ...} chooses one",
    ),
    **no_effect("upcast_layernorm upcast_lmhead_output", "norms and log-probabilities are computed in float32 always"),
}
QUANTIZATION: Mapping[str, Foreign] = {
    **refuse("quantization_bit quantization_device_map", f"quantised training is {_LATER}", "leave it out"),
    **refuse("quantization_method", f"quantised training is {_LATER}", "leave it out", "bnb"),
    **refuse("quantization_type", f"quantised training is {_LATER}", "leave it out", "nf4"),
    **refuse("double_quantization", f"quantised training is {_LATER}", "leave it out", True),
}
MEDIA: Mapping[str, Foreign] = {
    **refuse(
        "image_max_pixels image_min_pixels image_do_pan_and_scan crop_to_patches video_max_pixels video_min_pixels video_fps video_maxlen "
        "use_audio_in_video audio_sampling_rate media_dir",
        f"models that read images, video or sound are {_LATER}",
        "leave it out for a text model",
    ),
    **refuse("freeze_vision_tower freeze_multi_modal_projector", f"vision models are {_LATER}", "leave it out", True),
    **refuse("freeze_language_model", f"vision models are {_LATER}", "leave it out"),
}
EXPORT: Mapping[str, Foreign] = {
    **refuse("export_device", "the export streams through host memory", "write auto", "auto", "cpu"),
    **refuse("export_quantization_bit export_quantization_dataset", f"quantised export is {_LATER}"),
    **refuse("export_quantization_nsamples", f"quantised export is {_LATER}", "", 128),
    **refuse("export_quantization_maxlen", f"quantised export is {_LATER}", "", 1024),
    **refuse("export_hub_model_id", f"uploading is {_LATER}", "export to export_dir and upload the folder"),
}
_SGLANG = "SGLang's options stand under sglang here"
SERVING: Mapping[str, Foreign] = {
    **refuse(
        "vllm_maxlen vllm_gpu_util vllm_enforce_eager vllm_max_lora_rank vllm_config",
        "vLLM is not one of the rollout engines",
        "write rollout_engine: local",
    ),
    **refuse("sglang_maxlen", _SGLANG, "write sglang: {context_length: ...}"),
    **refuse("sglang_mem_fraction", _SGLANG, "write sglang: {mem_fraction_static: ...}"),
    **refuse("sglang_tp_size", _SGLANG, "write sglang: {tp: ...}"),
    **refuse("sglang_config", _SGLANG, "write sglang: {extra_args: {flag: value}}"),
    **refuse("sglang_lora_backend", "servers get weights with the adapter merged into them", "leave it out", "triton"),
}
OTHER_BACKENDS: Mapping[str, Foreign] = {
    **refuse(
        "use_kt kt_cpu_activation kt_weight_path kt_non_expert_weight_path kt_expert_checkpoint_path kt_use_lora_experts "
        "kt_lora_expert_num kt_lora_expert_intermediate_size kt_config _kt_inference_config _kt_config_handle _kt_adapter_artifact_path",
        "KTransformers is not one of the engines",
        "set USE_MCA=1 for Megatron",
    ),
    **refuse("use_hyper_parallel hyper_parallel_args hyper_parallel_cp_size", "HyperParallel is not one of the engines", "", 1),
    **refuse("use_megatron_bridge megatron_bridge_args", "weights are mapped by the program's own layouts", "set USE_MCA=1"),
    **refuse("use_packed_sequences", "has another name here", "write packing"),
    **refuse("mixed_precision", "has another name here", "write bf16: true or fp16: true, or leave it out for float32"),
    **refuse(
        "megatron_pretrained_checkpoint",
        f"starting from a Megatron checkpoint is {_LATER}",
        "write a Hugging Face folder in model_name_or_path",
    ),
    **refuse("export_hf_on_finish", "has another name here", "write save_hf_model"),
    **refuse("extra_config", "has another name here", "write additional_configs"),
}
DATA: Mapping[str, Foreign] = {
    **refuse("tool_format", f"tool calls are {_LATER}"),
    **refuse("preserve_thinking", f"{_LATER}; thoughts follow the tokenizer's chat template"),
    **always("ignore_pad_token_for_loss", "padding is never trained on", "write true"),
    **no_effect("preprocessing_num_workers", "one process tokenises, with as many threads as the tokenizer's library takes"),
    **refuse("eval_num_beams", f"beam search is {_LATER}", "write 1", 1),
}
GENERATION: Mapping[str, Foreign] = {
    **refuse("num_beams", f"beam search is {_LATER}", "write 1", 1),
    **refuse("max_length", "counts the prompt too, which is ambiguous", "write max_new_tokens and max_prompt_len"),
    **refuse("repetition_penalty length_penalty", f"penalties are {_LATER}", "write 1.0", 1),
    **always("skip_special_tokens", f"false is {_LATER}", "write true"),
}
ADAPTERS: Mapping[str, Foreign] = {
    **refuse("adapter_folder", "adapters are read from local folders", "write the whole path in adapter_name_or_path"),
    **refuse("additional_target", f"training whole layers beside adapters is {_LATER}", "leave it out, or write finetuning_type: freeze"),
    **refuse("loraplus_lr_ratio", f"LoRA+ is {_LATER}", "leave it out: both matrices have one learning rate"),
    **refuse("loraplus_lr_embedding", f"LoRA+ is {_LATER}", "leave it out", 1e-6),
    **refuse("use_dora", f"DoRA is {_LATER}", "leave it out for plain LoRA"),
    **refuse("pissa_init pissa_convert", f"PiSSA is {_LATER}", "leave it out for plain LoRA"),
    **refuse("pissa_iter", f"PiSSA is {_LATER}", "leave it out for plain LoRA", 16),
    **refuse("module_dropout", f"OFT is {_LATER}", "write finetuning_type: lora and lora_dropout"),
    **refuse("oft_rank", f"OFT is {_LATER}", "write finetuning_type: lora and lora_rank"),
    **refuse("oft_block_size", f"OFT is {_LATER}", "write finetuning_type: lora and lora_rank", 32),
    **refuse("oft_target", f"OFT is {_LATER}", "write finetuning_type: lora and lora_target", "all"),
    **refuse("use_llama_pro", f"block expansion is {_LATER}"),
}
PREFERENCES: Mapping[str, Foreign] = {
    **refuse("pref_bco_weight", f"BCO's loss is {_LATER}", "leave it out", 0),
    **refuse("ld_alpha", f"LD-DPO is {_LATER}", "leave it out", 1),
    **refuse("kto_chosen_weight kto_rejected_weight", f"stage kto is {_LATER}", "write stage: dpo", 1),
    **refuse("ppo_buffer_size ppo_epochs ppo_score_norm ppo_target ppo_whiten_rewards", f"stage ppo is {_LATER}", "write stage: grpo"),
    **refuse("ref_model_adapters ref_model_quantization_bit", f"adapters and quantisation are {_LATER}", "write ref_model"),
    **refuse(
        "reward_model reward_model_adapters reward_model_quantization_bit",
        f"reward models are {_LATER}",
        "write rewards: with functions",
    ),
    **refuse("reward_model_type", f"reward models are {_LATER}", "write rewards: with functions", "lora"),
}
OPTIMISERS: Mapping[str, Foreign] = {
    **refuse(
        "use_galore galore_target galore_rank galore_update_interval galore_scale galore_proj_type galore_layerwise use_apollo "
        "apollo_target apollo_rank apollo_update_interval apollo_scale apollo_proj apollo_proj_type apollo_scale_type "
        "apollo_layerwise apollo_scale_front use_badam badam_mode badam_start_block badam_switch_mode "
        "badam_switch_interval badam_update_ratio badam_mask_mode badam_verbose use_adam_mini use_muon",
        f"optimisers other than AdamW are {_LATER}",
        "leave it out",
    ),
    **refuse("pure_bf16", "bfloat16 weights without float32 masters lose small updates", "write bf16: true"),
    **refuse("use_dft_loss use_asft_loss use_eaft_loss", f"other supervised losses are {_LATER}"),
    **refuse("asft_alpha eaft_alpha", f"other supervised losses are {_LATER}"),
}
TRACKING: Mapping[str, Foreign] = {
    **refuse("swanlab_lark_webhook_url swanlab_lark_secret", f"messages to Lark are {_LATER}", "leave it out"),
    **refuse("compute_accuracy", f"token accuracy is {_LATER}"),
    **refuse("early_stopping_steps", f"early stopping is {_LATER}", "write max_steps"),
    **no_effect("include_effective_tokens_per_second", "throughput is always logged"),
}
LAUNCH: Mapping[str, Foreign] = {
    **refuse("master_addr master_port", "belongs to the environment", "set MASTER_ADDR and MASTER_PORT"),
    **refuse(
        "enable_torch_profiler profiler_output_dir profiler_wait_steps profiler_warmup_steps profiler_active_steps profiler_repeat "
        "profiler_record_shapes profiler_profile_memory profiler_with_stack profile_modules",
        f"the profiler is {_LATER}",
    ),
}
BENCHMARKS: Mapping[str, Foreign] = {
    **refuse(
        "task task_dir batch_size lang n_shot save_dir download_mode",
        "LLaMA-Factory's benchmark command has no counterpart",
        "use rlmca-cli eval with eval_dataset, rewards and output_dir",
    ),
}

LLAMAFACTORY: Mapping[str, Foreign] = {
    **TOKENIZER,
    **LOADING,
    **ARCHITECTURE,
    **KERNELS,
    **QUANTIZATION,
    **MEDIA,
    **EXPORT,
    **SERVING,
    **OTHER_BACKENDS,
    **DATA,
    **GENERATION,
    **ADAPTERS,
    **PREFERENCES,
    **OPTIMISERS,
    **TRACKING,
    **LAUNCH,
    **BENCHMARKS,
}
