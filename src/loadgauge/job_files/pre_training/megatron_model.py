"""The sizes of a model in Megatron-LM's arguments, as a Hugging Face config of the family whose layers are the same."""

import re
from typing import Any

from loadgauge.core.base.errors import ConfigError, NotModelled
from loadgauge.core.definitions.job.uncounted import Uncounted
from loadgauge.core.families.catalogue import find, keys as keys_of
from loadgauge.job_files.ideas import DROPOUT, Facts, Idea, Keys, dropped, names_in

SIZES = {
    "num_layers": "num_hidden_layers", "hidden_size": "hidden_size", "num_attention_heads": "num_attention_heads",
    "ffn_hidden_size": "intermediate_size", "num_query_groups": "num_key_value_heads", "kv_channels": "head_dim",
    "max_position_embeddings": "max_position_embeddings", "vocab_size": "vocab_size", "num_experts": "num_local_experts",
    "moe_ffn_hidden_size": "moe_intermediate_size", "moe_router_topk": "num_experts_per_tok",
}  # fmt: skip
OTHER = names_in(
    """
    swiglu untie_embeddings_and_output_weights disable_bias_linear group_query_attention add_qkv_bias qk_layernorm
    multi_latent_attention normalization position_embedding_type padded_vocab_size hidden_dropout attention_dropout
    tokenizer_model no_position_embedding squared_relu quick_geglu openai_gelu q_lora_rank kv_lora_rank qk_head_dim
    qk_pos_emb_head_dim v_head_dim moe_shared_expert_intermediate_size moe_layer_freq hybrid_layer_pattern
    hybrid_override_pattern mamba_state_dim mamba_head_dim mamba_num_groups mamba_num_heads moe_shared_expert_gate
    moe_latent_size tokenizer_type vocab_file use_rotary_position_embeddings moe_grouped_gemm
    """
)
SPLIT = ("either", "weights gradients optimizer activations", 0.5)
BEYOND = names_in(
    """
    window_size linear_attention_freq experimental_attention_variant heterogeneous_layers_config_path encoder_num_layers
    decoder_num_layers attention_output_gate
    """
)
"""Arguments of models that these sizes do not describe."""
GPT2_VOCABULARY = 50_257
VOCABULARIES = {
    "GPT2BPETokenizer": GPT2_VOCABULARY, "BertWordPieceLowerCase": 30_522, "BertWordPieceCase": 28_996,
    "Llama2Tokenizer": 32_000, "Llama3Tokenizer": 128_256, "TikTokenizer": 2**17,
}  # fmt: skip
"""Tokens of tokenizers that a name says: their published vocabularies."""
TAKEN = 2**17
"""Tokens that are counted where the tokenizer is known only where it lies."""
OWN_WIDTH = ("llama", "qwen3", "qwen3_moe", "mixtral", "glm4_moe", "arcee")
"""Families whose configuration has a width of heads of its own."""
OTHER_NAMES = {
    "num_experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "moe_ffn_hidden_size": ("moe_intermediate_size", "intermediate_size"),
}
"""Names of the sizes of experts in families."""
NAMED = ("HF_MODEL_CKPT", "HF_MODEL", "TOKENIZER_MODEL")
"""Variables of scripts that name a model on the hub."""


def _repository(keys: Keys) -> str | None:
    """The model on the hub whose tokenizer is used."""
    variables: dict[str, str] = getattr(keys.document, "variables", {})
    for name in (keys.raw("tokenizer_model"), *(variables.get(name) for name in NAMED)):
        if isinstance(name, str) and re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not name.endswith((".model", ".json")):
            return name
    return None


def _vocabulary(keys: Keys, hidden: int, layers: int, tied: bool) -> int:
    vocabulary = keys.whole("vocab_size") or keys.whole("padded_vocab_size")
    kind = keys.word("tokenizer_type")
    if vocabulary is not None or kind in VOCABULARIES:
        return vocabulary or VOCABULARIES[str(kind)]
    repository = _repository(keys)
    if repository is not None:
        try:
            return int(find(repository).spec.vocab_size)
        except (ConfigError, NotModelled):
            pass
    if keys.has("vocab_file") and kind is None:
        return GPT2_VOCABULARY
    key = next((name for name in ("tokenizer_model", "tokenizer_type") if keys.has(name)), "vocab_size")
    shown, tables = keys.document.shown(key), TAKEN * hidden * (1 if tied else 2)
    share = tables / (tables + 12 * layers * hidden**2)
    note = f"{shown}: a tokenizer whose size is known only where it lies; {TAKEN} tokens are counted (--vocab-size says how many)"
    for parts, part in ((("weights", "gradients", "optimizer"), share), (("loss",), 1.0)):
        keys.add(Uncounted(note, shown, effect="either", parts=parts, share=part))
    return TAKEN


