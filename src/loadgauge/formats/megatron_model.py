"""Megatron-LM's arguments for a model's sizes, as a Hugging Face config."""

from __future__ import annotations

from typing import Any

from loadgauge.formats.table import Facts, Idea, Keys

SIZES = {
    "num_layers": "num_hidden_layers", "hidden_size": "hidden_size", "num_attention_heads": "num_attention_heads",
    "ffn_hidden_size": "intermediate_size", "num_query_groups": "num_key_value_heads", "kv_channels": "head_dim",
    "max_position_embeddings": "max_position_embeddings", "vocab_size": "vocab_size", "num_experts": "num_local_experts",
    "moe_ffn_hidden_size": "moe_intermediate_size", "moe_router_topk": "num_experts_per_tok",
}  # fmt: skip
SWITCHES: tuple[str, ...] = (
    "swiglu",
    "untie_embeddings_and_output_weights",
    "disable_bias_linear",
    "group_query_attention",
)
SWITCHES += ("add_qkv_bias", "qk_layernorm", "multi_latent_attention")
OTHER: tuple[str, ...] = (
    "normalization",
    "position_embedding_type",
    "padded_vocab_size",
    "hidden_dropout",
    "attention_dropout",
)
OTHER += ("tokenizer_model", "no_position_embedding")
BEYOND: tuple[str, ...] = (
    "multi_latent_attention",
    "moe_shared_expert_intermediate_size",
    "moe_layer_freq",
    "hybrid_layer_pattern",
)
BEYOND += ("hybrid_override_pattern", "mtp_num_layers", "window_size", "linear_attention_freq", "add_qkv_bias")
BEYOND += ("experimental_attention_variant", "heterogeneous_layers_config_path", "moe_shared_expert_gate")
BEYOND += ("encoder_num_layers", "decoder_num_layers", "squared_relu", "quick_geglu", "openai_gelu")
"""Arguments of models that these few sizes do not describe."""
GPT2_VOCABULARY = 50_257


def _read(keys: Keys) -> Facts:
    if not keys.has("num_layers", "hidden_size"):
        name = keys.raw("tokenizer_model")
        plain = isinstance(name, str) and "$" not in name and "/" in name and not name.endswith((".model", ".json"))
        return {"model": name} if plain else {}
    for key in BEYOND:
        if keys.has(key) and keys.raw(key) is not False:
            return {}
    sizes = {theirs: value for ours, theirs in SIZES.items() if (value := keys.whole(ours)) is not None}
    if "num_attention_heads" not in sizes or "hidden_size" not in sizes or "num_hidden_layers" not in sizes:
        return {}
    gated = keys.flag("swiglu")
    if "vocab_size" not in sizes:
        padded = keys.whole("padded_vocab_size")
        if padded is None and not keys.has("vocab_file"):
            return {}
        sizes["vocab_size"] = padded or GPT2_VOCABULARY
    if not keys.flag("group_query_attention") or "num_key_value_heads" not in sizes:
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    routed = sizes.pop("num_local_experts", None)
    width, topk = sizes.pop("moe_intermediate_size", None), sizes.pop("num_experts_per_tok", None)
    hidden = sizes["hidden_size"]
    config: dict[str, Any] = {"tie_word_embeddings": not keys.flag("untie_embeddings_and_output_weights"), **sizes}
    if gated and keys.word("normalization") == "RMSNorm":
        config.setdefault("intermediate_size", int(4 * hidden * 2 / 3) // 64 * 64)
        if not keys.flag("disable_bias_linear"):
            return {}
        if routed:
            config |= {"num_local_experts": routed, "num_experts_per_tok": topk or 2}
            if width:
                config["intermediate_size"] = width
            return {"config": config | {"model_type": "mixtral"}}
        return {"config": config | {"model_type": "qwen3" if keys.flag("qk_layernorm") else "llama"}}
    if gated or routed or keys.flag("group_query_attention") or keys.flag("disable_bias_linear"):
        return {}
    if (keys.word("normalization") or "LayerNorm") != "LayerNorm":
        return {}
    if (keys.word("position_embedding_type") or "learned_absolute") != "learned_absolute":
        return {}
    return {
        "config": {
            "model_type": "gpt2", "n_layer": sizes["num_hidden_layers"], "n_head": sizes["num_attention_heads"],
            "n_embd": hidden, "n_inner": sizes.get("intermediate_size"), "vocab_size": sizes["vocab_size"],
            "n_positions": sizes.get("max_position_embeddings", 1024),
            "tie_word_embeddings": config["tie_word_embeddings"],
        }
    }  # fmt: skip


PLAIN = {
    "attention_bias": (False, None), "mlp_bias": (False, None), "hidden_act": ("silu", None), "sliding_window": (None,),
    "use_sliding_window": (False, None),
}  # fmt: skip
"""What these few arguments mean without saying it."""


def unsaid(config: dict[str, Any]) -> bool:
    """Whether a model's sizes have no place in the arguments: those of Llama, Qwen 3 and Mixtral have one.

    >>> unsaid({"model_type": "llama", "hidden_size": 8}), unsaid({"model_type": "llama", "attention_bias": True})
    (False, True)
    """
    if config.get("model_type") not in ("llama", "qwen3", "mixtral"):
        return True
    return any(config.get(key) not in values for key, values in PLAIN.items())


def _write(facts: Facts, keys: Keys) -> dict[str, Any]:
    config = facts.get("config")
    if config is None or unsaid(config):
        return {}
    routed, heads = config["model_type"] == "mixtral", config["num_attention_heads"]
    groups = config.get("num_key_value_heads") or heads
    found: dict[str, Any] = {ours: config[theirs] for ours, theirs in SIZES.items() if config.get(theirs) is not None}
    if routed:
        found |= {"moe_ffn_hidden_size": config["intermediate_size"], "moe_router_topk": config["num_experts_per_tok"]}
    found |= {
        "normalization": "RMSNorm", "position_embedding_type": "rope", "swiglu": True, "disable_bias_linear": True,
        "untie_embeddings_and_output_weights": not config.get("tie_word_embeddings") or None,
        "group_query_attention": True if groups != heads else None, "num_query_groups": groups if groups != heads else None,
        "qk_layernorm": True if config["model_type"] == "qwen3" else None,
    }  # fmt: skip
    return found


MODEL = Idea(
    keys=tuple(dict.fromkeys((*SIZES, *SWITCHES, *OTHER, *BEYOND, "vocab_file"))),
    facts=("model", "config"),
    read=_read,
    write=_write,
)
