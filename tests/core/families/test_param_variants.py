"""Parameters equal those of transformers' classes for every key that adds or takes away parameters, in small models."""

from __future__ import annotations

from typing import Any

import pytest

from loadgauge.core.estimate.states.parameters import parameters
from loadgauge.core.families import from_dict
from meta_models import active_size, has_class, total_size

SMALL = {"hidden_size": 64, "num_hidden_layers": 5, "num_attention_heads": 4, "vocab_size": 97, "pad_token_id": 0}
GATED = {**SMALL, "intermediate_size": 96, "num_key_value_heads": 2}
NARROW = {"ffn_dim": 90, "word_embed_proj_dim": 32}
LABELS = {"id2label": {"0": "a", "1": "b", "2": "c"}}
TASKS = ("ForCausalLM", "Model", "ForSequenceClassification")
BIASED = {"attention_bias": True, "mlp_bias": True}

HYBRIDS = {
    "bamba": "Bamba",
    "falcon_h1": "FalconH1",
    "granitemoehybrid": "GraniteMoeHybrid",
    "jamba": "Jamba",
    "lfm2": "Lfm2",
    "lfm2_moe": "Lfm2Moe",
    "mamba2": "Mamba2",
    "minimax": "MiniMax",
    "nemotron_h": "NemotronH",
    "qwen3_5_moe_text": "Qwen3_5Moe",
    "qwen3_5_text": "Qwen3_5",
    "qwen3_next": "Qwen3Next",
}
FOUR = {**SMALL, "num_hidden_layers": 4}
EVEN = {**GATED, "num_hidden_layers": 4}
SCAN = {"mamba_n_heads": 4, "mamba_n_groups": 2, "mamba_d_state": 24, "mamba_d_conv": 3}
MIXED = dict.fromkeys(("attention_bias", "mlp_bias", "mamba_proj_bias", "projectors_bias"), True)
HALF = ["mamba", "attention", "mamba", "attention"]
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 8, "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 3, "head_dim": 24, "attention_bias": True,
}  # fmt: skip
DOUBLE = {"vocab_size": 97, "hidden_size": 64, "num_heads": 4, "head_dim": 32, "num_hidden_layers": 3}
LETTERS = {**EVEN, "head_dim": 24, "mamba_num_heads": 6, "mamba_head_dim": 8, "ssm_state_size": 12, "n_groups": 3}


Config = dict[str, Any]
found: list[Config] = []


def add(model_type: str, architecture: str, *changes: Config) -> None:
    """One small config, of a class that transformers has: not every family has a classifier."""
    if not has_class(architecture):
        assert architecture.endswith("ForSequenceClassification")
        return
    merged = {key: value for change in changes for key, value in change.items()}
    found.append({"model_type": model_type, "architectures": [architecture], **merged})


