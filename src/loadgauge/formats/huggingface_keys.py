"""Keys of transformers' TrainingArguments and TRL's SFT that no idea reads, and what is done about each."""

from __future__ import annotations

from loadgauge.formats.coverage import ANY, OFF, Bound, Coverage, stops, words

COMPILED = "makes kernels of its own, which keep other tensors for the backward and take another time"
OTHER_TRAINER = (
    "is an argument of another trainer than SFT, whose models, completions or losses take memory and time of their own"
)

FSDP_NAMES = """
    transformer_layer_cls_to_wrap auto_wrap_policy backward_prefetch use_orig_params sync_module_states
    cpu_ram_efficient_loading state_dict_type limit_all_gathers xla_fsdp_settings
"""
FSDP = Coverage(
    source="https://huggingface.co/docs/transformers/fsdp",
    harmless=words(FSDP_NAMES, "fsdp_config.") | words(FSDP_NAMES, "fsdp_config.fsdp_") |
     words("fsdp_transformer_layer_cls_to_wrap"),
    stops=stops(
        ("wraps other units than whole layers, so other amounts of weights are gathered at once", OFF,
         "fsdp_config.min_num_params fsdp_config.fsdp_min_num_params fsdp_min_num_params"),
        ("is for TPUs", OFF, "fsdp_config.xla fsdp_config.xla_fsdp_v2 fsdp_config.xla_fsdp_grad_ckpt"),
        ("casts weights and gradients in a way of its own", OFF,
         "fsdp_config.mixed_precision_policy fsdp_config.fsdp_mixed_precision_policy"),
        ("holds the weights of one more layer at a time", OFF, "fsdp_config.forward_prefetch "
         "fsdp_config.fsdp_forward_prefetch"),
    ),
)  # fmt: skip

TRAINING = Coverage(
    source="https://huggingface.co/docs/transformers/main_classes/trainer#transformers.TrainingArguments (4.40 - 5.23)",
    harmless=words(
        """
        output_dir overwrite_output_dir num_train_epochs max_steps learning_rate lr_scheduler_type lr_scheduler_kwargs
        lr_scheduler_kwargs.* warmup_steps warmup_ratio weight_decay adam_beta1 adam_beta2 adam_epsilon max_grad_norm
        average_tokens_across_devices seed data_seed

        do_train do_eval do_predict bf16_full_eval fp16_full_eval eval_strategy evaluation_strategy eval_steps eval_delay
        per_device_eval_batch_size per_gpu_eval_batch_size prediction_loss_only eval_on_start eval_do_concat_batches
        eval_use_gather_object eval_accumulation_steps include_for_metrics include_inputs_for_metrics batch_eval_metrics
        include_num_input_tokens_seen include_tokens_per_second load_best_model_at_end metric_for_best_model
        greater_is_better use_legacy_prediction_loop past_index

        logging_strategy logging_steps logging_first_step log_on_each_node logging_nan_inf_filter logging_dir log_level
        log_level_replica disable_tqdm report_to run_name project trackio_space_id trackio_bucket_id
        trackio_static_space_id skip_memory_metrics debug

        save_only_model save_strategy save_steps save_on_each_node save_total_limit save_safetensors
        enable_jit_checkpoint push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push
        hub_revision push_to_hub_model_id push_to_hub_organization push_to_hub_token ignore_data_skip
        restore_callback_states_from_checkpoint resume_from_checkpoint

        dataloader_drop_last dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers
        dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order remove_unused_columns
        label_names train_sampling_strategy group_by_length length_column_name accelerator_config
        accelerator_config.even_batches accelerator_config.dispatch_batches accelerator_config.use_seedable_sampler
        accelerator_config.non_blocking accelerator_config.use_configured_state

        ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend ddp_timeout
        local_rank ray_scope torch_empty_cache_steps
        gradient_checkpointing_kwargs.use_reentrant activation_checkpointing_kwargs.use_reentrant
        gradient_checkpointing_kwargs activation_checkpointing_kwargs fsdp_config parallelism_config liger_kernel_config
        """
    ),
    stops=stops(
        ("are arguments of an optimizer that are not read (GaLore's and APOLLO's rank among them)", OFF, "optim_args"),
        ("chooses layers for an optimizer of low rank (GaLore, APOLLO), whose states are smaller", OFF,
         "optim_target_modules"),
        ("keeps the log-probabilities of all words once more", OFF, "label_smoothing_factor"),
        (COMPILED, OFF, "torch_compile torch_compile_backend torch_compile_mode torchdynamo jit_mode_eval"),
        ("chooses the batch when the job runs; take it out and give the batch", OFF, "auto_find_batch_size"),
        ("keeps keys and values of all layers", OFF, "use_cache"),
        ("is not a GPU", OFF, "use_cpu no_cuda use_mps_device use_ipex tpu_num_cores tpu_metrics_debug"),
        ("splits a batch over the ranks, so that it means another number of sequences", OFF,
         "accelerator_config.split_batches split_batches dispatch_batches"),
        ("accumulates gradients in a way of its own", OFF, "accelerator_config.gradient_accumulation_kwargs.*"),
        ("shares out the model; say it with --tp, --cp and --replicas", (*OFF, 1), "parallelism_config.*"),
        ("chooses some of Liger's kernels", OFF, "liger_kernel_config.*"),
        ("is another name of the batch of a device; per_device_train_batch_size is read", OFF, "per_gpu_train_batch_size"),
        ("is an engine that is not read", OFF, "sharded_ddp fp16_opt_level half_precision_backend mp_parameters torch_xla"),
        ("says how layers run again in a way that is not read", OFF,
         "gradient_checkpointing_kwargs.* activation_checkpointing_kwargs.*"),
    ),
    bounded={
        "neftune_noise_alpha": Bound("noise of the size of the embeddings' output, for a moment of the forward"),
        "tf32": Bound("products in float32 may take a fraction of the time; the memory stays"),
        "full_determinism": Bound("slower kernels, so a step may take longer; the memory stays"),
    },
).joined(FSDP)  # fmt: skip

