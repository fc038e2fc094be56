"""Bytes kept by a block of each dense family beside those of the articles, against PyTorch: equal to the byte."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from loadgauge.core.families.hf import from_dict
from loadgauge.core.layers import block_layer
from loadgauge.core.layers.operations.operations import Layer
from torch_models import DROPOUTS, SIZES, TOKENS, Built, Case, _default, block_kept

FULL = {"layer_types": ["full_attention"] * 3}
TWO = {"num_key_value_heads": 2}


def causal(prefix: str, **keys: Any) -> Case:
    """A decoder."""
    return Case(f"{prefix}Config", f"{prefix}ForCausalLM", keys)


ROPE = {"rope_type": "default", "rope_theta": 10000.0}
GEMMA4 = {
    "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 32, "attention_k_eq_v": True, "sliding_window": 512,
    "num_global_key_value_heads": 1, "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "vocab_size_per_layer_input": 96, **TOKENS,
}  # fmt: skip

CASES = {
    "apertus": causal("Apertus", **TWO, **TOKENS),
    "arcee": causal("Arcee", **TWO),
    "biogpt": causal("BioGpt"),
    "bloom": causal("Bloom"),
    "codegen": causal("CodeGen", rotary_dim=8),
    "cohere": causal("Cohere", **TWO, **TOKENS),
    "cohere-normed": causal("Cohere", use_qk_norm=True, **TWO, **TOKENS),
    "cohere2": causal("Cohere2", **TWO, **TOKENS, **FULL),
    "cwm": causal("Cwm", head_dim=16, **TWO, **TOKENS, **FULL),
    "distilbert": Case("DistilBertConfig", "DistilBertForMaskedLM", {}),
    "electra": Case("ElectraConfig", "ElectraForMaskedLM", {}),
    "ernie4_5": causal("Ernie4_5", head_dim=32, **TWO),
    "exaone4": causal("Exaone4", **TWO, **FULL),
    "gemma4": Case("Gemma4TextConfig", "Gemma4ForCausalLM", {**GEMMA4, "hidden_size_per_layer_input": 0}),
    "gemma4-experts": Case(
        "Gemma4TextConfig",
        "Gemma4ForCausalLM",
        {
            **GEMMA4,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 2,
            "moe_intermediate_size": 48,
        },
    ),
    "glm": causal("Glm", head_dim=32, **TWO, **TOKENS),
    "glm4": causal("Glm4", head_dim=32, **TWO, **TOKENS),
    "gpt_bigcode": causal("GPTBigCode"),
    "gpt_neo": causal("GPTNeo", attention_types=[[["global"], 3]]),
    "gptj": causal("GPTJ", rotary_dim=8),
    "granite": causal("Granite", **TWO),
    "helium": causal("Helium", head_dim=16, **TWO),
    "hunyuan": causal("HunYuanDenseV1", head_dim=16, **TWO),
    "internlm3": Case(
        "InternLM3Config",
        "LlamaForCausalLM",
        {"head_dim": 16, "attention_bias": True, "mlp_bias": True, **TWO, **TOKENS},
    ),
    "jais2": causal("Jais2", **TWO),
    "ministral3": causal("Ministral3", head_dim=32, **TWO, **TOKENS),
    "mpt": causal("Mpt"),
    "nanochat": causal("NanoChat", **TWO),
    "nemotron": causal("Nemotron", **TWO),
    "olmo": causal("Olmo", **TWO),
    "olmo-clipped": causal("Olmo", clip_qkv=1.0, **TWO),
    "olmo2": causal("Olmo2", **TWO),
    "olmo_hybrid": causal(
        "OlmoHybrid", layer_types=["full_attention"] * 2 + ["linear_attention"], rope_parameters=ROPE, **TWO, **TOKENS
    ),
    "olmo3": causal("Olmo3", **TWO, **FULL),
    "persimmon": causal("Persimmon"),
    "phi": causal("Phi", **TWO),
    "phi-normed": causal("Phi", qk_layernorm=True, **TWO),
    "seed_oss": causal("SeedOss", head_dim=32, **TWO),
    "smollm3": causal("SmolLM3", no_rope_layers=[1, 0, 1], **TWO, **TOKENS),
    "stablelm": causal("StableLm", **TWO),
    "stablelm-parallel": causal("StableLm", use_parallel_residual=True, qk_layernorm=True, **TWO),
    "starcoder2": causal("Starcoder2", **TWO, **TOKENS),
    "vaultgemma": causal("VaultGemma", head_dim=16, **TWO, **FULL),
    "xglm": causal("XGLM"),
}
NO_SDPA = {"bloom", "codegen", "gpt_neo", "gptj", "mpt", "vaultgemma", "xglm"}
"""transformers' classes of them write their attention out, or call FlashAttention by themselves."""