def _read(keys: Keys) -> Facts:
    name = _repository(keys)
    named: Facts = {"model": name} if name is not None else {}
    if not keys.has("hidden_size") or any(keys.has(key) and keys.raw(key) is not False for key in BEYOND):
        return named
    config = _config(keys)
    if (
        config is not None
        and config["model_type"] in OWN_WIDTH
        and config["hidden_size"] % config["num_attention_heads"] == 0
    ):
        config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    if config is None:
        return named
    keys.note(
        "moe_grouped_gemm",
        "is off, so that experts run one by one; grouped products are counted",
        "costs",
        when=any(config.get(word) for word in OTHER_NAMES["num_experts"]) and not keys.flag("moe_grouped_gemm"),
    )
    return {"config": dropped(keys, config, 0.1)}


def resized(keys: Keys, name: str, prefix: str = "") -> dict[str, Any] | None:
    """The config of a named model with the sizes that a file has of its own; None where it has none.

    Sizes that the model's config has no key for are named, and not counted.
    """
    asked = {key: size for key in SIZES if key != "max_position_embeddings" and (size := keys.whole(prefix + key))}
    if not asked:
        return None
    try:
        config = dict(keys_of(name))
    except ConfigError:
        config = {}
    body = dict(config.get("text_config") or config)
    layers = body.get("num_hidden_layers")
    for key, size in asked.items():
        theirs = next((word for word in OTHER_NAMES.get(key, (SIZES[key],)) if word in body), None)
        if theirs is None:
            keys.note(prefix + key, "is not the size that its name has, and is not counted", *SPLIT)
        else:
            body[theirs] = size
    count = int(body.get("num_hidden_layers") or 0)
    body |= {word: each[:count] for word, each in body.items() if isinstance(each, list) and len(each) == layers}
    if "first_k_dense_replace" in body:
        first = _dense_first(keys, count) if keys.has("moe_layer_freq") else body["first_k_dense_replace"]
        body["first_k_dense_replace"] = min(first or 0, count)
    return config | ({"text_config": body} if config.get("text_config") else body) if config else None