SCRIPTS = Coverage(
    source="https://github.com/huggingface/transformers/tree/main/examples/pytorch/language-modeling;"
    " https://github.com/huggingface/alignment-handbook/tree/main/recipes",
    harmless=words(
        """
        config_name tokenizer_name tokenizer_name_or_path cache_dir use_fast_tokenizer model_revision revision token
        model_code_revision base_model_revision trust_remote_code low_cpu_mem_usage dataset_name dataset_config_name
        train_file validation_file test_file max_train_samples max_eval_samples streaming overwrite_cache
        validation_split_percentage preprocessing_num_workers keep_linebreaks data_path eval_data_path
        dataset dataset_dir dataset_mixer dataset_mixer.* dataset_mixture dataset_mixture.* dataset_splits dataset_configs
        dataset_kwargs dataset_kwargs.* chat_template text_column truncation_side auto_insert_empty_system_msg
        hub_model_revision system_prompt wandb_project wandb_entity wandb_run_group wandb_log_unique_prompts benchmarks
        callbacks overwrite_hub_revision dataset_prompt_column data_files
        """
    ),
    stops=stops(
        ("makes a model of other sizes than its name says", OFF, "config_overrides model_type"),
        ("is read by other trainers", OFF, "reward_model_path sft_model_path"),
    ),
)