def decoders() -> None:
    """Llama and its relatives."""
    usual = {
        "llama": "Llama",
        "mistral": "Mistral",
        "qwen2": "Qwen2",
        "qwen3": "Qwen3",
        "phi3": "Phi3",
        "gemma": "Gemma",
        "gemma2": "Gemma2",
        "arcee": "Arcee",
        "granite": "Granite",
        "olmo": "Olmo",
        "olmo2": "Olmo2",
        "olmo3": "Olmo3",
        "smollm3": "SmolLM3",
        "starcoder2": "Starcoder2",
        "phi": "Phi",
        "stablelm": "StableLm",
        "nemotron": "Nemotron",
        "cohere": "Cohere",
        "cohere2": "Cohere2",
        "exaone4": "Exaone4",
        "apertus": "Apertus",
        "seed_oss": "SeedOss",
        "glm": "Glm",
        "glm4": "Glm4",
        "ministral": "Ministral",
        "ministral3": "Ministral3",
        "hunyuan_v1_dense": "HunYuanDenseV1",
        "ernie4_5": "Ernie4_5",
        "helium": "Helium",
    }
    same_width = ("cohere2", "stablelm", "helium")  # their output matrix is as wide as the model
    for model_type, prefix in usual.items():
        width = {"head_dim": 16}  # some classes do not divide for themselves
        for task in TASKS:
            add(model_type, prefix + task, GATED, width, LABELS)
        if model_type not in same_width:
            add(model_type, f"{prefix}ForCausalLM", GATED, {"head_dim": 24, "tie_word_embeddings": True})
        untied = {"tie_word_embeddings": False, "num_key_value_heads": 1}
        add(model_type, f"{prefix}ForCausalLM", GATED, width, BIASED, untied, {"use_bias": True})
    for key in ("attention_bias", "attention_out_bias"):
        add("seed_oss", "SeedOssForCausalLM", GATED, {"head_dim": 16, key: key != "attention_bias"})
    for flag in (True, False):
        add("starcoder2", "Starcoder2ForCausalLM", GATED, {"use_bias": flag, "tie_word_embeddings": flag})
        add("cohere", "CohereForCausalLM", GATED, {"use_qk_norm": flag})
        add("phi", "PhiForCausalLM", GATED, {"qk_layernorm": flag})
        add("persimmon", "PersimmonForCausalLM", SMALL, {"intermediate_size": 96, "qk_layernorm": flag})
        changes = {"use_parallel_residual": flag, "qk_layernorm": not flag, "use_qkv_bias": flag}
        add("stablelm", "StableLmForCausalLM", GATED, changes)
    for task in TASKS:
        add("persimmon", f"Persimmon{task}", SMALL, {"intermediate_size": 96})
    for name in ("Gemma3ForCausalLM", "Gemma3TextModel", "Gemma3TextForSequenceClassification"):
        add("gemma3_text", name, GATED, {"attention_bias": True})


