"""Options of mcore_adapter and Megatron-Core that are not honoured."""

from __future__ import annotations

from collections.abc import Mapping

from rlmca.config.foreign.entry import Foreign, no_effect, refuse

_LATER = "not in this version"
_MOE = f"this option of experts is {_LATER}"

MEGATRON: Mapping[str, Foreign] = {
    **no_effect("overlap_p2p_comm", "with several chunks a stage it is always on, else there is nothing to overlap"),
    **refuse(
        "num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage",
        "has another name here",
        "write pipeline_model_parallel_layout",
    ),
    **refuse("variable_seq_lengths", f"micro-batches of different widths are {_LATER}", "leave it out"),
    **refuse("sequence_packing", "has another name here", "write packing"),
    **refuse("no_masked_softmax_fusion", "has another name here", "write masked_softmax_fusion: false"),
    **refuse("no_bias_dropout_fusion", "has another name here", "write bias_dropout_fusion: false"),
    **refuse("no_rope_fusion", "has another name here", "write apply_rope_fusion: false"),
    **refuse("no_bias_swiglu_fusion no_bias_gelu_fusion", "has another name here", "write bias_activation_fusion: false"),
    **refuse("bias_swiglu_fusion bias_gelu_fusion", "has another name here", "write bias_activation_fusion: true"),
    **refuse("cross_entropy_fusion_impl", "the log-probabilities are the program's own", "leave it out", "native"),
    **refuse("recompute_activations", "has another name here", "write recompute_granularity: selective"),
    **refuse("distribute_saved_activations", f"spreading them over tensor ranks is {_LATER}", "write sequence_parallel: true"),
    **refuse(
        "attention_dropout hidden_dropout",
        "is one of the further TransformerConfig fields of Megatron",
        "with USE_MCA=1 write it under additional_configs; the Hugging Face engine takes dropout from the model's config.json",
        elsewhere=True,
    ),
    **refuse("moe_shared_expert_overlap moe_enable_routing_replay moe_layer_recompute", _MOE),
    **refuse("mtp_num_layers", f"multi-token prediction is {_LATER}", "", 0),
    **refuse(
        "calculate_per_token_loss",
        "Megatron's per-token path has one integer counter and inflates auxiliary losses; losses here already have global denominators",
        "leave it out: the token mean is exact however a batch is split",
    ),
    **refuse("cuda_graph_impl cuda_graph_scope", f"CUDA graphs are {_LATER}", "", "none"),
    **refuse("fp8 fp8_recipe fp8_param fp8_backend fp8_enable_fsdp_float8_all_gather", f"FP8 is {_LATER}", "write bf16: true"),
    **refuse("optimizer", f"optimisers other than AdamW are {_LATER}", "write adam", "adam", "adamw"),
    **refuse("optimizer_cpu_offload", f"optimiser offload is {_LATER}"),
    **refuse("optimizer_offload_fraction", f"optimiser offload is {_LATER}", "", 0),
    **refuse("distrib_optim_fully_reshardable distrib_optim_fully_reshardable_mem_efficient", f"resuming on another layout is {_LATER}"),
    **refuse("delay_grad_reduce ddp_average_in_collective ddp_bucket_size", f"tuning of Megatron's DDP is {_LATER}"),
    **no_effect("check_for_nan_in_loss_and_grad", "a step with a non-finite gradient is always found, skipped and logged"),
    **refuse("async_save ckpt_d2h_non_blocking", f"saving in the background is {_LATER}"),
    **refuse("save_merged_model", "has another name here", "write save_hf_model: the folder hf/ has the adapter merged"),
    **refuse("compile_warmup", f"torch.compile is {_LATER}"),
}