TRL_OWN = Coverage(
    source="https://huggingface.co/docs/trl/sft_trainer (0.12 - 1.16)",
    # Packed or not, no sequence is longer than max_length, which is what is counted.
    harmless=words(
        """
        trust_remote_code chat_template_path dataset_text_field dataset_num_proc dataset_batch_size eos_token pad_token
        truncation_mode shuffle_dataset packing packing_strategy padding_free eval_packing completion_only_loss
        assistant_only_loss chars_per_token num_of_sequences model_revision lora_alpha lora_task_type use_rslora
        dataset_name dataset_config dataset_train_split dataset_test_split dataset_streaming ignore_bias_buffers
        bnb_4bit_quant_storage model_init_kwargs model_init_kwargs.revision model_init_kwargs.trust_remote_code
        disable_dropout dataset_split concatenation num_proc
        """
    ),
    stops=stops(
        ("adds magnitudes of the weights, which are trained and kept (DoRA)", OFF, "use_dora"),
        ("trains and keeps whole matrices beside the adapters", OFF, "lora_modules_to_save"),
        ("puts adapters on parameters of experts", OFF, "lora_target_parameters"),
        ("moves activations to the host", OFF, "activation_offloading"),
        ("adds a loss of the router, which keeps the scores of all experts", OFF, "router_aux_loss_coef"),
        ("loads the model in a way that is not read", OFF, "model_init_kwargs.*"),
        (OTHER_TRAINER, ANY,
         """
         beta precompute_ref_log_probs precompute_ref_batch_size loss_weights ld_alpha f_divergence_type
         f_alpha_divergence_coef label_smoothing use_weighting discopop_tau sync_ref_model ref_model_mixup_alpha
         ref_model_sync_steps desirable_weight undesirable_weight center_rewards_coefficient cast_lm_head_to_fp32
         num_generations num_generations_eval max_completion_length ds3_gather_for_generation generation_batch_size
         steps_per_generation temperature top_p top_k min_p generation_kwargs generation_kwargs.* chat_template_kwargs
         chat_template_kwargs.* repetition_penalty cache_implementation use_vllm vllm_mode vllm_model_impl
         vllm_enable_sleep_mode vllm_structured_outputs_regex vllm_server_base_url vllm_server_host vllm_server_port
         vllm_server_timeout vllm_group_port vllm_gpu_memory_utilization vllm_max_model_length vllm_tensor_parallel_size
         num_iterations epsilon delta epsilon_high sapo_temperature_neg sapo_temperature_pos vespo_k_pos vespo_lambda_pos
         vespo_k_neg vespo_lambda_neg importance_sampling_level reward_weights multi_objective_aggregation scale_rewards
         mask_truncated_completions top_entropy_quantile entropy_coef use_adaptive_entropy entropy_coef_min
         entropy_coef_max entropy_coef_delta entropy_target max_tool_calling_iterations
         vllm_importance_sampling_correction vllm_importance_sampling_mode vllm_importance_sampling_clip_max
         vllm_importance_sampling_clip_min vllm_importance_sampling_cap off_policy_mask_threshold use_bias_correction_kl
         log_completions log_multimodal num_completions_to_print log_unique_prompts log_completions_hub_repo
         use_transformers_continuous_batching transformers_continuous_batching_config use_transformers_paged
         normalize_advantages reward_clip_range
         max_prompt_length max_target_length reference_free rpo_alpha generate_during_eval ref_model_init_kwargs
         ref_adapter_name force_use_ref_model reference_model_name simpo_gamma cpo_alpha alpha_simpo
         reward_model_path reward_funcs num_ppo_epochs num_mini_batches whiten_rewards kl_coef cliprange vf_coef
         cliprange_value gamma lam response_length local_rollout_forward_batch_size stop_token missing_eos_penalty
         rloo_k max_new_tokens teacher_model_name_or_path lmbda kd_temperature
         """),
    ),
    bounded={"pad_to_multiple_of": Bound("sequences may be longer than max_length by less than this", (*OFF, "auto"))},
)  # fmt: skip

TRANSFORMERS_COVERAGE = TRAINING.joined(SCRIPTS)
TRL_COVERAGE = TRL_OWN.joined(TRAINING).joined(SCRIPTS)
OTHER_TRAINERS = {
    r"\btrl (dpo|kto|grpo|rloo|reward|orpo|cpo|ppo|gkd|online_dpo|nash_md|xpo|bco|prm)\b": "starts another trainer than SFT",
    r"(?i)(?:^|[\s/])\w*(?:dpo|kto|grpo|rloo|orpo|ppo|gkd|reward)\w*\.py\b": "starts another trainer than SFT",
}
"""Command lines of other trainers."""