def older() -> None:
    """GPT-2 and its contemporaries."""
    gpt2 = {"n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 99}
    add("gpt2", "GPT2LMHeadModel", gpt2, {"n_inner": 100, "tie_word_embeddings": False, "n_positions": 31})
    add("gpt2", "GPT2Model", {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4})
    add("gpt2", "GPT2ForSequenceClassification", gpt2, {"num_labels": 7})
    for flag in (True, False):
        add("gpt_bigcode", "GPTBigCodeForCausalLM", gpt2, {"multi_query": flag, "n_inner": 70})
    for last in TASKS:
        add("gpt_bigcode", f"GPTBigCode{last}", gpt2, {"num_labels": 4})
        add("gptj", f"GPTJ{last}", gpt2, {"rotary_dim": 8, "n_inner": 70})
        add("codegen", f"CodeGen{last}", gpt2, {"rotary_dim": 8, "n_inner": 70})
        layers = {"num_layers": 3, "attention_types": [[["global", "local"], 1], [["global"], 1]]}
        neo = {"hidden_size": 64, "num_heads": 4, "vocab_size": 99, **layers}
        add("gpt_neo", f"GPTNeo{last}", neo, {"intermediate_size": 70, "max_position_embeddings": 33})
        add("bloom", f"Bloom{last}", {"hidden_size": 64, "n_layer": 3, "n_head": 4, "vocab_size": 99})
        add("mpt", f"Mpt{last}", {"d_model": 64, "n_layers": 3, "n_heads": 4, "vocab_size": 99})
        falcon = {**SMALL, "ffn_hidden_size": 70}
        add("falcon", f"Falcon{last}", falcon, {"bias": True, "multi_query": False})
        add("falcon", f"Falcon{last}", falcon, {"new_decoder_architecture": True, "num_kv_heads": 2})
        xglm = {"d_model": 64, "num_layers": 3, "attention_heads": 4, "ffn_dim": 70, "vocab_size": 99}
        add("xglm", f"XGLM{last}", xglm, {"tie_word_embeddings": False})
        add("biogpt", f"BioGpt{last}", SMALL, {"intermediate_size": 70, "max_position_embeddings": 33})
        add("opt", f"OPT{last}", SMALL, NARROW)
        add("opt", f"OPT{last}", SMALL, NARROW, {"do_layer_norm_before": False, "tie_word_embeddings": False})
        add("opt", f"OPT{last}", SMALL, {"enable_bias": False, "layer_norm_elementwise_affine": False})
        add("opt", f"OPT{last}", SMALL, {"_remove_final_layer_norm": True})
    add("falcon", "FalconForCausalLM", SMALL, {"parallel_attn": False, "alibi": True})
    one = {"new_decoder_architecture": True, "num_kv_heads": 4, "num_ln_in_parallel_attn": 1}
    add("falcon", "FalconForCausalLM", SMALL, one, {"tie_word_embeddings": False})
    add("bloom", "BloomForCausalLM", {"n_embed": 64, "hidden_size": 32, "n_layer": 2, "n_head": 4})
    add("mpt", "MptForCausalLM", {"d_model": 64, "n_layers": 3, "n_heads": 4, "attn_config": {"clip_qkv": 6.0}})
    neox = {**SMALL, "intermediate_size": 80}
    add("gpt_neox", "GPTNeoXForCausalLM", neox, {"attention_bias": False, "tie_word_embeddings": True})
    add("gpt_neox", "GPTNeoXForCausalLM", neox, {"use_parallel_residual": False})
    for last in ("Model", "ForSequenceClassification"):
        add("gpt_neox", f"GPTNeoX{last}", neox)


def encoders() -> None:
    """BERT and its relatives."""
    usual = {"bert": "Bert", "roberta": "Roberta", "xlm-roberta": "XLMRoberta", "xlm-roberta-xl": "XLMRobertaXL"}
    tables = {"intermediate_size": 96, "max_position_embeddings": 40, "type_vocab_size": 3, "num_labels": 5}
    last = ("ForMaskedLM", "Model", "ForSequenceClassification")
    for model_type, prefix in {**usual, "modernbert": "ModernBert"}.items():
        for task in last:
            add(model_type, prefix + task, SMALL, tables)
    add("bert", "BertLMHeadModel", SMALL, {"is_decoder": True})
    add("roberta", "RobertaForCausalLM", SMALL, {"is_decoder": True})
    biases = dict.fromkeys(("attention_bias", "mlp_bias", "norm_bias", "classifier_bias"), True)
    for task in ("ForMaskedLM", "ForSequenceClassification"):
        untied = {"decoder_bias": False, "tie_word_embeddings": False}
        add("modernbert", f"ModernBert{task}", SMALL, {"intermediate_size": 96}, biases, untied)
    for task in last:
        distil = {"dim": 64, "n_layers": 3, "n_heads": 4, "hidden_dim": 70, "vocab_size": 99, "num_labels": 4}
        add("distilbert", f"DistilBert{task}", distil)
        for width in (32, 64):
            add("electra", f"Electra{task}", SMALL, tables, {"embedding_size": width})
            add("albert", f"Albert{task}", SMALL, tables, {"embedding_size": width})
        add("albert", f"Albert{task}", SMALL, tables, {"num_hidden_groups": 2, "inner_group_num": 3})
    add("distilbert", "DistilBertForMaskedLM", {"dim": 64, "n_heads": 4, "tie_word_embeddings": False})
    for task in ("ForPreTraining", "ForCausalLM"):
        add("electra", f"Electra{task}", SMALL, tables, {"embedding_size": 32, "is_decoder": task == "ForCausalLM"})
    add("electra", "ElectraForMaskedLM", SMALL, {"embedding_size": 32, "tie_word_embeddings": False})


def experts() -> None:
    """Mixtures of experts."""
    chosen = {"num_experts_per_tok": 2, "moe_intermediate_size": 40}
    local = {**GATED, **chosen, "num_local_experts": 6}
    usual = {"mixtral": "Mixtral", "phimoe": "Phimoe", "granitemoe": "GraniteMoe", "gpt_oss": "GptOss"}
    for model_type, prefix in {**usual, "minimax_m2": "MiniMaxM2"}.items():
        for task in TASKS:
            add(model_type, prefix + task, local, LABELS)
        add(model_type, f"{prefix}ForCausalLM", local, {"head_dim": 16, "tie_word_embeddings": True}, BIASED)
    add("gpt_oss", "GptOssForCausalLM", local, {"attention_bias": False, "head_dim": 24})
    add("phimoe", "PhimoeForCausalLM", local, {"lm_head_bias": True, "attention_bias": True})
    for width in (0, 50):
        add("granitemoeshared", "GraniteMoeSharedForCausalLM", local, {"shared_intermediate_size": width})
    for model_type, prefix in {"olmoe": "Olmoe", "flex_olmo": "FlexOlmo"}.items():
        add(model_type, f"{prefix}ForCausalLM", GATED, chosen, {"num_experts": 6, "attention_bias": True})
    for task in TASKS:
        add("qwen2_moe", f"Qwen2Moe{task}", GATED, chosen, LABELS, {"shared_expert_intermediate_size": 50})
        add("qwen3_moe", f"Qwen3Moe{task}", GATED, chosen, LABELS, {"num_experts": 6, "head_dim": 24})
        add("deepseek_v3", f"DeepseekV3{task}", _latent(), LABELS)
        add("deepseek_v2", f"DeepseekV2{task}", _latent(), LABELS, {"q_lora_rank": None})
    sparse = {"decoder_sparse_step": 2, "mlp_only_layers": [3], "qkv_bias": False, "num_experts": 6}
    for model_type, prefix in {"qwen2_moe": "Qwen2Moe", "qwen3_moe": "Qwen3Moe"}.items():
        add(model_type, f"{prefix}ForCausalLM", GATED, chosen, sparse, {"attention_bias": True})
    for bias in (True, False):
        changes = {"attention_bias": bias, "mlp_bias": bias, "n_shared_experts": 3, "first_k_dense_replace": 2}
        add("deepseek_v2", "DeepseekV2ForCausalLM", _latent(), changes)
        add("deepseek_v3", "DeepseekV3ForCausalLM", _latent(), changes, {"q_lora_rank": None if bias else 24})
        add("glm4_moe", "Glm4MoeForCausalLM", GATED, chosen, changes, {"n_routed_experts": 8, "use_qk_norm": bias})
        ernie = {"moe_num_experts": 6, "moe_k": 2, "moe_num_shared_experts": 2 * bias, "use_bias": bias}
        add("ernie4_5_moe", "Ernie4_5_MoeForCausalLM", GATED, chosen, ernie)
        ends = {"moe_layer_start_index": 1, "moe_layer_end_index": 3, "moe_layer_interval": 2}
        add("ernie4_5_moe", "Ernie4_5_MoeModel", GATED, chosen, ernie, ends)
        llama4 = {**local, "intermediate_size_mlp": 120, "head_dim": 16, "attention_bias": bias}
        every = {"interleave_moe_layer_step": 2} if bias else {"moe_layers": [0, 4]}
        add("llama4_text", "Llama4ForCausalLM", llama4, every, {"use_qk_norm": bias})
    types = {"mlp_layer_types": ["dense", "sparse", "dense", "sparse", "sparse"]}
    add("glm4_moe_lite", "Glm4MoeLiteForCausalLM", _latent(), types)
    dots = {**GATED, **chosen, "n_routed_experts": 6, "n_shared_experts": 2, "first_k_dense_replace": 1}
    add("dots1", "Dots1ForCausalLM", dots, {"attention_bias": True})
    hunyuan = {**GATED, "num_experts": 6, "head_dim": 16, "attention_bias": True}
    for topk in (2, [1, 2, 3, 2, 1]):
        add("hunyuan_v1_moe", "HunYuanMoEV1ForCausalLM", hunyuan, {"moe_topk": topk})
    ffn = {"ffn_hidden_size": 40, "moe_num_experts": 6, "moe_top_k": 2}
    attn = {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0}
    sizes = {"d_model": 64, "n_heads": 4, "n_layers": 3, "vocab_size": 99, "pad_token_id": 0}
    for task in TASKS[:2]:
        add("dbrx", f"Dbrx{task}", sizes, {"attn_config": attn, "ffn_config": ffn})


def _latent() -> Config:
    ranks = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 12}
    routed = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "n_group": 2}
    return {**GATED, **ranks, **routed, "num_key_value_heads": 4, "topk_group": 1}


