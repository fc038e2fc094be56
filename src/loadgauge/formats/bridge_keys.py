"""Keys of Megatron-Bridge's configuration that no idea reads: Megatron's own, a section each, and the container's."""

from __future__ import annotations

from loadgauge.formats.coverage import OFF, Bound, Coverage, stops, words
from loadgauge.formats.megatron_keys import MEGATRON_COVERAGE

SIZES = """
    hidden_size num_attention_heads num_query_groups ffn_hidden_size kv_channels vocab_size num_moe_experts
    moe_ffn_hidden_size
    moe_router_topk  normalization position_embedding_type hidden_dropout attention_dropout bf16 fp16
    share_embeddings_and_output_weights make_vocab_size_divisible_by qk_layernorm add_qkv_bias multi_latent_attention
    moe_shared_expert_intermediate_size moe_layer_freq window_size
"""
OWN = Coverage(
    source="https://docs.nvidia.com/nemo/megatron-bridge (0.2 - 0.3)",
    # The model is that of hf_model_id, whose sizes these are.
    harmless=words(SIZES, "model.")
    | words(
        """
        scheduler.* rng.* logger.* checkpoint.* tokenizer.* profiling.* rerun_state_machine.* ft.* straggler.* validation.*
        inprocess_restart.* nvrx_straggler.* dist.lazy_init dist.external_gpu_device_mapping
        dist.enable_megatron_core_experimental dist.use_decentralized_pg model._target_ optimizer._target_
        ddp._target_ dataset.* tensor_inspect.*
        optimizer.lr optimizer.min_lr optimizer.weight_decay optimizer.bf16 optimizer.fp16 optimizer.sgd_momentum
        peft.alpha peft.dropout_position peft.lora_A_init_method peft.lora_B_init_method peft.a2a_experimental
        peft.lora_dtype peft.exclude_modules peft.canonical_mapping peft.target peft.normalize_moe_lora
        comm_overlap.tp_comm_overlap_cfg comm_overlap.tp_comm_bootstrap_backend comm_overlap.align_param_gather
        comm_overlap.bucket_size comm_overlap.wgrad_deferral_limit comm_overlap.data_parallel_size
        comm_overlap.batch_p2p_comm
        """
    ),
    stops=stops(
        ("is another kind of adapter, or keeps other tensors", OFF, "peft.network_alpha peft.dora"),
        ("computes gradients of weights later, and keeps what they need until then", OFF,
         "comm_overlap.defer_embedding_wgrad_compute comm_overlap.delay_wgrad_compute"),
        ("changes a number format by itself; a recipe by its name is read", OFF,
         """
         mixed_precision.* model.fp8 model.fp4 model.fp8_recipe model.fp4_recipe ddp.fp8_param_gather
          optimizer.fp8_recipe optimizer.use_precision_aware_optimizer optimizer.main_grads_dtype
         """),
        ("keeps moments in another format than float32", (*OFF, "fp32", "torch.float32"),
         "optimizer.exp_avg_dtype optimizer.exp_avg_sq_dtype optimizer.main_params_dtype"),
        ("shards or orders the ranks another way", OFF, "dist.use_torch_fsdp2 dist.use_tp_pp_dp_mapping"),
        ("inspects tensors while training", OFF, "tensor_inspect.enabled"),
        ("trains each expert's adapters apart", OFF, "peft.share_expert_adapters peft.experimental"),
        ("distils from another model", OFF, "distill.* model.kd_config model.teacher"),
    ),
    bounded={
        "peft.dropout": Bound("a dropped copy and a mask of each adapter's input", OFF),
        "train.rampup_batch_size": Bound("the batch grows over the first steps; the last is counted"),
        "train.decrease_batch_size_if_needed": Bound("the batch may be smaller"),
        "train.empty_unused_memory_level": Bound("memory is given back between steps"),
        **{
            f"{section}{name}": Bound("communication beside compute, so a step may take less")
            for section in ("comm_overlap.", "ddp.", "model.", "optimizer.")
            for name in (
                "tp_comm_overlap", "overlap_p2p_comm", "overlap_grad_reduce", "overlap_param_gather",
                "overlap_moe_expert_parallel_comm", "overlap_param_gather_with_optimizer_step",
            )
        },
    },
)  # fmt: skip


def _of_section(section: str) -> Coverage:
    """Megatron's lists, without the patterns of whole groups of names."""
    return MEGATRON_COVERAGE.prefixed(section)


BRIDGE_COVERAGE = OWN
for _section in ("model.", "optimizer.", "ddp.", "train.", "dist."):
    BRIDGE_COVERAGE = BRIDGE_COVERAGE.joined(_of_section(_section))
