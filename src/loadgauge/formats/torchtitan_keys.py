"""Keys of torchtitan that no idea reads, and what is done about each."""

from __future__ import annotations

from loadgauge.formats.coverage import OFF, Bound, Coverage, stops, words

TORCHTITAN_COVERAGE = Coverage(
    source="https://github.com/pytorch/torchtitan/tree/main/torchtitan/config (0.3), and train_configs of 0.1 - 0.2",
    harmless=words(
        """
        hf_assets_path dump_folder training.max_norm training.steps training.gc_freq training.gc_debug training.seed
        training.deterministic training.warmup_steps training.dataset training.dataset_path
        training.num_workers comm.* job.* metrics.* profiler.* profiling.* lr_scheduler.* checkpoint.* validator.*
        validation.*
        dataloader.* tokenizer.* model.tokenizer_path model.hf_assets_path
        debug.seed debug.print_config debug.save_config_file debug.enable_structured_logging debug.spmd_typechecking
        debug.moe_force_load_balance debug.deterministic_warn_only
        parallelism.spmd_backend parallelism.context_parallel_ptrr_mask_key parallelism.context_parallel_load_balancer

        optimizer.param_groups optimizer.param_groups.0.pattern optimizer.param_groups.0.optimizer_kwargs
        optimizer.param_groups.0.optimizer_kwargs.* optimizer.optimizer_factory_kwargs_by_name optimizer.lr optimizer.eps
        optimizer.beta1 optimizer.beta2 optimizer.weight_decay  loss.global_vocab_size
        activation_checkpoint.preserve_rng_state activation_checkpoint.determinism_check activation_checkpoint.debug
        activation_checkpoint.visualize_memory_budget_pareto activation_checkpoint.early_stop
        compile.components compile.backend compile.model compile.loss
        """
    ),
    stops=stops(
        ("makes kernels of its own, which keep other tensors for the backward and take another time", OFF,
         "compile.enable compile.enable_async_tensor_parallel training.compile experimental.enable_async_tensor_parallel"
         " parallelism.enable_async_tensor_parallel"),
        ("shares out layers in a way that is not read; --stage-layers says it", (*OFF, 1),
         "parallelism.module_fqns_per_model_part parallelism.pipeline_parallel_layers_per_stage "
          "parallelism.pipeline_parallel_first_stage_less_layers"
         " parallelism.pipeline_parallel_last_stage_less_layers parallelism.pipeline_parallel_split_points"
         " experimental.pipeline_parallel_split_points"),
        ("is a schedule of a file of its own", OFF, "parallelism.pipeline_parallel_schedule_csv"),
        ("holds buffers of FSDP for good", OFF, "parallelism.enable_fsdp_symm_mem"),
        ("reduces gradients in another format than float32", (*OFF, "float32"), "training.mixed_precision_reduce"),
        ("leaves the loss whole on each rank", OFF, "parallelism.disable_loss_parallel"),
        ("runs the optimizer another way, with other temporaries or states", (*OFF, "fused"), "optimizer.implementation"),
        ("steps the optimizer in the backward", OFF, "optimizer.early_step_in_backward"),
        ("is another optimizer step", (*OFF, True), "optimizer.fused"),
        ("computes chunks of the loss in another number", (*OFF, 8), "loss.num_chunks"),
        ("is another loss", OFF, "loss.loss_fn"),
        ("keeps some matrix products, by their shapes", OFF,
         "activation_checkpoint.force_recompute_mm_shapes_by_fqns "
          "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns"),
        ("is what torch.compile chooses to keep", (*OFF, 0.5), "activation_checkpoint.memory_budget"),
        ("changes the sharding of expert ranks", (*OFF, 1), "parallelism.expert_tensor_parallel_degree"),
        ("converts layers to another number format or adds adapters", OFF, "model.converters model.converters.* float8.* mx.*"
         " quantize.* "),
        ("trains replicas apart", OFF, "fault_tolerance.*"),
        ("changes how the job runs", OFF, "experimental.* override.*  override"),
    ),
    bounded={
        "debug.deterministic": Bound("slower kernels, so a step may take longer"),
        "debug.batch_invariant": Bound("slower kernels, so a step may take longer"),
        "debug.detect_anomaly": Bound("slower, as each operation is checked"),
        "experimental.custom_import": Bound("imports a module of yours, which is not read"),
        "experimental.custom_args_module": Bound("imports a module of yours, which is not read"),
    },
)  # fmt: skip