def towers() -> None:
    """Text towers of models that see."""
    add("gemma3", "Gemma3ForConditionalGeneration", {"text_config": GATED, "tie_word_embeddings": False})
    add("gemma3", "Gemma3Model", {"text_config": GATED})
    add("llava", "LlavaForConditionalGeneration", {"text_config": {**GATED, "tie_word_embeddings": True}})
    add("llava", "LlavaForConditionalGeneration", {"text_config": {**GATED, "model_type": "mistral"}})
    add("llava", "LlavaModel", {"text_config": {**GATED, "model_type": "qwen2"}})
    for tied in (True, False):
        tie = {"tie_word_embeddings": tied}
        add("mistral3", "Mistral3ForConditionalGeneration", {"text_config": GATED}, tie)
        ministral = {**GATED, "model_type": "ministral3", "head_dim": 16}
        add("mistral3", "Mistral3ForConditionalGeneration", {"text_config": ministral}, tie)
        llama4 = {**GATED, "num_local_experts": 4, "intermediate_size_mlp": 70, "head_dim": 16}
        add("llama4", "Llama4ForConditionalGeneration", {"text_config": llama4}, tie)
        add("llama4", "Llama4ForConditionalGeneration", {"text_config": {**llama4, **tie}})
        for model_type, prefix in {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL"}.items():
            add(model_type, f"{prefix}ForConditionalGeneration", GATED, tie)
            add(model_type, f"{prefix}ForConditionalGeneration", {"text_config": GATED}, tie)
            add(model_type, f"{prefix}ForConditionalGeneration", {"text_config": {**GATED, **tie}})
            add(model_type, f"{prefix}Model", {"text_config": GATED})
        vision = {"vision_config": {"depth": 1, "out_hidden_size": 64, "deepstack_visual_indexes": [0]}}
        add("qwen3_vl", "Qwen3VLForConditionalGeneration", {"text_config": {**GATED, "head_dim": 24}}, tie, vision)
        sparse = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "mlp_only_layers": [1]}
        add("qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration", {"text_config": {**GATED, **sparse}}, tie, vision)


