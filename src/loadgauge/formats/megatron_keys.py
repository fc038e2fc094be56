"""Options of Megatron-LM, and fields of its configuration, that no idea reads, and what is done about each."""

from __future__ import annotations

from loadgauge.formats.coverage import OFF, Bound, Coverage, stops, words

LATER = "may make a step take a little more or less time"
RUN = """
    seed te_rng_tracker use_te_rng_tracker inference_rng_tracker data_parallel_random_init use_nsys_profiler
    profile profile_* use_pytorch_profiler pytorch_profiler_* record_memory_history memory_snapshot_path
    record_shapes nvtx_ranges
    distributed_backend distributed_timeout_minutes local_rank lazy_mpu_init nccl_communicator_config_path
    use_gloo_process_groups disable_gloo_process_groups use_sharp sharp_enabled_group high_priority_stream_groups
    high_priority_a2a_comm_stream distributed_timeout_seconds_after_init flight_recorder_* disable_jit_fuser
    error_injection_* rerun_mode validate_results check_for_nan_in_loss check_for_spiky_loss check_for_large_grads
    no_check_for_nan_in_loss_and_grad check_for_nan_in_grad log_straggler straggler_* disable_straggler_on_startup
    check_weight_hash_across_dp_replicas_interval gpu_sniff_test_interval train_sync_interval train_iters train_samples
    exit_* manual_gc manual_gc_* iterations_to_skip eval_* start_eval_at_iter skip_train test_mode full_validation
    multiple_validation_sets validation_set_names lr lr_* min_lr decoupled_lr decoupled_min_lr weight_decay wd_* wsd_*
    start_weight_decay end_weight_decay weight_decay_incr_style override_opt_param_scheduler
    use_checkpoint_opt_param_scheduler override_opt_param_scheduler no_weight_decay_cond_type apply_wd_to_qk_layernorm
    clip_grad adam_beta1 adam_beta2 adam_eps muon_momentum muon_no_split_qkv muon_split_qkv muon_nesterov
    muon_scale_mode muon_fp32_matmul_prec muon_coefficient_type muon_num_ns_steps muon_tp_mode muon_use_syrk
    muon_extra_scale_factor muon_scalar_optimizer lion_beta1 lion_beta2 soap_* adaptive_muon_* decoupled_weight_decay
    grad_norm_skip_threshold sgd_lr log_* timing_log_level timing_log_option tensorboard_* throughput_window_size
    memory_keys runtime_time_unit barrier_with_L1_time wandb_* logging_level filter_warnings modules_to_filter
    set_level_for_all_loggers save_config_filepath moe_routing_trace_* moe_per_layer_logging save save_*
    most_recent_k load load_*
    non_persistent_* fully_parallel fully_parallel_* finetune pretrained_checkpoint ckpt_* exit_on_missing_checkpoint
    auto_detect_ckpt_format async_save async_strategy async_ckpt_* use_persistent_ckpt_worker strict_fsdp_dtensor_load
    dist_ckpt_* distrib_optim_fully_reshardable_mem_efficient replication replication_* verify_integrity no_save_optim
    no_save_rng no_load_optim no_load_rng override_ckpt_iteration use_dist_ckpt use_mp_args_from_checkpoint_args
    use_tokenizer_model_from_checkpoint_args no_ckpt_fully_parallel_save hetereogenous_dist_checkpoint
    tokenizer_* pad_vocab_size merge_file vocab_extra_ids metadata_path special_tokens tiktoken_* trust_remote_code
    null_tokenizer_* chat_template use_gigatoken data_path split train_data_path valid_data_path test_data_path
    data_args_path per_split_data_args_path per_dataset_sequences_path dataloader_* data_cache_path no_mmap_bin_files
    mock_data sample_rate mask_prob short_seq_prob num_workers num_dataset_builder_threads object_storage_cache_path
    mid_level_dataset_surplus allow_ambiguous_pad_tokens fim_* phase_transition_iterations eod_mask_loss
    no_create_attention_mask_in_dataloader reset_position_ids sft sft_* adlr_* run_workload_inspector_server
    inprocess_* no_one_logger one_logger_* app_tag_* enable_ft_package calc_ft_timeouts ft_* otel_*
    result_rejected_tracker_filename dump_param_to_param_group_map enable_msc disable_msc init_method init_method_*
    init_model_with_meta_device output_layer_init_method embedding_init_method embedding_init_method_*
    perform_initialization use_cpu_initialization
    config_logger_dir timers grad_scale_func finalize_model_grads_func moe_grad_scale_func mtp_grad_scale_func no_sync_func
    grad_sync_func param_sync_func fake_process_group timing_log_level loss_scale initial_loss_scale min_loss_scale
    loss_scale_window hysteresis enable_experimental use_mcore_models enable_one_logger  deallocate_pipeline_outputs
"""
MODEL = """
    rotary_* use_rope_scaling rope_scaling_factor rope_type no_rope_freq yarn_* no_yarn_* relative_attention_*
    use_rotary_position_embeddings
    mscale mscale_all_dim beta_fast beta_slow original_max_position_embeddings mrope_section norm_epsilon layernorm_epsilon
    layernorm_zero_centered_gamma apply_layernorm_1p onnx_safe bert_no_binary_head softmax_scale softmax_type
    add_bias_linear gated_linear_unit glu_linear_offset activation_func activation_func_clamp_value q_lora_rank
    kv_lora_rank qk_head_dim
    qk_pos_emb_head_dim v_head_dim num_moe_experts moe_router_load_balancing_type moe_router_topk_limited_devices
    moe_router_num_groups moe_router_group_topk moe_router_pre_softmax moe_router_topk_scaling_factor
    moe_router_score_function moe_router_enable_expert_bias moe_router_bias_update_rate moe_router_quantile_balancing_ema
    moe_router_force_load_balancing moe_router_force_biased moe_grouped_gemm moe_use_legacy_grouped_gemm
    moe_use_upcycling moe_upcycling_granularity moe_flex_dispatcher_* moe_deepep_num_sms moe_hybridep_* moe_ncclep_*
    moe_enable_routing_replay mtp_loss_scaling_factor mtp_use_repeated_layer mtp_detach_heads mtp_hsm
    mtp_hybrid_override_pattern mtp_standalone
    dsa_* linear_key_head_dim linear_value_head_dim linear_num_key_heads linear_num_value_heads linear_conv_kernel_dim
    experimental_attention_variant_loss_scale_func heterogeneous_layers_config_encoded_json heterogeneous_block_specs
    use_mup mup_*
    is_hybrid_model mamba_* use_mamba_mem_eff_path gdp_* window_attn_skip_freq calculate_per_token_loss qk_clip
    qk_clip_* qk_l2_norm_eps
    inference_* use_legacy_static_engine output_bert_embeddings bert_embedder_type max_tokens_to_oom enable_chunked_prefill
    num_speculative_tokens decode_only_cuda_graphs offset_sampling_seed_by_dp_rank use_same_sampling_seed_across_dp_ranks
    return_log_probs skip_prompt_log_probs use_flashinfer_fused_rope flash_decode use_inference_optimized_layers
    nccl_all_reduce_for_prefill mlp_chunks_for_prefill symmetric_ar_type moe_pad_experts_for_cuda_graph_inference
    rl_* grpo_* langrl_env_config refit_method cache_mla_latents bert_load ict_* biencoder_* titles_data_path
    query_in_block_prob use_one_sent_docs evidence_data_path retriever_* block_data_path embedding_path indexer_*
    num_classes img_h img_w num_channels patch_dim classes_fraction data_per_class_fraction no_data_sharding head_lr_mult
    vision_* swin_backbone_type mask_type mask_factor iter_per_epoch dino_* kitchen_recipe_number
    kitchen_attention_backend
"""
DETAILS = """
    fp8_margin fp8_interval fp8_amax_history_len fp8_amax_compute_algo fp8_quantizer_factory fp4_quantizer_factory
    tp_only_amax_red num_layers_at_start_in_bf16 num_layers_at_end_in_bf16 use_torch_optimizer_for_cpu_offload
    pin_cpu_grads pin_cpu_params no_pin_cpu_grads no_pin_cpu_params mhc_* offload_modules min_offloaded_tensor_size
    delta_offload_bytes_across_pp_ranks activation_offload_fraction fine_grained_offloading_max_inflight_offloads
    delay_offload_until_cuda_graph cpu_offloading_activations cpu_offloading_weights cpu_offloading_double_buffering
    cpu_offloading_retain_pinned_cpu_buffers cpu_offloading_num_layers cuda_graph_use_single_mempool
    cuda_graph_retain_backward_graph cuda_graph_warmup_steps cuda_graph_scope cuda_graph_modules
    async_tensor_model_parallel_allreduce muon_use_nesterov preserve_fp32_weights moe_paged_stash_*
    moe_token_drop_policy wgrad_deferral_limit
    tp_comm_bulk_wgrad tp_comm_bulk_dgrad tp_comm_overlap_* tp_comm_split_ag tp_comm_split_rs tp_comm_atomic_ag
    tp_comm_atomic_rs tp_comm_bootstrap_backend use_flash_attn flash_attention_version
    pipeline_model_parallel_comm_backend store_param_remainders
    megatron_fsdp_version align_grad_reduce align_param_gather no_align_param_gather average_in_collective
    ddp_average_in_collective ddp_pad_buckets_for_high_nccl_busbw pad_buckets_for_high_nccl_busbw
    gradient_reduce_div_fusion no_gradient_reduce_div_fusion disable_symmetric_registration create_all_gather_group
    no_use_layer_wise_param_layout logits_save_top_k logits_save_top_p logits_save_top_p_min_k logits_save_dtype
    logits_load_decode_threads logits_load_prefetch_factor logits_load_msc_prefetch_depth logits_load_kd_loss_alpha
    logits_load_ignore_errors batch_p2p_comm batch_p2p_sync disable_bf16_reduced_precision_matmul batch_invariant_backend
    clone_scatter_output_in_embedding pipeline_dtype autocast_dtype barrier_with_L1_time
    fsdp_all_gather_in_start_param_sync megatron_fsdp_enable_fine_grained_param_gather megatron_fsdp_use_decoupled_grad
"""

