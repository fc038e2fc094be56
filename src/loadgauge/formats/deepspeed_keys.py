"""Keys of DeepSpeed's configuration that no idea reads, and what is done about each."""

from __future__ import annotations

from loadgauge.formats.coverage import OFF, Bound, Coverage, stops, words

AUTO = (*OFF, "auto")
Z, A = "zero_optimization.", "activation_checkpointing."

DEEPSPEED_COVERAGE = Coverage(
    source="https://www.deepspeed.ai/docs/config-json/ (DeepSpeed 0.9 - 0.19)",
    harmless=words(
        """
        steps_per_print gradient_clipping dump_state disable_python_gc zero_allow_untested_optimizer
        zero_force_ds_cpu_optimizer wall_clock_breakdown memory_breakdown dataloader_drop_last log_level
        prescale_gradients gradient_predivide_factor gradient_allreduce_op managed_gradient_accumulation
        use_data_before_expert_parallelism sparse_gradients
        optimizer.params.lr optimizer.params.betas optimizer.params.eps optimizer.params.weight_decay
        optimizer.params.adam_w_mode optimizer.params.torch_adam optimizer.params.bias_correction
        scheduler scheduler.* tensorboard.* wandb.* comet.* csv_monitor.* comms_logger.* flops_profiler.* nebula.*
        checkpoint.* elasticity.enabled autotuning.enabled aio.* timers.* monitor_config.*
        fp16.loss_scale fp16.initial_scale_power fp16.loss_scale_window fp16.hysteresis fp16.consecutive_hysteresis
        fp16.min_loss_scale bf16.check_grad_overflow
        zero_optimization.contiguous_gradients zero_optimization.reduce_scatter
        zero_optimization.use_multi_rank_bucket_allreduce zero_optimization.allgather_partitions
        zero_optimization.compute_grad_norm zero_optimization.load_from_fp32_weights
        zero_optimization.elastic_checkpoint zero_optimization.pipeline_loading_checkpoint
        zero_optimization.override_module_apply zero_optimization.log_trace_cache_warnings
        zero_optimization.enable_sanity_checks zero_optimization.ignore_unused_parameters
        zero_optimization.round_robin_gradients zero_optimization.legacy_stage1
        zero_optimization.stage3_gather_16bit_weights_on_model_save
        zero_optimization.stage3_gather_fp16_weights_on_model_save zero_optimization.memory_efficient_linear
        zero_optimization.parameter_alignment
        zero_optimization.stage3_use_all_reduce_for_fetch_params zero_optimization.stage3_allgather_sequential
        zero_optimization.leaf_module.* zero_optimization.cpu_offload_use_pin_memory
        zero_optimization.offload_param.nvme_path zero_optimization.offload_param.buffer_count
        zero_optimization.offload_param.max_in_cpu zero_optimization.offload_param.pin_memory
        zero_optimization.offload_optimizer.nvme_path zero_optimization.offload_optimizer.buffer_count
        zero_optimization.offload_optimizer.pin_memory zero_optimization.offload_optimizer.pipeline_read
        zero_optimization.offload_optimizer.pipeline_write zero_optimization.offload_optimizer.pipeline
        zero_optimization.offload_optimizer.fast_init zero_optimization.offload_optimizer.cpuadam_cores_perc
        zero_optimization.stage3_module_granularity_threshold
        tensor_parallel.tp.tp_grain_size tensor_parallel.tp.mpu tensor_parallel.tp.tp_group compile.*
        activation_checkpointing.profile activation_checkpointing.synchronize_checkpoint_boundary
        """
    ),
    stops=stops(
        ("reduces gradients in another format than they are summed in", AUTO, "communication_data_type "
         "seq_parallel_communication_data_type"),
        ("keeps whole weights of the layer's quantised copy beside them (ZeRO++)", AUTO,
         f"{Z}zero_quantized_weights {Z}zero_quantized_nontrainable_weights {Z}zero_quantized_gradients"),
        ("keeps a second share of the weights within a machine (ZeRO++)", (*AUTO, 1), f"{Z}zero_hpz_partition_size"),
        ("was removed from DeepSpeed (MiCS)", (), f"{Z}mics_shard_size {Z}mics_hierarchical_params_gather"),
        ("leaves part of the optimizer on the GPU", AUTO, f"{Z}offload_optimizer.super_offload {Z}zenflow.*"),
        ("keeps momentum beside its shards", AUTO, f"{Z}save_muon_momentum_buffer_in_memory"),
        ("does not keep weights or gradients in float32", AUTO,
         "fp16.fp16_master_weights_and_grads bf16.bf16_master_weights_and_grads bf16.bf16_optimizer_states "
          "fp16_master_weights_and_gradients"),
        ("casts in a way of its own", AUTO, "fp16.auto_cast torch_autocast.enabled amp.enabled"),
        ("is an older switch; offload_param.device is read", AUTO, f"{Z}cpu_offload_param"),
        ("adds gradients as they come", AUTO, "bf16.immediate_grad_update"),
        ("all-reduces where the estimate gathers", AUTO, "disable_allgather"),
        ("compiles the model", AUTO, "compile.deepcompile compile.free_activation compile.offload_activation "
         "compile.offload_opt_states compile.offload_parameters compile.autoep_non_moe"),
        ("shares out a checkpoint, or moves it to the host", AUTO,
         f"{A}partition_activations {A}cpu_checkpointing {A}contiguous_memory_optimization"),
        ("shares out the head and the loss", AUTO, "tensor_parallel.vocab_parallel_lm_head"),
        ("shares out layers in a way of its own", (*AUTO, 1),
         "tensor_parallel.tp.tp_size tensor_parallel.preset_model tensor_parallel.partition_config "
          "tensor_parallel.injection_policy_tuple "
         "tensor_parallel.keep_module_on_host tensor_parallel.kernel_inject"),
        ("changes the batch or the length while the job runs", AUTO,
         "data_efficiency.enabled curriculum_learning.enabled elasticity.* autotuning.* progressive_layer_drop.enabled "
         "progressive_layer_drop random_ltd.*"),
        ("computes the rest of a job's layers in other formats or leaves some out", AUTO,
         "compression_training.* sparse_attention sparse_attention.* weight_quantization weight_quantization.* "
          "quantize_training.*"),
        ("shares out layers over stages or experts in the script", (*AUTO, 1), "pipeline.* expert_parallel.* moe.*"),
        ("generates in the training loop", AUTO, "hybrid_engine.*"),
        ("is momentum of an optimizer that is not read", AUTO, "optimizer.legacy_fusion"),
    ),
    bounded={
        # Bytes of an element; of gradients there are two buckets where communication overlaps.
        f"{Z}reduce_bucket_size": Bound("buckets of 500,000,000 gradients are counted", (5e8,), each=4, usual=5e8),
        f"{Z}allgather_bucket_size": Bound("buckets of 500,000,000 weights are counted", (5e8,), each=2, usual=5e8),
        f"{Z}overlap_comm": Bound("whether buckets are reduced beside the backward; what --overlap says is counted"),
        f"{Z}stage3_prefetch_bucket_size": Bound("weights that are gathered ahead", (5e7,), each=2, usual=5e7),
        f"{Z}stage3_max_live_parameters": Bound(
            "weights that stay gathered while they may be needed again; those of one layer and the next are counted",
            (*AUTO, 1e9),
        ),
        f"{Z}stage3_max_reuse_distance": Bound("how soon gathered weights are dropped", (*AUTO, 1e9)),
        f"{Z}stage3_param_persistence_threshold": Bound("small weights stay whole on every GPU", (*AUTO, 1e5)),
        f"{Z}stage3_model_persistence_threshold": Bound("weights that stay whole on every GPU, all together", (*AUTO,
         2**63 - 1), each=2),
        f"{Z}sub_group_size": Bound("weights that are stepped at once with an optimizer on the host", (*AUTO, 1e9)),
        f"{Z}offload_param.buffer_size": Bound("buffers for weights from the host", AUTO, each=2, usual=1e8),
        f"{A}number_checkpoints": Bound("how many checkpoints memory is laid out for"),
        "tensor_parallel.dtype": Bound("what weights are cast to", AUTO),
        "tensor_parallel.tp_overlap_comm": Bound("communication beside compute, so a step may take less"),
        "tensor_parallel.vocab_parallel_ce_backend": Bound("how the loss is shared out", (*AUTO, "torch")),
    },
)  # fmt: skip
