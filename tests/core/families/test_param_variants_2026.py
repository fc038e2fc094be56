"""Parameters equal those of transformers' classes for every key that adds or takes away parameters, in families of 2025 and
2026: small models.
"""

from __future__ import annotations

from typing import Any

import pytest

from loadgauge.core.estimate.states.parameters import parameters
from loadgauge.core.families import from_dict
from meta_models import active_size, total_size

SMALL = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 97,
    "num_key_value_heads": 2, "head_dim": 24, "pad_token_id": 0,
}  # fmt: skip
LATENT = {
    **SMALL, "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 4,
    "v_head_dim": 16,
}  # fmt: skip
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "n_group": 2, "topk_group": 1}
INDEX = {"index_topk": 8, "index_n_heads": 3, "index_head_dim": 20}
MIXED = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
HALF = ["linear_attention", "full_attention"] * 2
GEMMA4 = {**SMALL, "layer_types": MIXED, "vocab_size_per_layer_input": 61, "hidden_size_per_layer_input": 0}
COMPRESSED = {
    "hidden_size": 64, "num_attention_heads": 4, "head_dim": 32, "vocab_size": 97, "q_lora_rank": 24, "o_groups": 2,
    "o_lora_rank": 20, "moe_intermediate_size": 40, "n_routed_experts": 8, "num_experts_per_tok": 3, **INDEX,
}  # fmt: skip
SPLIT = {"linear_num_heads": 3, "linear_head_dim": 16, "linear_conv_kernel_dim": 3}

CASES: dict[str, dict[str, Any]] = {
    "afmoe": {"model_type": "afmoe", **SMALL, **EXPERTS, "num_shared_experts": 2, "num_dense_layers": 2},
    "afmoe-biased": {"model_type": "afmoe", **SMALL, **EXPERTS, "attention_bias": True, "tie_word_embeddings": True},
    "bailing_hybrid": {
        "model_type": "bailing_hybrid", **LATENT, **EXPERTS, "layer_group_size": 2, "num_expert_group": 2, "topk_group": 1,
    },
    "cwm": {"model_type": "cwm", **SMALL, "mlp_bias": True},
    "deepseek_v32": {"model_type": "deepseek_v32", **LATENT, **ROUTED, **INDEX, "attention_bias": True},
    "deepseek_v4": {"model_type": "deepseek_v4", **COMPRESSED, "num_hidden_layers": 4},
    "deepseek_v4-ratios": {
        "model_type": "deepseek_v4", **COMPRESSED, "compress_ratios": [0, 4, 128, 4, 0], "num_hidden_layers": 4, "hc_mult": 3,
        "compress_rate_hca": 64,
    },
    "exaone_moe": {"model_type": "exaone_moe", **SMALL, **EXPERTS, "num_shared_experts": 2, "first_k_dense_replace": 3},
    "gemma3n": {
        "model_type": "gemma3n_text", **SMALL, "intermediate_size": [96, 64, 96, 64], "num_kv_shared_layers": 2,
        "altup_num_inputs": 3, "layer_types": MIXED, "vocab_size_per_layer_input": 61, "hidden_size_per_layer_input": 12,
        "laurel_rank": 10,
    },
    "gemma3n-biased": {
        "model_type": "gemma3n_text", **SMALL, "attention_bias": True, "num_kv_shared_layers": 0,
        "activation_sparsity_pattern": [0.0] * 4, "layer_types": MIXED, "vocab_size_per_layer_input": 61,
        "hidden_size_per_layer_input": 12,
        "tie_word_embeddings": False,
    },
    "gemma4": {
        "model_type": "gemma4_text", **GEMMA4, "global_head_dim": 32, "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
    },
    "gemma4-biased": {"model_type": "gemma4_text", **GEMMA4, "global_head_dim": 40, "attention_bias": True},
    "gemma4-experts": {
        "model_type": "gemma4_text", **GEMMA4, "enable_moe_block": True, "num_experts": 8, "top_k_experts": 3,
        "moe_intermediate_size": 40,
    },
    "gemma4-inputs": {
        "model_type": "gemma4_text", **GEMMA4, "hidden_size_per_layer_input": 12, "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
    },
    "glm_moe_dsa": {"model_type": "glm_moe_dsa", **LATENT, **ROUTED, **INDEX, "indexer_types": ["full", "shared"] * 2},
    "glm_moe_dsa-letters": {"model_type": "glm_moe_dsa", **LATENT, **ROUTED, **INDEX, "index_topk_pattern": "FSSF"},
    "glm_moe_dsa-steps": {"model_type": "glm_moe_dsa", **LATENT, **ROUTED, **INDEX, "index_topk_freq": 2},
    "hy_v3": {"model_type": "hy_v3", **SMALL, **EXPERTS, "num_shared_experts": 2, "attention_bias": True},
    "kimi_linear": {"model_type": "kimi_linear", **LATENT, **EXPERTS, **SPLIT, "layer_types": HALF, "num_shared_experts": 2},
    "longcat_flash": {
        "model_type": "longcat_flash", **LATENT, "num_layers": 2, "ffn_hidden_size": 96, "expert_ffn_hidden_size": 40,
        "n_routed_experts": 8, "moe_topk": 3, "zero_expert_num": 0,
    },
    "mimo_v2_flash": {
        "model_type": "mimo_v2_flash", **SMALL, "num_key_value_heads": 1, "v_head_dim": 16, **ROUTED, "layer_types": MIXED,
        "attention_bias": True,
    },
    "mistral4": {"model_type": "mistral4", **LATENT, **ROUTED, "attention_bias": True, "first_k_dense_replace": 1},
    "nanochat": {"model_type": "nanochat", **SMALL, "attention_bias": True},
    "nemotron_h-latent": {
        "model_type": "nemotron_h", **SMALL, **ROUTED, "layers_block_type": ["moe", "full_attention"], "mlp_bias": True,
        "moe_latent_size": 20, "moe_shared_expert_intermediate_size": 56,
    },
    "olmo_hybrid": {
        "model_type": "olmo_hybrid", **SMALL, "layer_types": HALF, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 8, "linear_value_head_dim": 12, "linear_conv_kernel_dim": 3,
    },
    "olmo_hybrid-usual": {"model_type": "olmo_hybrid", **SMALL, "attention_bias": True},
    "solar_open": {"model_type": "solar_open", **SMALL, **ROUTED, "attention_bias": True, "n_shared_experts": 2},
    "youtu": {"model_type": "youtu", **LATENT, "q_lora_rank": None, "attention_bias": True},
}  # fmt: skip
SPARSE = {
    "afmoe",
    "bailing_hybrid",
    "deepseek_v32",
    "exaone_moe",
    "gemma4-experts",
    "hy_v3",
    "kimi_linear",
    "longcat_flash",
    "mistral4",
}


def prepared(name: str) -> dict[str, Any]:
    """A case, without the keys that its class refuses."""
    config = dict(CASES[name])
    if config["model_type"] in ("nanochat", "olmo_hybrid"):
        config.pop("head_dim")
    if "kv_lora_rank" in config and config["model_type"] != "bailing_hybrid":
        config.pop("head_dim")
    return config


@pytest.mark.parametrize("name", CASES)
def test_parameters(name: str) -> None:
    config = prepared(name)
    assert parameters(from_dict(config, class_defaults=True)).total == total_size(config)


@pytest.mark.parametrize("name", sorted(SPARSE))
def test_active_parameters(name: str) -> None:
    config = prepared(name)
    assert parameters(from_dict(config, class_defaults=True)).active == active_size(config)
