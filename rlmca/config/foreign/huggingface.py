"""Hugging Face TrainingArguments that are not honoured."""

from __future__ import annotations

from collections.abc import Mapping

from rlmca.config.foreign.entry import Foreign, always, no_effect, refuse

_LATER = "not in this version"

OPTIMISER: Mapping[str, Foreign] = {
    **refuse("optim", f"optimisers other than AdamW are {_LATER}", "write adamw_torch", "adamw_torch", "adamw_torch_fused"),
    **refuse("optim_args optim_target_modules", f"optimisers other than AdamW are {_LATER}"),
    **always("average_tokens_across_devices", "losses always have global denominators", "write true"),
    **refuse("label_smoothing_factor neftune_noise_alpha", f"{_LATER}", "write 0", 0),
    **refuse("torch_empty_cache_steps", f"{_LATER}"),
    **refuse("auto_find_batch_size", f"{_LATER}", "write per_device_train_batch_size"),
}
PRECISION: Mapping[str, Foreign] = {
    **refuse("bf16_full_eval fp16_full_eval tf32", f"{_LATER}", "write bf16: true or fp16: true; evaluation uses the training precision"),
    **refuse("torch_compile torch_compile_backend torch_compile_mode", f"torch.compile is {_LATER}"),
    **refuse("use_liger_kernel liger_kernel_config", f"Liger's kernels are {_LATER}", "leave it out: they change speed and memory alone"),
    **no_effect("use_cache", "training keeps no KV cache, rollouts always do"),
    **refuse("full_determinism", f"{_LATER}", "write seed; a CPU run with one seed repeats itself"),
}
LOGGING: Mapping[str, Foreign] = {
    **refuse("logging_strategy", f"{_LATER}", "write steps, with logging_steps", "steps"),
    **refuse("logging_first_step", f"{_LATER}", "write logging_steps: 1"),
    **no_effect("include_num_input_tokens_seen", "the number of tokens is always logged"),
    **no_effect("log_on_each_node", "one process writes the log"),
    **no_effect("logging_nan_inf_filter", "non-finite values are logged as null, never replaced"),
    **no_effect("log_level log_level_replica", "messages are few and come from one process"),
    **no_effect("disable_tqdm", "progress bars are quiet when the output is no terminal"),
    **no_effect("skip_memory_metrics", "peak memory is not a reason to slow a run down"),
    **refuse(
        "trackio_space_id trackio_bucket_id trackio_static_space_id", f"settings of a tracker are {_LATER}", "write report_to: trackio"
    ),
    **refuse("logging_dir", f"settings of a tracker are {_LATER}", "logs are in output_dir"),
    **refuse("debug", f"{_LATER}"),
}
EVALUATION: Mapping[str, Foreign] = {
    **refuse("eval_delay", f"{_LATER}", "write 0", 0),
    **refuse("eval_on_start", f"{_LATER}", "use rlmca-cli eval first"),
    **refuse("include_for_metrics label_names", f"other metrics are {_LATER}"),
    **refuse("do_predict predict_with_generate", "is a command here", "use rlmca-cli generate"),
    **refuse("generation_max_length generation_num_beams generation_config", "belongs to the generation keys", "write max_new_tokens"),
    **no_effect(
        "prediction_loss_only eval_do_concat_batches eval_use_gather_object eval_accumulation_steps batch_eval_metrics",
        "evaluation keeps sums, never logits",
    ),
}
SAVING: Mapping[str, Foreign] = {
    **refuse("save_on_each_node", f"{_LATER}", "write output_dir on a file system that all nodes share"),
    **no_effect("enable_jit_checkpoint", "SIGTERM always ends a run with a checkpoint"),
    **no_effect("save_safetensors", "weights are always written as safetensors"),
    **refuse(
        "push_to_hub hub_token hub_private_repo hub_model_id hub_always_push hub_revision",
        f"uploading is {_LATER}",
        "upload the Hugging Face folder of output_dir",
    ),
    **refuse("hub_strategy", f"uploading is {_LATER}", "", "every_save"),
    **refuse("ignore_data_skip", "a resumed run continues at its place in the data", "write false"),
    **refuse("restore_callback_states_from_checkpoint", "there are no callbacks", "leave it out"),
}
LOADING: Mapping[str, Foreign] = {
    **no_effect(
        "dataloader_drop_last", "an epoch has floor(rows / global batch) steps and no row is lost: the rest goes into the next one"
    ),
    **no_effect(
        "dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor "
        "dataloader_multiprocessing_context dataloader_in_order",
        "batches are small lists of tokens, assembled in order",
    ),
    **no_effect("remove_unused_columns", "extra columns are kept for reward functions and never reach the model"),
    **refuse("train_sampling_strategy", f"{_LATER}", "write random, or disable_shuffling: true", "random"),
    **refuse("group_by_length sortish_sampler", f"{_LATER}"),
    **no_effect("length_column_name", "lengths come from the tokens"),
}
PROCESSES: Mapping[str, Foreign] = {
    **refuse(
        "deepspeed",
        f"the Hugging Face engine with DeepSpeed is {_LATER}",
        "leave it out for plain data parallelism, or set USE_MCA=1: use_distributed_optimizer splits optimiser state",
    ),
    **refuse("fsdp fsdp_config", "FSDP is not one of the engines", "set USE_MCA=1; use_distributed_optimizer splits optimiser state"),
    **refuse("accelerator_config parallelism_config", "belongs to Accelerate, which neither engine uses"),
    **no_effect("ddp_broadcast_buffers", "buffers of the models are constants, equal on every rank"),
    **refuse("ddp_static_graph", f"{_LATER}", "leave it out: gradients are the same"),
    **refuse("ddp_backend", "the device decides: NCCL on CUDA, gloo on a CPU", "leave it out"),
    **refuse("local_rank", "belongs to the environment; torchrun sets it", "leave it out", -1),
}

HUGGINGFACE: Mapping[str, Foreign] = {**OPTIMISER, **PRECISION, **LOGGING, **EVALUATION, **SAVING, **LOADING, **PROCESSES}
