"""Keys of LLaMA-Factory that no idea reads, and what is done about each."""

from __future__ import annotations

from loadgauge.formats.coverage import OFF, Bound, Coverage, stops, words
from loadgauge.formats.huggingface_keys import TRAINING

LLAMAFACTORY_COVERAGE = Coverage(
    source="https://github.com/hiyouga/LLaMA-Factory/tree/main/src/llamafactory/hparams (0.9)",
    # Packed or not, no sequence is longer than cutoff_len, which is what is counted. Of an optimizer, a loss or a stage
    # that stops the answer, the arguments of its own say nothing without it.
    harmless=words(
        """
        cache_dir use_fast_tokenizer split_special_tokens init_special_tokens model_revision low_cpu_mem_usage
        rope_scaling use_reentrant_gc train_from_scratch infer_backend infer_dtype offload_folder use_kv_cache
        hf_hub_token ms_hub_token om_hub_token print_param_status trust_remote_code quantization_device_map
        image_max_pixels image_min_pixels image_do_pan_and_scan crop_to_patches video_max_pixels video_min_pixels
        video_fps video_maxlen use_audio_in_video audio_sampling_rate image_resolution video_resolution
        export_dir export_size export_device export_quantization_bit export_quantization_dataset
        export_quantization_nsamples export_quantization_maxlen export_legacy_format export_hub_model_id
        kt_weight_path kt_expert_checkpoint_path kt_use_lora_experts kt_lora_expert_num kt_lora_expert_intermediate_size
        vllm_maxlen vllm_gpu_util vllm_enforce_eager vllm_max_lora_rank vllm_config sglang_maxlen sglang_mem_fraction
        sglang_tp_size sglang_config sglang_lora_backend compute_dtype device_map model_max_length block_diag_attn

        template dataset eval_dataset dataset_dir media_dir train_on_prompt mask_history streaming buffer_size
        mix_strategy interleave_probs overwrite_cache preprocessing_batch_size preprocessing_num_workers max_samples
        eval_num_beams ignore_pad_token_for_loss val_size eval_on_each_dataset packing neat_packing tool_format
        default_system enable_thinking preserve_thinking tokenized_path data_shared_file_system image_dir

        sortish_sampler predict_with_generate generation_max_length generation_num_beams generation_config
        ray_init_kwargs ray_run_name ray_storage_path ray_storage_filesystem resources_per_worker placement_strategy
        master_addr master_port fp8_backend fp8_enable_fsdp_float8_all_gather
        enable_torch_profiler profiler_output_dir profiler_wait_steps profiler_warmup_steps profiler_active_steps
        profiler_repeat profiler_record_shapes profiler_profile_memory profiler_with_stack profile_modules

        freeze_trainable_layers freeze_trainable_modules freeze_extra_modules module_dropout oft_rank oft_block_size
        oft_target create_new_adapter lora_alpha loraplus_lr_ratio loraplus_lr_embedding use_rslora pissa_init
        pissa_iter pissa_convert pref_beta pref_ftx pref_bco_weight pref_loss dpo_label_smoothing kto_chosen_weight
        kto_rejected_weight simpo_gamma ppo_buffer_size ppo_epochs ppo_score_norm ppo_target ppo_whiten_rewards ref_model
        ref_model_adapters ref_model_quantization_bit reward_model reward_model_adapters reward_model_quantization_bit
        reward_model_type ld_alpha galore_target galore_rank galore_update_interval galore_scale galore_proj_type
        galore_layerwise apollo_target apollo_rank apollo_update_interval apollo_scale apollo_proj apollo_proj_type
        apollo_scale_type apollo_layerwise apollo_scale_front badam_mode badam_start_block badam_switch_mode
        badam_switch_interval badam_update_ratio badam_mask_mode badam_verbose hyper_parallel_args asft_alpha eaft_alpha
        use_swanlab swanlab_project swanlab_workspace swanlab_run_name swanlab_mode swanlab_api_key swanlab_logdir
        swanlab_lark_webhook_url swanlab_lark_secret freeze_vision_tower freeze_multi_modal_projector compute_accuracy
        disable_shuffling early_stopping_steps plot_loss include_effective_tokens_per_second

        do_sample temperature top_p top_k num_beams max_length max_new_tokens repetition_penalty length_penalty
        skip_special_tokens
        """
    ),
    stops=stops(
        ("is not what is estimated: supervised fine-tuning (sft) and pre-training (pt) are; other stages hold other models,"
         " losses or completions in memory", ("sft", "pt"), "stage"),
        ("continues adapters whose rank and layers are in files of their own", OFF, "adapter_name_or_path adapter_folder"),
        ("changes attention", OFF, "shift_attn mixture_of_depths"),
        ("trains in Unsloth's kernels, which keep other tensors", OFF, "use_unsloth"),
        ("moves the checkpoints to the host", OFF, "use_unsloth_gc"),
        ("runs in kernels that are not read", OFF, "use_v1_kernels use_kt"),
        ("adds a loss of the router, which keeps the scores of all experts", OFF, "moe_aux_loss_coef"),
        ("casts to float32", OFF, "upcast_layernorm upcast_lmhead_output"),
        ("starts the job on so many workers; say it with --gpus", (*OFF, 1), "ray_num_workers use_ray"),
        ("is 8-bit products through torchao in accelerate, which are not read", OFF, "fp8"),
        ("trains and keeps whole matrices beside the adapters", OFF, "additional_target"),
        ("adds magnitudes of the weights, which are trained and kept (DoRA)", OFF, "use_dora"),
        ("has other optimizer states than a moment of each weight", OFF, "use_galore use_apollo use_badam use_adam_mini"),
        ("trains some of the layers only", OFF, "use_llama_pro freeze_language_model"),
        ("trains with Megatron-Core or another engine", OFF, "use_mca use_hyper_parallel"),
        ("is another loss, which keeps other tensors", OFF, "use_dft_loss use_asft_loss use_eaft_loss"),
    ),
    bounded={
        name: Bound("a few more rows of the token table", OFF)
        for name in ("resize_vocab", "add_tokens", "add_special_tokens", "new_special_tokens_config")
    },
).joined(TRAINING)  # fmt: skip