def _config(keys: Keys) -> dict[str, Any] | None:
    sizes = {theirs: value for ours, theirs in SIZES.items() if (value := keys.whole(ours)) is not None}
    pattern = keys.word("hybrid_layer_pattern") or keys.word("hybrid_override_pattern")
    if pattern is not None:
        pattern = pattern.partition("/")[0].replace("|", "")
        sizes["num_hidden_layers"] = len(pattern)
    if not {"num_hidden_layers", "num_attention_heads", "hidden_size"} <= sizes.keys():
        return None
    hidden, layers, heads = sizes["hidden_size"], sizes["num_hidden_layers"], sizes["num_attention_heads"]
    tied = not keys.flag("untie_embeddings_and_output_weights")
    gated = bool(keys.flag("swiglu") or keys.flag("quick_geglu"))
    sizes["num_key_value_heads"] = sizes.get("num_key_value_heads", 1) if keys.flag("group_query_attention") else heads
    sizes.setdefault("intermediate_size", int(4 * hidden * 2 / 3) // 64 * 64 if gated else 4 * hidden)
    routed, width = sizes.pop("num_local_experts", None), sizes.pop("moe_intermediate_size", None)
    topk = sizes.pop("num_experts_per_tok", None) or 2
    sizes["vocab_size"] = _vocabulary(keys, hidden, layers, tied)
    config: dict[str, Any] = {"tie_word_embeddings": tied, **sizes}
    biased, plain = not keys.flag("disable_bias_linear"), (keys.word("normalization") or "LayerNorm") == "LayerNorm"
    experts = {"n_routed_experts": routed, "num_experts_per_tok": topk}
    experts |= {"moe_intermediate_size": width or sizes["intermediate_size"]}
    shared = keys.whole("moe_shared_expert_intermediate_size", 0) or 0
    if pattern is not None:
        return (
            None
            if gated
            else _hybrid(keys, config, pattern, {**experts, "moe_shared_expert_intermediate_size": shared})
        )
    if keys.flag("multi_latent_attention"):
        return _latent(keys, config, experts, shared)
    if routed:
        return None if plain or not gated or biased else _routed(keys, config, experts, shared)
    qkv = bool(biased or keys.flag("add_qkv_bias"))
    if not plain and gated:
        if keys.flag("qk_layernorm"):
            return None if qkv else config | {"model_type": "qwen3"}
        if qkv and not biased:
            return config | {"model_type": "qwen2"}
        return config | {"model_type": "llama"} | ({"attention_bias": True, "mlp_bias": True} if biased else {})
    if not plain:
        return config | {"model_type": "arcee", "attention_bias": biased, "mlp_bias": biased}
    learned = (keys.word("position_embedding_type") or "learned_absolute") == "learned_absolute" and not (
        keys.flag("use_rotary_position_embeddings") or keys.flag("no_position_embedding")
    )
    if gated:
        return None if learned or biased else config | {"model_type": "stablelm", "use_qkv_bias": qkv}
    if not learned:
        return config | {"model_type": "starcoder2", "use_bias": biased}
    if not biased or sizes["num_key_value_heads"] != heads or "head_dim" in sizes:
        return None
    return {
        "model_type": "gpt2",
        "n_layer": layers,
        "n_head": heads,
        "n_embd": hidden,
        "n_inner": sizes["intermediate_size"],
        "vocab_size": sizes["vocab_size"],
        "n_positions": sizes.get("max_position_embeddings", 1024),
        "tie_word_embeddings": tied,
    }


def _dense_first(keys: Keys, layers: int) -> int | None:
    """How many of the first layers have no experts; None where others have none either."""
    value = keys.raw("moe_layer_freq")
    if value is None or str(value) == "1":
        return 0
    match = re.fullmatch(r"\(*\[0\]\s*\*\s*(\d{1,4})\s*\+\s*\[1\]\s*\*\s*(\d{1,4})\)*", str(value).strip("\"'"))
    if match is None:
        listed = re.fullmatch(r"\[?((?:0\s*,\s*)*)1(?:\s*,\s*1)*\]?", str(value).strip("\"'"))
        return None if listed is None else listed[1].count("0")
    return int(match[1]) if int(match[1]) + int(match[2]) == layers else None


def _routed(keys: Keys, config: dict[str, Any], experts: dict[str, Any], shared: int) -> dict[str, Any] | None:
    first, width = _dense_first(keys, config["num_hidden_layers"]), experts["moe_intermediate_size"]
    normed, qkv = bool(keys.flag("qk_layernorm")), bool(keys.flag("add_qkv_bias"))
    if first is None:
        return None
    if not shared and not first and not qkv:
        names = {"num_experts": experts["n_routed_experts"], "num_experts_per_tok": experts["num_experts_per_tok"]}
        if normed:
            return config | names | {"model_type": "qwen3_moe", "moe_intermediate_size": width}
        return (
            config
            | {"model_type": "mixtral", "num_local_experts": names.pop("num_experts"), "intermediate_size": width}
            | names
        )
    if shared % width:
        return None
    own = {"n_shared_experts": shared // width, "first_k_dense_replace": first, "num_nextn_predict_layers": 0}
    return config | experts | own | {"model_type": "glm4_moe", "use_qk_norm": normed, "attention_bias": qkv}


def _latent(keys: Keys, config: dict[str, Any], experts: dict[str, Any], shared: int) -> dict[str, Any] | None:
    first, width = _dense_first(keys, config["num_hidden_layers"]), experts["moe_intermediate_size"]
    if first is None or shared % width:
        return None
    config |= {
        "model_type": "deepseek_v3",
        "num_key_value_heads": config["num_attention_heads"],
        "q_lora_rank": keys.whole("q_lora_rank"),
        "kv_lora_rank": keys.whole("kv_lora_rank") or 32,
        "qk_nope_head_dim": keys.whole("qk_head_dim") or 128,
        "qk_rope_head_dim": keys.whole("qk_pos_emb_head_dim") or 64,
        "v_head_dim": keys.whole("v_head_dim") or 128,
        "num_nextn_predict_layers": 0,
    }
    if not experts["n_routed_experts"]:
        return config | {"first_k_dense_replace": config["num_hidden_layers"]}
    return config | experts | {"n_shared_experts": shared // width, "first_k_dense_replace": first}


def _hybrid(keys: Keys, config: dict[str, Any], pattern: str, experts: dict[str, Any]) -> dict[str, Any] | None:
    if set(pattern) - set("ME*-"):
        return None
    width = keys.whole("mamba_head_dim") or 64
    config |= {
        "model_type": "nemotron_h",
        "hybrid_override_pattern": pattern,
        "mamba_head_dim": width,
        "mamba_num_heads": keys.whole("mamba_num_heads") or 2 * config["hidden_size"] // width,
        "ssm_state_size": keys.whole("mamba_state_dim") or 128,
        "n_groups": keys.whole("mamba_num_groups") or 8,
        "moe_latent_size": keys.whole("moe_latent_size"),
    }
    config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    return config | ({key: value for key, value in experts.items() if value} if experts["n_routed_experts"] else {})


PLAIN = {
    "attention_bias": (False, None), "mlp_bias": (False, None), "hidden_act": ("silu", None), "sliding_window": (None,),
    "use_sliding_window": (False, None),
}  # fmt: skip
"""What these few arguments mean without saying it."""


def missing_sizes(config: dict[str, Any]) -> bool:
    """Return whether the arguments cannot express a model's config; those of Llama, Qwen 3 and Mixtral they can.

    >>> missing_sizes({"model_type": "llama", "hidden_size": 8}), missing_sizes({"model_type": "llama", "attention_bias": True})
    (False, True)
    """
    plain = config.get("model_type") in ("llama", "qwen3", "mixtral")
    return not plain or any(config.get(key) not in values for key, values in PLAIN.items())


def _write(facts: Facts, keys: Keys) -> dict[str, Any]:
    config = facts.get("config")
    if config is None or missing_sizes(config):
        return {}
    routed, heads = config["model_type"] == "mixtral", config["num_attention_heads"]
    groups = config.get("num_key_value_heads") or heads
    inner = {"moe_ffn_hidden_size": "intermediate_size", "moe_router_topk": "num_experts_per_tok"} if routed else {}
    return {
        **{ours: config[theirs] for ours, theirs in SIZES.items() if config.get(theirs) is not None},
        **{ours: config[theirs] for ours, theirs in inner.items()},
        **dict.fromkeys(DROPOUT, 0.0),
        "moe_grouped_gemm": True if routed else None,
        "normalization": "RMSNorm",
        "position_embedding_type": "rope",
        "swiglu": True,
        "disable_bias_linear": True,
        "untie_embeddings_and_output_weights": not config.get("tie_word_embeddings") or None,
        "group_query_attention": True if groups != heads else None,
        "num_query_groups": groups if groups != heads else None,
        "qk_layernorm": True if config["model_type"] == "qwen3" else None,
    }


MODEL = Idea(keys=tuple(dict.fromkeys((*SIZES, *OTHER, *BEYOND))), facts=("model", "config"), read=_read, write=_write)


EVENLY = "layers are shared out evenly"


def placed(keys: Keys, key: str, stages: int) -> Facts:
    """Return the chunks of a rank and the layers of each that Megatron's layout of a pipeline says, `t` or `decoder` a layer.

    Stages go round the ranks (`pipeline_parallel_layer_layout.py`, `PipelineParallelLayerLayout`): the layout `Et|(tt|)*2tL` on
    two ranks has two chunks on each, and three layers.
    """
    layout = keys.raw(key)
    if layout is None or stages == 1:
        return {}
    rows = [row for row in layout if isinstance(row, list)] if isinstance(layout, list) else []
    counts = [row.count("decoder") for row in rows]
    if isinstance(layout, str):
        text = re.sub(r"[\s,]", "", layout.strip("'\""))
        for repeated in (r"\(([^()*]+)\)\*(\d{1,3})", r"(\w)\*(\d{1,3})", r"\(([^()*]+)\)\*(\d{1,3})"):
            text = re.sub(repeated, lambda match: match[1] * int(match[2]), text)
        counts = [row.count("t") for row in text.split("|")] if re.fullmatch(r"[Etm|L]+", text) else []
    chunks, left = divmod(len(counts), stages)
    if left or not chunks:
        keys.note(key, f"is not read, and {EVENLY}", *SPLIT)
        return {}
    ranks = ",".join(str(sum(counts[rank::stages])) for rank in range(stages))
    return {"vpp": chunks, "schedule": "interleaved" if chunks > 1 else "1f1b", "stage_layers": ranks}


UNEVEN = tuple(f"num_layers_in_{end}_pipeline_stage" for end in ("first", "last"))


def uneven(keys: Keys, prefix: str, stages: int, chunks: int = 1) -> Facts:
    """Return how a pipeline shares out layers by `TransformerConfig`'s own words after a prefix, which lie beside the sizes."""
    ends = [keys.whole(f"{prefix}{name}") for name in UNEVEN]
    if stages == 1 or ends == [None, None]:
        return placed(keys, f"{prefix}pipeline_model_parallel_layout", stages)
    if chunks > 1:
        keys.note(f"{prefix}{UNEVEN[ends[0] is None]}", f"is not read beside chunks, and {EVENLY}", *SPLIT)
        return {}
    return {"layers_per_stage": "ends," + ",".join("" if end is None else str(end) for end in ends)}