MEGATRON_COVERAGE = Coverage(
    source="https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/training/arguments.py and the dataclasses it is made of"
    " (2026-08)",
    harmless=words(RUN) | words(MODEL) | words(DETAILS),
    stops=stops(
        ("is another name, of older versions; micro_batch_size is read", OFF, "batch_size"),
        ("is another name, of older versions; tensor_model_parallel_size is read", OFF, "model_parallel_size"),
        ("is another name, of older versions; recompute_granularity is read", OFF, "checkpoint_activations"),
        ("is another name, of older versions", OFF, "warmup"),
        ("gives each module a number format of its own", OFF, "te_precision_config_file quant_recipe "
         "kitchen_config_file use_kitchen use_kitchen_attention"),
        ("captures CUDA graphs, which hold buffers of their own", OFF,
         "cuda_graph_impl external_cuda_graph enable_cuda_graph"),
        ("trains with rewards, in the same process as it generates", OFF, "perform_rl_step"),
        ("trains some of the weights only", OFF, "freeze_all_layers"),
        ("computes the loss in another format", OFF, "fp16_lm_cross_entropy output_logit_dtype"),
        ("shares out layers in a way that is not read; --stage-layers says it", OFF,
         "pipeline_model_parallel_layout account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split"
         " num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage"),
        ("is another order of micro-batches over the chunks", OFF, "microbatch_group_size_per_vp_stage"),
        ("holds buffers of FSDP for good", OFF, "fsdp_double_buffer megatron_fsdp_max_pool_double_buffer use_nccl_ub "
         "nccl_ub fsdp_manual_registration"
         " fsdp_db_use_persist_buf_on_alloc_fail gtp_remat_nccl_ub gtp_expert_remat_nccl_ub megatron_fsdp_cuda_graph_mode"),
        ("keeps weights in 8 bits a second time", OFF, "keep_fp8_transpose_cache"),
        ("shards over the replicas too", (*OFF, "no_shard"), "outer_dp_sharding_strategy enable_full_sharding_in_hsdp"),
        ("keeps gradients or weights in another format than float32", (*OFF, "fp32", "auto"),
         "main_grads_dtype main_params_dtype megatron_fsdp_main_params_dtype megatron_fsdp_main_grads_dtype"
         " megatron_fsdp_grad_comm_dtype params_dtype"),
        ("reduces gradients in another format", (*OFF, True), "grad_reduce_in_fp32"),
        ("shares out the weights of a tensor-parallel rank", (*OFF, 1),
         "gtp_weight_remat_size expert_gtp_weight_remat_size gtp_remat_opt_in_modules tensor_parallel_num_weight_shards"
         " expert_tensor_parallel_num_weight_shards gtp_remat_reduce_scatter_with_fp32_accumulation"),
        ("shares out long sequences another way", OFF, "hierarchical_context_parallel_sizes hybrid_context_parallel "
         "max_seqlen_per_dp_cp_rank"
         " dynamic_context_parallel min_dynamic_context_parallel_size "),
        ("is the length of a decoder beside an encoder", OFF, "decoder_seq_length"),
        ("moves activations to the host", OFF, "cpu_offloading fine_grained_activation_offloading moe_paged_stash"),
        ("shares out the checkpoints over tensor-parallel ranks", OFF, "distribute_saved_activations"),
        ("is the older way to recompute some micro-batches", OFF,
         "num_microbatches_with_partial_activation_checkpoints moe_layer_recompute"),
        ("shares out experts in an older way", OFF, "moe_extended_tp"),
        ("keeps the residual stream in float32", OFF, "fp32_residual_connection"),
        ("keeps weights in 8 or 4 bits; fp8_param_gather is read", OFF, "fp8_param fp4_param"),
        ("computes more than the blocks' matrix products in 8 bits", OFF,
         "fp8_output_proj fp8_dot_product_attention fp8_multi_head_attention activation_func_fp8_input_store"),
        ("computes some layers in 16 bits", OFF, "first_last_layers_bf16"),
        ("computes the gradients of weights in 16 bits", (*OFF, True), "fp8_wgrad"),
        ("casts in a way of its own", OFF, "enable_autocast"),
        ("computes gradients of weights later, and keeps what they need until then", OFF,
         "delay_wgrad_compute overlap_dispatch_backward_with_experts_wgrad ep_overlap_early_attn_memory_release "
          "defer_embedding_wgrad_compute"),
        ("fuses operations whose tensors are counted one by one", OFF,
         "use_transformer_engine_op_fuser fused_residual_rmsnorm memory_efficient_layer_norm "
          "disable_parameter_transpose_cache mla_down_proj_fusion"),
        ("runs in Megatron's own modules; those of Transformer Engine are counted", (*OFF, "transformer_engine"),
         "transformer_impl"),
        ("sends tokens to their experts another way than by all-to-all", (*OFF, "alltoall", "alltoall_seq"),
         "moe_token_dispatcher_type moe_enable_deepep"),
        ("drops or pads tokens of an expert", OFF, "moe_expert_capacity_factor moe_pad_expert_input_to_capacity "
         "moe_token_dropping"
         " moe_expert_rank_capacity_factor"),
        ("changes what experts read", OFF, "moe_apply_probs_on_input moe_latent_size "
         "moe_shared_expert_glu_interleave_size moe_mlp_glu_interleave_size"),
        ("sends or keeps tokens of experts in another format", (*OFF, "bf16"), "moe_dispatch_fwd_dtype "
         "moe_combine_bwd_dtype"),
        ("changes the residual stream", OFF, "enable_mhc_connections apply_residual_connection_post_layernorm"),
        ("changes attention", OFF, "attention_output_gate qk_l2_norm "),
        ("computes the feed-forward a part of the sequence at a time", (*OFF, 1), "mlp_chunks_for_training"),
        ("shards the optimizer by layers", OFF, "use_layer_wise_distributed_optimizer"),
        ("takes sizes from a checkpoint or from another file", OFF, "use_checkpoint_args spec yaml_cfg"),
        ("distils from another model's logits", OFF, "logits_load_dir logits_save_dir export_kd_teacher_load"),
        ("is a loss of images", OFF, "vision_pretraining"),
        ("is the linear attention's or the grouped matrix products' own kernel", OFF,
         "use_grouped_gemm_for_dense_mlp use_grouped_gemm_for_shared_expert moe_use_grouped_tensor "
          "moe_single_grouped_weight moe_single_grouped_bias"),
    ),
    bounded={name: Bound(why, off) for why, off, names in (
        ("the batch grows over the first steps; the last is counted", OFF,
         "rampup_batch_size step_batch_size_schedule decrease_batch_size_if_needed"),
        ("scores of all experts are kept for a loss of the router", OFF, "moe_aux_loss_coeff moe_z_loss_coeff "
         "moe_input_jitter_eps"),
        ("scores of the router in another format", OFF, "moe_router_dtype"),
        ("tokens of an expert are padded to a few more", OFF, "moe_router_padding_for_fp8 "
         "moe_router_padding_for_quantization"),
        (f"one more gradient of a matrix, for a moment; {LATER}", OFF, "no_gradient_accumulation_fusion"),
        ("fused kernels are counted", OFF, "no_masked_softmax_fusion no_bias_gelu_fusion no_bias_swiglu_fusion"
         " no_bias_dropout_fusion no_rope_fusion no_persist_layer_norm"),
        (f"fused kernels are counted; it {LATER}", (*OFF, True), "gradient_accumulation_fusion masked_softmax_fusion "
         "bias_activation_fusion"
         " bias_dropout_fusion persist_layer_norm apply_rope_fusion use_fused_weighted_squared_relu fused_single_qkv_rope"
         " moe_permute_fusion moe_router_fusion moe_permute_fusion_into_hybridep use_te_activation_func"),
        ("the softmax of eager attention runs in float32", OFF, "attention_softmax_in_fp32 apply_query_key_layer_scaling"),
        (LATER, (*OFF, "default"), "optimizer_cuda_graph ddp_num_buckets ddp_bucket_size num_buckets bucket_size"
         " overlap_param_gather_with_optimizer_step overlap_p2p_comm_warmup_flush tp_comm_overlap_cfg "
          "suggested_communication_unit_size"
         " overlap_cpu_optimizer_d2h_h2d moe_shared_expert_overlap deterministic_mode batch_invariant_mode "
          "use_ring_exchange_p2p"
         " empty_unused_memory_level"),
        ("gradients are summed in float32, in a buffer of their own for a moment", OFF,
         "ddp_reduce_scatter_with_fp32_accumulation"
         " reduce_scatter_with_fp32_accumulation ddp_param_name_patterns_for_fp32_local_accumulation"
         " param_name_patterns_for_fp32_local_accumulation"),
        ("attention masks of the documents of a sequence", OFF, "reset_attention_mask"),
        ("sequences are shorter than seq_length where they can be", OFF, "variable_seq_lengths"),
        ("the token table is padded to a multiple of 128 rows a rank", (*OFF, 128), "make_vocab_size_divisible_by"),
    ) for name in names.split()},
)  # fmt: skip
OTHER_PROGRAMS = {
    r"\bpretrain_(?:bert|t5|ict|vision\w*|vlm|retro|mimo|dino|realm)\w*\.py\b": "trains another model than a GPT",
}
"""Command lines of Megatron's that train something else."""
