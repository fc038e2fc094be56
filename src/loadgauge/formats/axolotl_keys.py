"""Keys of axolotl that no idea reads, and what is done about each."""

from __future__ import annotations

from loadgauge.formats.coverage import OFF, Bound, Coverage, stops, words
from loadgauge.formats.huggingface_keys import COMPILED, FSDP

FUSED = "a kernel that keeps fewer tensors"
READ_PLUGINS = (
    *("axolotl.integrations.liger.LigerPlugin", "axolotl.integrations.liger.plugin.LigerPlugin"),
    "axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin",
    "axolotl.integrations.expert_parallel.ExpertParallelPlugin",
    "axolotl.integrations.swanlab.SwanLabPlugin",
)
"""Plugins of which the keys are in the lists."""

AXOLOTL_COVERAGE = Coverage(
    source="https://docs.axolotl.ai/docs/config-reference.html (0.8 - 0.19)",
    # Packed or not, no sequence is longer than sequence_len, which is what is counted. The arguments of reinforcement
    # learning and preferences say nothing without `rl`, which stops the answer.
    harmless=words(
        """
        evaluation_strategy eval_table_size eval_max_new_tokens eval_max_tokens model_config_type rope_scaling
        model_type model_revision revision_of_model image_size image_resize_algorithm role_boundaries is_falcon_derived_model
        is_llama_derived_model is_mistral_derived_model is_qwen_derived_model use_otel_metrics otel_metrics_host
        otel_metrics_port use_trackio trackio_project_name trackio_run_name trackio_space_id use_comet comet_api_key
        comet_workspace comet_project_name comet_experiment_key comet_mode comet_online comet_experiment_config
        use_mlflow mlflow_tracking_uri mlflow_experiment_name mlflow_run_name hf_mlflow_log_artifacts use_wandb
        wandb_name wandb_run_id wandb_mode wandb_project wandb_entity wandb_watch wandb_log_model use_tensorboard
        gradio_title gradio_share gradio_server_name gradio_server_port gradio_max_new_tokens gradio_temperature
        ray_run_name resources_per_worker eval_batch_size train_on_inputs group_by_length learning_rate embedding_lr
        embedding_lr_scale weight_decay torchdistx_path lr_scheduler lr_scheduler_kwargs lr_scheduler_kwargs.*
        lr_quadratic_warmup cosine_min_lr_ratio cosine_constant_lr_ratio lr_div_factor lr_groups adam_epsilon
        adam_epsilon2 adam_beta1 adam_beta2 adam_beta3 dion_lr dion_momentum dion_rank_fraction dion_rank_multiple_of
        qgalore_rank qgalore_update_proj_gap qgalore_scale qgalore_proj_type qgalore_proj_quant qgalore_proj_bits
        qgalore_proj_group_size qgalore_cos_threshold qgalore_gamma_proj qgalore_queue_size max_grad_norm num_epochs
        jagged_restart_steps jagged_restart_warmup_steps jagged_restart_anneal_steps lisa_step_interval
        lisa_layers_attribute relora_prune_ratio relora_prune_method

        lora_alpha lora_fan_in_fan_out lora_alpha_pattern peft_use_rslora peft_init_lora_weights
        peft_ensure_weight_tying loraplus_lr_ratio loraplus_lr_embedding merge_lora merge_method lora_on_cpu
        qlora_sharded_model_loading bnb_config_kwargs bnb_config_kwargs.bnb_4bit_quant_storage
        bnb_config_kwargs.bnb_4bit_compute_dtype

        output_dir hub_model_id hub_strategy hub_revision hub_private_repo save_safetensors base_model_config cls_model_config
        base_model_ignore_patterns tokenizer_config tokenizer_use_fast tokenizer_legacy tokenizer_use_mistral_common
        tokenizer_type processor_type processor_kwargs tokenizer_save_jinja_files trust_remote_code
        experimental_skip_move_to_device strict resume_from_checkpoint auto_resume_from_checkpoints
        mean_resizing_embeddings low_cpu_mem_usage max_memory gpu_memory_limit device device_map world_size local_rank
        ddp seed ddp_timeout ddp_bucket_cap_mb ddp_broadcast_buffers ddp_find_unused_parameters data_seed

        trl.* vllm.* ebft.* dpo_beta dpo_use_logits_to_keep dpo_generate_during_eval dpo_norm_loss rpo_alpha
        center_rewards_coefficient dpo_use_weighting dpo_label_smoothing precompute_ref_log_probs dpo_use_liger_kernel
        dpo_padding_free dpo_loss_type dpo_loss_weights orpo_alpha simpo_gamma cpo_alpha kto_desirable_weight
        kto_undesirable_weight rl_beta dynamic_checkpoint.* quantization.*

        datasets test_datasets shuffle_merged_datasets shuffle_before_merging_datasets dataset_prepared_path
        dataset_shard_num dataset_shard_idx skip_prepare_dataset num_dataset_shards_to_save pretraining_dataset
        dataset_processes dataset_num_proc dataset_exact_deduplication dataset_keep_in_memory dataloader_pin_memory
        dataloader_num_workers dataloader_prefetch_factor dataloader_drop_last accelerator_config
        remove_unused_columns push_dataset_to_hub hf_use_auth_token val_set_size do_causal_lm_eval
        eval_causal_lm_metrics do_bench_eval bench_dataset bench_split bench_source_max_len metric_for_best_model
        greater_is_better loss_watchdog_threshold loss_watchdog_patience gc_steps torch_empty_cache_steps
        gc_collect_steps fp8_config.* gradient_checkpointing_kwargs gradient_checkpointing_kwargs.use_reentrant
        freeze_mm_modules excess_length_strategy eval_sequence_len min_sample_len max_prompt_len sample_packing
        sample_packing_group_size sample_packing_bin_size sample_packing_sequentially sample_packing_mp_start_method
        sample_packing_eff_est eval_sample_packing pad_to_sequence_len curriculum_sampling multipack_real_batches
        batch_flattening pose_split_on_token_ids pose_max_context_len pose_num_chunks pretrain_multipack_buffer_size
        pretrain_multipack_attn pretraining_sample_concatenation streaming streaming_multipack_buffer_size
        fsdp_config.final_state_dict_type fsdp_config.fsdp_final_state_dict_type fsdp_final_state_dict_type
        fsdp_config.cpu_offload_pin_memory special_tokens.* special_tokens eaft_alpha eaft_k tiled_mlp_num_shards
        tiled_mlp_use_original_mlp torch_compile_backend torch_compile_mode torch_compile_options
        torch_compile_options.* flex_attn_compile_kwargs flex_attn_compile_kwargs.* xformers_attention_backend

        max_steps warmup_steps warmup_ratio eval_steps evals_per_epoch eval_strategy save_steps saves_per_epoch
        save_strategy save_total_limit save_first_step logging_steps early_stopping_patience load_best_model_at_end
        save_only_model profiler_steps profiler_steps_start include_tokens_per_second include_tkps debug
        chat_template chat_template_jinja chat_template_kwargs chat_template_kwargs.* eot_tokens default_system_message
        is_preprocess preprocess_iterable total_num_tokens total_supervised_tokens axolotl_config_path
        generate_samples num_generation_samples generation_max_new_tokens generation_temperature generation_top_p
        generation_top_k generation_prompt_ratio generation_do_sample lora_model_dir_revision
        use_swanlab swanlab_* gptq_groupsize gptq_model_v1 tokens.bos_token tokens.eos_token tokens.unk_token
        tokens.pad_token sample_packing_seq_len_multiplier fsdp_config
        scaling_softmax_factor scaling_softmax_bias heads_k_stride
        """
    ),
    stops=stops(
        ("is another loss than supervised fine-tuning's, with other models or completions in memory", OFF,
         "rl reward_model process_reward_model num_labels trainer_cls"),
        ("was removed; sequence_len is read", OFF, "max_packed_sequence_len"),
        ("changes attention", OFF, "s2_attention scaling_softmax gemma4_hybrid_attn_impl large_head_attention "
         "flash_attn_d512 sdpa_varlen fused_attn_kernel flash_optimum"),
        ("trains some of the weights only", OFF, "lisa_n_layers unfrozen_parameters"),
        ("chooses the batch when the job runs; take it out and give the batch", OFF, "auto_find_batch_size"),
        ("is the batch of a step in sequences; gradient_accumulation_steps is read", OFF, "batch_size"),
        ("are arguments or layers of an optimizer that is not read", OFF, "optim_args optim_args.* optim_target_modules"),
        ("restarts the adapters and trains them again on what they made (ReLoRA)", OFF, "relora relora_cpu_offload "
         "relora_steps"),
        ("continues adapters whose rank and layers are in files of their own", OFF, "lora_model_dir"),
        ("gives layers other adapters than the others", OFF, "lora_rank_pattern peft_layers_to_transform peft_layers_pattern "
         "peft_layer_replication lora_target_parameters"),
        ("trains and keeps whole matrices beside the adapters", OFF, "lora_modules_to_save peft_trainable_token_indices"),
        ("adds magnitudes of the weights, which are trained and kept (DoRA)", OFF, "peft_use_dora"),
        ("starts from quantised weights in a way that is not read", OFF, "peft.loftq_config.* bnb_config_kwargs.*"),
        ("keeps the adapters in another format than float32", (None, "", True), "peft_autocast_adapter_dtype"),
        ("is a base in another format than 4 bits of bitsandbytes", OFF, "gptq use_onebitllms model_quantization_config "
         "model_quantization_config_kwargs quantize_moe_experts"),
        ("makes a model of other sizes", OFF, "model_config model_config.* overrides_of_model_config.* model_kwargs.* "
         "model_kwargs shrink_embeddings"),
        ("trains through quantised copies of the weights", OFF, "qat.*"),
        ("starts the job on so many workers; say it with --gpus", (*OFF, 1), "use_ray ray_num_workers"),
        ("moves activations, layers or weights to the host", OFF, "activation_offloading layer_offloading ple_cpu_offload"),
        ("says how layers run again in a way that is not read", OFF, "gradient_checkpointing_kwargs.* "
         "selective_checkpointing.*"),
        ("trains on positions of longer sequences", OFF, "use_pose"),
        (COMPILED, OFF, "torch_compile deepcompile use_kernels"),
        ("runs in kernels that keep other tensors", OFF, "flash_attn_cross_entropy flash_attn_rms_norm flash_attn_fuse_mlp "
         "flash_attn_fuse_qkv lora_mlp_kernel lora_qkv_kernel lora_o_kernel lora_embedding_kernel experts_implementation "
         "llama4_linearized_experts liger_cross_entropy"),
        ("computes the feed-forward a part of the sequence at a time", OFF, "tiled_mlp"),
        ("is another loss, which keeps other tensors", OFF, "use_eaft"),
        ("is a plugin that is not read", (*OFF, *READ_PLUGINS), "plugins"),
        ("gathers in 8 bits", OFF, "fp8_enable_fsdp_float8_all_gather"),
        ("keeps norms in float32", OFF, "fp32_norms fp32_norm_classes"),
    ),
    bounded={
        "neftune_noise_alpha": Bound("noise of the size of the embeddings' output, for a moment of the forward"),
        "noisy_embedding_alpha": Bound("noise of the size of the embeddings' output, for a moment of the forward"),
        "tf32": Bound("products in float32 may take a fraction of the time; the memory stays", (*OFF, "auto")),
        "pad_to_multiple_of": Bound("sequences may be longer than sequence_len by less than this"),
        "ring_attn_func": Bound("how the ranks of context parallelism exchange keys and values; a ring is counted"),
        "resize_token_embeddings_to_32x": Bound("up to 31 more rows of the token table"),
        "tokens": Bound("a few more rows of the token table"),
        "added_tokens_overrides": Bound("other tokens in the place of reserved ones"),
        "fix_untrained_tokens": Bound("rows of the token table are set before training"),
        "reinit_weights": Bound("weights are set before training"),
        "embeddings_skip_upcast": Bound("the token table and the head stay in 16 bits"),
        "liger_rms_norm": Bound(FUSED, kernels={"norm": "fused"}),
        "liger_layer_norm": Bound(FUSED, kernels={"norm": "fused"}),
        "liger_glu_activation": Bound(FUSED, kernels={"activation": "fused"}),
        "liger_swiglu": Bound(FUSED, kernels={"activation": "fused"}),
        "liger_rope": Bound("a kernel that turns queries and keys in place"),
    },
).joined(FSDP)  # fmt: skip