def hybrids() -> None:
    """Hybrids of attention and other mixers, and models without attention."""

    def hybrid(model_type: str, *changes: Config, last: str = "ForCausalLM") -> None:
        add(model_type, HYBRIDS[model_type] + last, *changes)

    hybrid("mamba2", DOUBLE, {"tie_word_embeddings": True, "use_bias": True, "use_conv_bias": False, "n_groups": 2})
    hybrid("mamba2", DOUBLE, {"state_size": 7, "conv_kernel": 2, "expand": 2, "n_groups": 1}, last="Model")
    hybrid("bamba", EVEN, SCAN, MIXED, {"attn_layer_indices": [0, 3], "tie_word_embeddings": True})
    hybrid("bamba", EVEN, SCAN, {"mamba_conv_bias": False, "mamba_expand": 1, "num_key_value_heads": None})
    hybrid("bamba", EVEN, SCAN, {"attn_layer_indices": []}, last="Model")
    granite = {**EVEN, **SCAN, "shared_intermediate_size": 72}
    hybrid("granitemoehybrid", granite, MIXED, {"layer_types": HALF, "num_local_experts": 4})
    hybrid(
        "granitemoehybrid", granite, {"layers_block_type": HALF, "num_local_experts": 0, "tie_word_embeddings": True}
    )
    hybrid("granitemoehybrid", granite, {"num_local_experts": 3, "position_embedding_type": "rope"}, last="Model")
    hybrid("falcon_h1", EVEN, SCAN, MIXED, {"mamba_d_ssm": 96, "mamba_rms_norm": True, "head_dim": 24})
    hybrid("falcon_h1", EVEN, SCAN, {"mamba_d_ssm": None, "mamba_expand": 3, "tie_word_embeddings": True}, last="Model")
    for pattern in ("M*-", "MM-M", "ME*E", "E"):
        hybrid("nemotron_h", LETTERS, {"hybrid_override_pattern": pattern, "n_routed_experts": 5, "use_bias": True})
    hybrid("nemotron_h", LETTERS, {"layers_block_type": ["mamba", "mlp", "attention", "moe"], "mlp_bias": True})
    old = {"mamba_n_groups": 2, "mamba_d_conv": 2, "mamba_conv_bias": False, "mamba_chunk_size": 16}
    hybrid("nemotron_h", LETTERS, old, {"hybrid_override_pattern": "M", "tie_word_embeddings": True}, last="Model")
    jamba = {**EVEN, "mamba_d_state": 5, "mamba_expand": 3, "num_experts": 4, "num_experts_per_tok": 2}
    hybrid("jamba", jamba, {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 7})
    hybrid("jamba", jamba, {"mamba_proj_bias": True, "mamba_conv_bias": False, "expert_layer_period": 4})
    hybrid("jamba", jamba, {"num_experts": 1, "tie_word_embeddings": True}, last="Model")
    hybrid("jamba", jamba, {"num_labels": 5}, last="ForSequenceClassification")
    hybrid("qwen3_next", EVEN, LINEAR, EXPERTS, {"shared_expert_intermediate_size": 32, "full_attention_interval": 2})
    hybrid("qwen3_next", EVEN, LINEAR, EXPERTS, {"mlp_only_layers": [0], "decoder_sparse_step": 2}, last="Model")
    kinds = {"layer_types": ["full_attention", "linear_attention"] * 2, "num_experts": 0, "num_labels": 3}
    hybrid("qwen3_next", EVEN, LINEAR, kinds, last="ForSequenceClassification")
    hybrid("qwen3_5_text", EVEN, LINEAR, {"tie_word_embeddings": True})
    hybrid("qwen3_5_moe_text", FOUR, LINEAR, EXPERTS, {"num_key_value_heads": 1})
    hybrid("lfm2", EVEN, {"full_attn_idxs": [1], "conv_bias": True, "block_multiple_of": 32})
    hybrid("lfm2", EVEN, {"layer_types": ["conv"] * 4, "block_auto_adjust_ff_dim": False, "tie_embedding": False})
    factor = {"block_ff_dim": 200, "block_ffn_dim_multiplier": 1.3, "conv_L_cache": 5, "block_multiple_of": 16}
    hybrid("lfm2", EVEN, factor)
    hybrid("lfm2", EVEN, {**factor, "layer_types": ["full_attention"] * 4}, last="Model")
    mixed = {"layer_types": ["conv", "full_attention"] * 2}
    hybrid("lfm2_moe", EVEN, EXPERTS, mixed, {"num_dense_layers": 1, "conv_bias": True})
    hybrid("lfm2_moe", EVEN, EXPERTS, mixed, {"num_dense_layers": 0, "tie_word_embeddings": False}, last="Model")
    hybrid("minimax", EVEN, {"num_local_experts": 3, "head_dim": 24, "tie_word_embeddings": True})
    hybrid("minimax", EVEN, {"layer_types": ["linear_attention"] * 4, "num_local_experts": 2}, last="Model")
    hybrid("minimax", EVEN, {"num_labels": 4}, last="ForSequenceClassification")
    text = {"text_config": {**EVEN, **LINEAR, **EXPERTS}, "tie_word_embeddings": True}
    add("qwen3_5", "Qwen3_5ForConditionalGeneration", text)
    add("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", text)


for fill in (decoders, older, encoders, experts, towers, hybrids):
    fill()


@pytest.mark.parametrize("config", found, ids=lambda config: config["architectures"][0])
def test_variants(config: Config) -> None:
    sizes = parameters(from_dict(config, class_defaults=True))
    assert sizes.total == total_size(config)
    assert sizes.active == active_size(config)
