"""Keys of verl that no idea reads, and what is done about each.

What is read is the actor's update. Between the updates others use the GPUs: generation, the reference, a critic, a reward
model. verl gives their memory back, or moves it to the host, before the update where it is told to; their time is never
counted, and that is said.
"""

from __future__ import annotations

from loadgauge.formats.coverage import OFF, Bound, Coverage, stops, words
from loadgauge.formats.megatron_keys import MEGATRON_COVERAGE

A = "actor_rollout_ref.actor."
F, M, MODEL = f"{A}fsdp_config.", f"{A}megatron.", "actor_rollout_ref.model."
NO_CRITIC = (
    *("grpo", "rloo", "remax", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "opo", "grpo_passk", "gpg"),
    *("rloo_vectorized", "grpo_vectorized", "optimal_token_baseline", "gdpo", "tir_optimal_token_baseline"),
)
"""Advantage estimators without a critic."""
UPDATE_ONLY = "what is moved to the host between the updates; in the update it is on the GPU, as is counted"

VERL_COVERAGE = Coverage(
    source="https://verl.readthedocs.io/en/latest/examples/config.html (0.4 - 0.9)",
    harmless=words(
        """
        data.* trainer.* transfer_queue.* skip.* ray_kwargs.* ray_init.* global_profiler.* checkpoint.* hydra.*
        custom_reward_function.* sandbox_fusion.* algorithm._target_ algorithm.gamma algorithm.lam
        algorithm.norm_adv_by_std_in_grpo algorithm.filter_groups.* algorithm.kl_penalty algorithm.kl_ctrl.*
        algorithm.use_pf_ppo algorithm.pf_ppo.* algorithm.rollout_correction.* algorithm.rollout_is
        algorithm.rollout_is_threshold algorithm.kl_coef
        actor_rollout_ref._target_ actor_rollout_ref.hybrid_engine actor_rollout_ref.nccl_timeout optim.*
        """
    )
    | words(
        """
        _target_ rollout_n clip_ratio clip_ratio_low clip_ratio_high clip_ratio_c tau_pos tau_neg freeze_vision_tower
        policy_loss.* loss_agg_mode loss_scale_factor use_torch_compile kl_loss_coef kl_loss_type ppo_epochs shuffle
        data_loader_seed checkpoint.* profiler.* grad_clip use_remove_padding entropy_from_logits_with_chunking
        entropy_from_logits_chunk_size entropy_checkpointing pad_to_length load_weight tis_imp_ratio_cap
        optim._target_ optim.lr optim.lr_warmup_steps_ratio optim.total_training_steps optim.weight_decay
        optim.lr_warmup_steps optim.betas optim.clip_grad optim.min_lr_ratio optim.num_cycles optim.lr_scheduler_type
        optim.zero_indexed_step optim.warmup_style optim.override_optimizer_config optim.lr_warmup_init
        optim.lr_decay_steps optim.lr_decay_style optim.min_lr optim.weight_decay_incr_style optim.lr_wsd_decay_style
        optim.lr_wsd_decay_steps optim.use_checkpoint_opt_param_scheduler optim.muon_* qat.*
        fsdp_config._target_ fsdp_config.use_orig_params fsdp_config.seed fsdp_config.entropy_from_logits_with_chunking
        fsdp_config.entropy_from_logits_chunk_size fsdp_config.use_torch_compile fsdp_config.entropy_checkpointing
        fsdp_config.pad_to_length fsdp_config.pad_to_length_bucket fsdp_config.forward_only fsdp_config.strategy
        fsdp_config.qat.* fsdp_config.turbo_config.* fsdp_config.wrap_policy.transformer_layer_cls_to_wrap
        megatron._target_ megatron.use_dist_checkpointing megatron.dist_checkpointing_path
        megatron.dist_checkpointing_prefix megatron.dist_ckpt_optim_fully_reshardable
        megatron.distrib_optim_fully_reshardable_mem_efficient megatron.entropy_from_logits_with_chunking
        megatron.entropy_from_logits_chunk_size megatron.seed megatron.override_ddp_config megatron.extra
        megatron.override_mcore_model_config megatron.use_mbridge megatron.vanilla_mbridge megatron.use_remove_padding
        megatron.pad_bshd_to_minibatch_max megatron.pad_to_length megatron.pad_to_length_bucket megatron.forward_only
        megatron.router_replay.* megatron.qat.* megatron.load_weight
        """,
        A,
    )
    | words(
        """
        _target_ tokenizer_path use_shm trust_remote_code custom_chat_template use_remove_padding lora_alpha
        override_config fused_kernel_options.* tiled_mlp.num_shards mtp.* lora.*
        """,
        MODEL,
    )
    | words("_target_ tokenizer_path use_shm trust_remote_code custom_chat_template use_remove_padding lora_alpha", "model."),
    stops=stops(
        ("is the micro-batch of all GPUs together, which verl has dropped; ppo_micro_batch_size_per_gpu is read", OFF,
         f"{A}ppo_micro_batch_size"),
        ("keeps what generation holds on the GPU through the update; with True it is given back, which is counted", (True,),
         "actor_rollout_ref.rollout.free_cache_engine"),
        ("is another optimizer than AdamW of torch.optim", ("AdamW", "adamw", "adam", "torch.optim"),
         f"{A}optim.optimizer {A}optim.optimizer_impl"),
        ("wraps other units than whole layers", OFF, f"{F}wrap_policy.min_num_params {F}wrap_policy.*"),
        ("holds the weights of one more layer at a time", OFF, f"{F}forward_prefetch"),
        ("is read as actor.ulysses_sequence_parallel_size", (*OFF, 1), f"{F}ulysses_sequence_parallel_size"),
        ("keeps gradients whole between micro-batches", OFF, f"{F}use_no_sync_for_gradient_accumulation"),
        ("computes in another format", ("bfloat16", "bf16"), f"{F}dtype {M}dtype"),
        ("trains through quantised copies of the weights", OFF, f"{A}qat.enable {F}qat.enable {M}qat.enable"),
        ("keeps the squares of all probabilities", OFF, f"{A}calculate_sum_pi_squared"),
        ("computes prompts once for all their answers", OFF, f"{A}use_prefix_grouper"),
        ("shares out long sequences another way", OFF, f"{M}dynamic_context_parallel {M}max_seqlen_per_dp_cp_rank"),
        ("shards with Megatron's FSDP", OFF, f"{M}use_megatron_fsdp"),
        ("overrides Megatron's settings in a way that is not read", OFF, f"{M}override_ddp_config.* "
         f"{M}override_mcore_model_config.* {M}extra.*"),
        ("changes attention", (*OFF, "auto", "flash", "fused"), f"{M}override_transformer_config.attention_backend"),
        ("keeps gradients or states in another format than float32", (*OFF, "fp32"),
         f"{A}optim.use_precision_aware_optimizer {A}optim.main_grads_dtype {A}optim.exp_avg_dtype "
          f"{A}optim.exp_avg_sq_dtype"),
        ("shards the optimizer by layers", OFF, f"{A}optim.use_layer_wise_distributed_optimizer"),
        ("takes sizes from another file", OFF, f"{MODEL}hf_config_path {MODEL}override_config.*"),
        ("moves activations to the host", OFF, f"{MODEL}enable_activation_offload model.enable_activation_offload"),
        ("leaves some layers without adapters", OFF, f"{MODEL}exclude_modules"),
        ("continues adapters whose rank and layers are in files of their own", OFF, f"{MODEL}lora_adapter_path"),
        ("computes the feed-forward a part of the sequence at a time", OFF, f"{MODEL}tiled_mlp.enabled"),
        ("trains a head of the next tokens as well", OFF, f"{MODEL}mtp.enable {MODEL}mtp.enable_train"),
        ("puts adapters on Megatron's layers", OFF, f"{MODEL}lora.rank"),
        ("puts adapters on the layers", OFF, "model.lora_rank"),
        ("distils from another model", OFF, "distillation.enabled distillation.enable"),
    ),
    bounded={
        "actor_rollout_ref.rollout.*": Bound(
            "generation between the updates: its time is not counted, and its memory as far as it is given back"
        ),
        "actor_rollout_ref.ref.*": Bound("the reference's log-probabilities, and the old ones: their time is not counted"),
        "critic.*": Bound("a critic's own updates: their time is not counted, and its memory is not"),
        "reward_model.*": Bound("scoring by a reward model: its time and memory are not counted"),
        "reward.*": Bound("scoring of the answers: its time is not counted, nor a reward model's memory"),
        "reward_manager.*": Bound("scoring of the answers: its time is not counted"),
        "distillation.*": Bound("distillation, if it is on, is not counted"),
        "actor_rollout_ref.rollout.temperature": Bound(
            "logits are divided by it, into a copy for a moment", (*OFF, 1), kernels={"loss": "compiled"}
        ),
        f"{A}entropy_coeff": Bound("the entropy of every token, of which the softmax may be kept", kernels={"loss":
         "float32"}),
        f"{A}calculate_entropy": Bound("the entropy of every token, of which the softmax may be kept",
         kernels={"loss": "float32"}),
        f"{A}use_kl_loss": Bound("a reference, whose weights are on the host with FSDP, and may stay with Megatron",
         parameter=2),
        "algorithm.use_kl_in_reward": Bound("a reference, whose weights are on the host with FSDP, and may stay with "
         "Megatron", parameter=2),
        "algorithm.adv_estimator": Bound(
            "a critic of the same size beside the actor, unless it is moved to the host between its updates",
             NO_CRITIC, parameter=16
        ),
        f"{F}full_determinism": Bound("slower kernels, so a step may take longer"),
        f"{MODEL}external_lib": Bound("a module of yours is imported, which is not read"),
        f"{MODEL}use_liger": Bound("kernels that keep fewer tensors", kernels={"norm": "fused", "activation": "fused"}),
        "model.use_liger": Bound("kernels that keep fewer tensors", kernels={"norm": "fused", "activation": "fused"}),
        **{key: Bound(UPDATE_ONLY) for key in (
            f"{F}param_offload", f"{F}optimizer_offload", f"{M}param_offload", f"{M}optimizer_offload", f"{M}grad_offload",
        )},
    },
).joined(MEGATRON_COVERAGE.prefixed(f"{M}override_transformer_config."))  # fmt: skip