GPT = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "intermediate_size": "",
}
RENAMED = {
    "BloomConfig": {
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "intermediate_size": "",
        "max_position_embeddings": "",
    },
    "CodeGenConfig": {**GPT, "max_position_embeddings": "n_positions"},
    "GPTBigCodeConfig": {**GPT, "max_position_embeddings": "n_positions"},
    "GPTJConfig": {**GPT, "max_position_embeddings": "n_positions"},
    "GPTNeoConfig": {"num_hidden_layers": "num_layers", "num_attention_heads": "num_heads"},
    "MptConfig": {
        "hidden_size": "d_model",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "max_position_embeddings": "max_seq_len",
        "intermediate_size": "",
    },
    "XGLMConfig": {
        "hidden_size": "d_model",
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "attention_heads",
        "intermediate_size": "ffn_dim",
    },
    "DistilBertConfig": {
        "hidden_size": "dim",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "intermediate_size": "hidden_dim",
    },
}
"""What a family calls a size; empty: it has no such key."""


def build(name: str, attention: str, dtype: torch.dtype) -> Built:
    """A small model of a family, without dropout."""
    case = CASES[name]
    names = RENAMED.get(case.config, {})
    values = {names.get(key, key): value for key, value in {**SIZES, **case.keys}.items() if names.get(key, key)}
    rates = (*DROPOUTS, "resid_dropout", "residual_dropout", "embed_dropout", "activation_dropout", "layerdrop")
    values.update((key, 0.0) for key in rates if hasattr(_default(case.config), key))
    config = getattr(transformers, case.config)(**values)
    config._attn_implementation, config.use_cache = attention, False
    model = getattr(transformers, case.model)(config).to(dtype).train()
    return Built(model, config, from_dict(config.to_dict()), attention, dtype)


def cpu_statistics(layer: Layer, dtype: torch.dtype) -> int:
    """LayerNorm on a CPU keeps mean and deviation in the dtype of its input, on CUDA in float32."""
    kept = {tensor.name: tensor for tensor in layer.kept()}
    native = (name for name in kept if name.endswith(".mean") and name.replace(".mean", ".float32") not in kept)
    return sum(2 * kept[name].numel for name in native) * (dtype.itemsize - 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("name", "attention"),
    [(name, how) for name in CASES for how in ("eager", "sdpa") if how == "eager" or name not in NO_SDPA],
)
def test_blocks(name: str, attention: str, dtype: torch.dtype) -> None:
    built = build(name, attention, dtype)
    for position, s, b in ((1, 24, 2), (0, 40, 2)):
        spec = built.spec
        layer = block_layer(spec.blocks[spec.pattern[position]], spec.hidden_size, built.view(s, b))
        # MPT's causal mask, which all layers share, is one of truth values.
        mask = b * s * s if name == "mpt" else 0
        assert block_kept(built, position, s, b) == layer.saved() + mask + cpu_statistics(layer, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("new", [False, True])
def test_falcon(new: bool, dtype: torch.dtype) -> None:
    """Written out. Its fused kernel is given a mask and no heads to share keys, which a CPU answers by writing out."""
    keys = {"new_decoder_architecture": new, "num_kv_heads": 2, "ffn_hidden_size": 112}
    values = {key: value for key, value in SIZES.items() if key != "intermediate_size"}
    config = transformers.FalconConfig(**values, **keys)
    config._attn_implementation, config.use_cache = "eager", False
    model = transformers.FalconForCausalLM(config).to(dtype).train()
    built = Built(model, config, from_dict(config.to_dict()), "eager", dtype)
    layer = block_layer(built.spec.blocks[0], 64, built.view(24, 2))
    scale = 16  # Python numbers as tensors: the division of the scores in place keeps two
    assert block_kept(built, 0, 24, 2) == layer.saved() + scale + cpu_statistics(layer, dtype)
