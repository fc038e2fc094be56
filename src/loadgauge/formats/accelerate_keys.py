"""Keys of accelerate's configuration that no idea reads, and what is done about each."""

from __future__ import annotations

from loadgauge.formats.coverage import OFF, Bound, Coverage, stops, words

NO = (*OFF, "NO")

ACCELERATE_COVERAGE = Coverage(
    source="https://huggingface.co/docs/accelerate/package_reference/cli (0.20 - 1.15)",
    harmless=words(
        """
        compute_environment debug machine_rank gpu_ids main_process_ip main_process_port rdzv_backend same_network
        main_training_function enable_cpu_affinity tpu_name tpu_zone tpu_use_cluster tpu_use_sudo command_file commands
        tpu_vm tpu_env dynamo_config
        deepspeed_config.offload_optimizer_nvme_path deepspeed_config.offload_param_nvme_path
        deepspeed_config.gradient_clipping deepspeed_config.zero3_init_flag deepspeed_config.zero3_save_16bit_model
        deepspeed_config.deepspeed_hostfile deepspeed_config.deepspeed_exclusion_filter
        deepspeed_config.deepspeed_inclusion_filter deepspeed_config.deepspeed_multinode_launcher
        deepspeed_config.deepspeed_moe_layer_cls_names deepspeed_config
        fsdp_config fsdp_config.fsdp_auto_wrap_policy fsdp_config.fsdp_transformer_layer_cls_to_wrap
        fsdp_config.fsdp_backward_prefetch fsdp_config.fsdp_backward_prefetch_policy fsdp_config.fsdp_state_dict_type
        fsdp_config.fsdp_use_orig_params fsdp_config.fsdp_cpu_ram_efficient_loading
        fsdp_config.fsdp_sync_module_states fsdp_config.fsdp_limit_all_gathers
        megatron_lm_config.megatron_lm_gradient_clipping megatron_lm_config.megatron_lm_no_load_optim
        megatron_lm_config.megatron_lm_eod_mask_loss megatron_lm_config.megatron_lm_no_save_optim
        megatron_lm_config.megatron_lm_calculate_per_token_loss
        megatron_lm_config.megatron_lm_use_rotary_position_embeddings
        megatron_lm_config.megatron_lm_overlap_cpu_optimizer_d2h_h2d
        parallelism_config parallelism_config.parallelism_config_sp_seq_length_is_variable
        parallelism_config.parallelism_config_sp_attn_implementation
        parallelism_config.parallelism_config_sp_seq_length mpirun_config mpirun_config.* ipex_config ipex_config.*
        dynamo_config.dynamo_mode dynamo_config.dynamo_use_dynamic dynamo_config.dynamo_use_fullgraph
        """
    ),
    stops=stops(
        ("is not a GPU", OFF, "use_cpu downcast_bf16"),
        ("makes kernels of its own, which keep other tensors for the backward and take another time", NO,
         "dynamo_config.dynamo_backend dynamo_backend dynamo_config.*"),
        ("is 8-bit products, which are not read here", OFF, "fp8_config.* fp8_config"),
        ("wraps other units than whole layers only with SIZE_BASED_WRAP, and then gathers other amounts of weights",
         (*OFF, 1e8),
         "fsdp_config.fsdp_min_num_params"),
        ("holds the weights of one more layer at a time", OFF, "fsdp_config.fsdp_forward_prefetch"),
        ("moves the checkpoints to the host", OFF, "fsdp_config.fsdp_activation_checkpointing_offload"),
        ("casts weights and gradients in a way of its own", OFF, "fsdp_config.fsdp_mixed_precision_policy"),
        ("shares out or recomputes in a way that is not read here; give Megatron's own arguments", (*OFF, 1),
         """
         megatron_lm_config.megatron_lm_use_custom_fsdp megatron_lm_config.megatron_lm_optimizer_cpu_offload
         megatron_lm_config.megatron_lm_use_precision_aware_optimizer
         megatron_lm_config.megatron_lm_decoder_last_pipeline_num_layers
         megatron_lm_config.megatron_lm_recompute_granularity megatron_lm_config.megatron_lm_recompute_method
         megatron_lm_config.megatron_lm_recompute_num_layers megatron_lm_config.megatron_lm_context_parallel_size
         megatron_lm_config.megatron_lm_expert_tensor_parallel_size
         """),
        ("is the number of micro-batches; give --global-batch", OFF, "megatron_lm_config.megatron_lm_num_micro_batches"),
        ("changes attention", (*OFF, "flash", "fused", "auto"), "megatron_lm_config.megatron_lm_attention_backend"),
        ("is DeepSpeed's expert layer, which is not read", OFF, "deepspeed_config.deepspeed_moe"),
    ),
    bounded={
        "parallelism_config.parallelism_config_cp_comm_strategy": Bound(
            "how the ranks of context parallelism exchange keys and values; a ring is counted", (*OFF, "ring", "alltoall")
        ),
        "parallelism_config.parallelism_config_cp_backend": Bound("what shares out the sequence", (*OFF, "torch")),
        "parallelism_config.parallelism_config_sp_backend": Bound("what shares out the sequence", (*OFF, "deepspeed")),
        "megatron_lm_config.megatron_lm_attention_dropout": Bound("dropout in attention keeps its mask", OFF),
        "megatron_lm_config.megatron_lm_hidden_dropout": Bound("dropout keeps a mask of the layer's output", OFF),
        "megatron_lm_config.megatron_lm_attention_softmax_in_fp32": Bound("the softmax runs in float32", OFF),
    },
)  # fmt: skip
