"""LLM Foundry's YAML: MPT by its sizes or a model of the hub by its name, Composer's batch, precision and FSDP."""

from typing import Any

from loadgauge.core.base import refuse
from loadgauge.job_files.ideas import Dialect, Facts, Idea, Keys, Named, Unknown, fixed, reads, row, when, words

SHARDING = {"FULL_SHARD": 3, "HYBRID_SHARD": 3, "SHARD_GRAD_OP": 2, "_HYBRID_SHARD_ZERO2": 2, "NO_SHARD": 0}
PRECISIONS = {"amp_bf16": "bf16", "amp_fp16": "fp16", "fp32": "fp32"}
OPTIMIZERS = {"decoupled_adamw": "adamw", "adamw": "adamw", "decoupled_lionw": "lion", "lion": "lion", "sgd": "sgd"}
MODEL = (
    "model.name",
    "model.d_model",
    "model.n_heads",
    "model.n_layers",
    "model.expansion_ratio",
    "model.vocab_size",
    "model.max_seq_len",
    "model.attn_config.kv_n_heads",
    "model.attn_config.alibi",
    "model.attn_config.attn_type",
    "model.pretrained_model_name_or_path",
    "model.no_bias",
    "model.tie_word_embeddings",
    "model.attn_config.rope",
    "model.ffn_config.ffn_type",
    "model.norm_type",
    "model.learned_pos_emb",
)
FEED_FORWARD = {"mptmlp": "plain", "te_ln_mlp": "plain", "mptglu": "gated"}
"""MegaBlocks' mixtures of experts are not read."""
ATTENTION = (
    "model.attn_config.attn_impl",
    "model.attn_impl",
    "model.attn_implementation",
    "model.use_flash_attention_2",
)
KERNELS = {"flash": "flash", "triton": "flash", "torch": "eager", **words.ATTENTION}
PEFT = ("model.peft_config.r", "model.peft_config.peft_type", "model.peft_config.target_modules")


def _read(keys: Keys) -> Facts:
    name = keys.raw(MODEL[10])
    if isinstance(name, str):
        return {"model": name}
    if str(keys.raw("model.name") or "mpt_causal_lm") != "mpt_causal_lm":
        return {}
    hidden, heads, layers = (keys.whole(key) or usual for key, usual in zip(MODEL[1:4], (2048, 16, 24), strict=True))
    groups = keys.whole(MODEL[7]) or (1 if keys.word(MODEL[9]) == "multiquery_attention" else heads)
    ratio = keys.real(MODEL[4]) or 4.0
    length, vocabulary = keys.whole(MODEL[6]) or keys.whole("max_seq_len") or 2048, keys.whole(MODEL[5]) or 50_368
    tied = keys.flag("model.tie_word_embeddings") is not False
    gated = keys.choice("model.ffn_config.ffn_type", FEED_FORWARD) == "gated"
    config: dict[str, Any] = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "intermediate_size": int(ratio * hidden),
        "vocab_size": vocabulary,
        "max_position_embeddings": length,
        "tie_word_embeddings": tied,
    }
    plain, biased = groups == heads and ratio == 4, not keys.flag("model.no_bias")
    if "rms" in str(keys.raw("model.norm_type") or ""):
        return {"config": config | {"model_type": "llama" if gated else "arcee"}}
    if plain and not biased and not gated and tied and keys.flag("model.attn_config.alibi"):
        own = {"d_model": hidden, "n_heads": heads, "n_layers": layers, "vocab_size": vocabulary, "max_seq_len": length}
        return {"config": own | {"model_type": "mpt", "attn_config": {"alibi": True}}}
    if plain and biased and not gated and not keys.flag("model.attn_config.rope"):
        own = {"n_embd": hidden, "n_head": heads, "n_layer": layers, "vocab_size": vocabulary, "n_positions": length}
        return {"config": own | {"model_type": "gpt2", "tie_word_embeddings": tied}}
    return {
        "config": config | ({"model_type": "stablelm"} if gated else {"model_type": "starcoder2", "use_bias": biased})
    }


@reads(
    facts="micro_batch global_batch",
    write=lambda facts, keys, at: {at.micro: facts.get("micro_batch") or 1, at.whole: facts.get("global_batch")},
    micro="device_train_microbatch_size",
    whole="global_train_batch_size",
)
def _batch(keys: Keys, at: Named) -> Facts:
    refuse(
        str(keys.raw(at.micro) or "auto").lower() == "auto",
        "is what fits, which Composer finds by trying",
        Unknown,
        key=keys.document.shown(at.micro),
        file=keys.file,
    )
    return {"micro_batch": keys.whole(at.micro), "global_batch": keys.whole(at.whole)}


LLM_FOUNDRY = Dialect(
    name="llm-foundry",
    title="LLM Foundry's YAML",
    versions="LLM Foundry 0.17 - 0.22",
    syntaxes=("yaml",),
    framework="llm-foundry",
    layers="keys/llm-foundry.toml",
    blank={"yaml": ""},
    zero_stages=(0, 2, 3),
    ideas=(
        _batch,
        row("seq_len", "max_seq_len"),
        row("zero", "fsdp_config.sharding_strategy", words=SHARDING, default=0, off=0),
        row(
            "recompute", "fsdp_config.activation_checkpointing", words={"true": "full", "false": "none"}, default="none"
        ),
        row("precision", "precision", words=PRECISIONS, default="bf16"),
        row("optimizer", "optimizer.name", words=OPTIMIZERS, default="adamw"),
        row("lora_rank", PEFT[0], default=0, add=False),
        row("adapter", PEFT[1], words={"lora": None}, add=False),
        row("lora_targets", PEFT[2], kind="joined", add=False),
        row("attention", *ATTENTION[:3], words=KERNELS, add=False),
        when(lambda keys: keys.flag(ATTENTION[3]), fixed(ATTENTION[3], attention="flash")),
        Idea(keys=MODEL, facts=("model", "config"), read=_read),
    ),
)
