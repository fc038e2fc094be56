"""GPT-NeoX's YAML: DeepSpeed's configuration with the sizes of the model, its pipeline and its tensor parallelism."""

from typing import Any

from loadgauge.core.definitions.job.uncounted import Uncounted
from loadgauge.job_files.hugging_face.deepspeed import batch, zero
from loadgauge.job_files.ideas import (
    STAYS,
    Dialect,
    Document,
    Facts,
    Idea,
    Keys,
    Named,
    dropped,
    fixed,
    names_in,
    reads,
    row,
)
from loadgauge.job_files.pre_training.megatron import started_by_deepspeed
from loadgauge.job_files.reading.layered import Names

SIZES = names_in(
    """
    num_layers hidden_size num_attention_heads num_kv_heads intermediate_size expansion_factor mlp_multiple_of seq_length
    max_position_embeddings norm pos_emb rotary_pct activation no_weight_tying gpt_j_residual use_qk_layernorm
    use_bias_in_attn_linear use_bias_in_mlp mamba_use_bias_in_linears mamba_use_bias_in_conv gmlp_attn_dim
    tokenizer_type vocab_file padded_vocab_size hidden_dropout attention_dropout
    """
)
VOCABULARIES = {"GPT2BPETokenizer": 50_257, "HFGPT2Tokenizer": 50_257, "HFTokenizer": 50_277, "CharLevelTokenizer": 512}
"""Tokens of the tokenizers, which a file leaves to the first; `HFTokenizer` is NeoX's own unless a file is named."""
GATED = ("swiglu", "geglu", "reglu", "bilinear", "glu")
PRECISIONS = {"bfloat16": "bf16", "fp16": "fp16", "fp32": "fp32"}
OPTIMIZERS = {
    "adam": "adamw", "adamw": "adamw", "cpu_adam": "adamw", "cpu_torch_adam": "adamw", "onebitadam": "adamw", "lion": "lion",
    "sgd": "sgd", "adagrad": "adagrad",
}  # fmt: skip


def _vocabulary(keys: Keys) -> int:
    kind = keys.word("tokenizer_type") or "GPT2BPETokenizer"
    size = keys.whole("padded_vocab_size") or VOCABULARIES.get(kind)
    own = kind != "HFTokenizer" or "20B_tokenizer" in str(keys.raw("vocab_file") or "20B_tokenizer")
    if size is not None and own:
        return size
    note = f"tokenizer_type: a tokenizer whose size is known only where it lies; {2**16} tokens are counted"
    for parts in (("weights", "gradients", "optimizer"), ("loss",)):
        keys.add(Uncounted(note, "tokenizer_type", effect="either", parts=parts, share=0.5))
    return 2**16


LAYERS = "attention_config"
OTHERS = {
    "rwkv": lambda hidden, length, narrow: hidden + int(3.5 * hidden) // 32 * 32 + 224,
    "gmlp": lambda hidden, length, narrow: 4 * hidden + length**2 // (2 * hidden),
    "amlp": lambda hidden, length, narrow: 4 * hidden + length**2 // (2 * hidden) + 14 * narrow,
}
"""Layers without attention, by the width of an MLP that has their weights beside attention's four matrices (`model/`)."""


def _layers(keys: Keys) -> set[str]:
    """The sorts of the layers, as they are listed with how often (`expand_attention_types`)."""
    listed = keys.raw(LAYERS) or []
    keys.refuse(LAYERS, f"must be a list, not {listed!r}", when=not isinstance(listed, list))
    return {
        str(sort)
        for each in listed
        for sort in (each[0] if isinstance(each, list) and each and isinstance(each[0], list) else [each])
    }


def _attention(keys: Keys) -> str:
    sorts = _layers(keys)
    sparse = sorts - {"global", "flash", "mamba", *OTHERS}
    keys.note(LAYERS, "is counted as attention to all before", "saves", "activations transient", 0.5, when=sparse)
    return "flash" if sorts & {"flash", "mamba", *OTHERS} else "eager"


def _read(keys: Keys) -> Facts:
    config, other = _config(keys), min(_layers(keys) & {*OTHERS}, default=None)
    keys.note(
        LAYERS,
        f"layers of {other} are counted as attention and an MLP with as many weights",
        "either",
        "activations transient",
        0.5,
        when=other,
    )
    return {"config": dropped(keys, config)} if config else {}


def _mamba(keys: Keys, layers: int, hidden: int) -> dict[str, Any]:
    """Mamba's own sizes (`model/mamba/mamba.py`), of which a file says two."""
    inner = keys.whole("intermediate_size") or int((keys.real("expansion_factor") or 2) * hidden)
    return {
        "model_type": "mamba",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "vocab_size": _vocabulary(keys),
        "expand": inner // hidden,
        "state_size": 16,
        "conv_kernel": 4,
        "time_step_rank": -(-hidden // 16),
        "use_bias": bool(keys.flag("mamba_use_bias_in_linears")),
        "use_conv_bias": keys.flag("mamba_use_bias_in_conv") is not False,
        "hidden_act": "silu",
        "tie_word_embeddings": not keys.flag("no_weight_tying"),
    }


def _config(keys: Keys) -> dict[str, Any]:
    layers, hidden, heads = (keys.whole(name) for name in SIZES[:3])
    if layers is None or hidden is None or heads is None:
        return {}
    sorts = _layers(keys)
    if sorts == {"mamba"}:
        return _mamba(keys, layers, hidden)
    gated = (keys.word("activation") or "gelu").lower() in GATED
    wide = keys.whole("intermediate_size") or int((keys.real("expansion_factor") or 4) * hidden)
    step = keys.whole("mlp_multiple_of") or 1
    wide = -(-(int(wide * 2 / 3) // 2 if gated else wide) // step) * step
    if len(sorts) == 1 and (width := OTHERS.get(min(sorts))):
        wide, gated = width(hidden, keys.whole("seq_length") or 2048, keys.whole("gmlp_attn_dim") or 64), False
    norm = keys.word("norm") or "layernorm"
    biased = [keys.flag(name) is not False for name in ("use_bias_in_attn_linear", "use_bias_in_mlp")]
    config: dict[str, Any] = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": wide,
        "vocab_size": _vocabulary(keys),
        "max_position_embeddings": keys.whole("max_position_embeddings") or keys.whole("seq_length") or 2048,
        "tie_word_embeddings": not keys.flag("no_weight_tying"),
    }
    shared = {"num_key_value_heads": keys.whole("num_kv_heads") or heads}
    own = dict(zip(("attention_bias", "mlp_bias"), biased, strict=True))
    if norm == "rmsnorm":
        return config | shared | own | {"model_type": "llama" if gated else "arcee"}
    if gated:
        return config | shared | {"model_type": "stablelm", "use_qkv_bias": biased[0]}
    if (keys.word("pos_emb") or "learned") == "learned":
        renamed = {"n_embd": hidden, "n_layer": layers, "n_head": heads, "n_inner": wide}
        renamed |= {"n_positions": config["max_position_embeddings"], "vocab_size": config["vocab_size"]}
        return renamed | {"model_type": "gpt2", "tie_word_embeddings": config["tie_word_embeddings"]}
    if shared["num_key_value_heads"] != heads:
        return config | shared | {"model_type": "starcoder2", "use_bias": biased[0]}
    return config | {
        "attention_bias": biased[0],
        "use_parallel_residual": bool(keys.flag("gpt_j_residual")),
        "rotary_pct": keys.real("rotary_pct", 1.0),
        "model_type": "gpt_neox",
    }


EXPERTS, EVERY, TOP = "moe_num_experts", "moe_expert_interval", "moe_top_k"


@reads(EXPERTS, EVERY, TOP)
def _experts(keys: Keys) -> Facts:
    """The idea of experts, each a block's whole MLP: the others than the first are named with their bytes, and not counted."""
    count = keys.whole(EXPERTS) or 1
    config = _config(keys) if count > 1 else {}
    if not config:
        return {}
    hidden, layers = keys.whole("hidden_size") or 0, keys.whole("num_layers") or 0
    wide = config.get("intermediate_size") or config["n_inner"]
    matrices = 3 if (keys.word("activation") or "gelu").lower() in GATED else 2
    more = (count - 1) * matrices * hidden * wide * (layers // (keys.whole(EVERY, minimum=1) or 1))
    note = f"{EXPERTS} = {count}: {more / 1e6:.0f} M parameters of the other experts are not counted"
    parts, tokens = ("activations", "transient"), float(keys.whole(TOP) or 1)
    keys.add(Uncounted(note, EXPERTS, high=18.0 * more, effect="costs", parts=parts, share=tokens))
    return {}


def _layout_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    shared = True if facts.get("sequence_parallel") else STAYS
    return {at.stages: facts.get("pp") or 1, at.ranks: facts.get("tp") or 1, at.shared: shared}


@reads(
    facts="pp tp sequence_parallel",
    write=_layout_written,
    stages="pipe_parallel_size",
    ranks="model_parallel_size",
    shared="sequence_parallel",
)
def _layout(keys: Keys, at: Named) -> Facts:
    pp, tp = keys.whole(at.stages, 0) or 1, keys.whole(at.ranks) or 1
    return {"pp": pp, "tp": tp, "sequence_parallel": bool(keys.flag(at.shared)) and tp > 1}


def _recompute_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    word = str(facts["recompute"])
    kind, _, number = word.removesuffix(":partitioned").partition(":group=")
    if kind not in ("full", "none"):
        return {}
    return {at.switch: kind == "full", at.count: int(number or 1), at.parts: word.endswith(":partitioned") or None}


@reads(
    facts="recompute",
    write=_recompute_written,
    switch="checkpoint_activations",
    count="checkpoint_num_layers",
    parts="partition_activations",
)
def _recompute(keys: Keys, at: Named) -> Facts:
    number = keys.whole(at.count) or 1
    full = "full" if number == 1 else f"full:group={number}"
    parts = ":partitioned" if keys.flag(at.parts) else ""
    return {"recompute": f"{full}{parts}" if keys.flag(at.switch) else "none"}


SWITCHES = {"fp16.enabled": "fp16", "fp16.fp16": "fp16", "bf16.enabled": "bf16", "bf16.bf16": "bf16"}


def _precision_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    half, _, recipe = str(facts["precision"]).partition("-")
    spelled = {ours: theirs for theirs, ours in PRECISIONS.items()}
    if half not in spelled or recipe not in ("", "mixed-16", "mixed-18"):
        return {}
    return dict.fromkeys(SWITCHES) | {at.name: spelled[half], at.summed: "fp32" if recipe == "mixed-18" else None}


@reads(
    facts="precision",
    write=_precision_written,
    name="precision",
    also=(*SWITCHES,),
    summed="data_types.grad_accum_dtype",
    reduced="fp32_allreduce",
)
def _precision(keys: Keys, at: Named) -> Facts:
    word = keys.choice(at.name, PRECISIONS)
    half = word or next((word for key, word in SWITCHES.items() if keys.flag(key)), "fp32")
    wide = keys.choice(at.summed, {"fp32": True, "bf16": False, "fp16": False})
    return {"precision": f"{half}-mixed-18" if wide and half != "fp32" else half}


def _reference(keys: Keys) -> str | None:
    """A copy of the model, for preferences that are told against one (`training.py`)."""
    alone = keys.word("train_impl") != "dpo" or keys.flag("dpo_reference_free")
    return None if alone and keys.word("train_impl") != "kto" else "model"


def _underscored(document: Document) -> tuple[str, Names]:
    """Names with dashes under those with underscores (source: GPT-NeoX 2.1, `NeoXArgs.from_ymls`)."""
    return "", [(name, name.replace("-", "_")) for name in document.names() if "-" in name]


GPT_NEOX = Dialect(
    name="gpt-neox",
    title="GPT-NeoX's YAML",
    versions="GPT-NeoX 2.0 - 2.1",
    syntaxes=("yaml",),
    framework="megatron-deepspeed",
    blank={"yaml": ""},
    renames=_underscored,
    ideas=(
        started_by_deepspeed,
        _layout,
        batch(),
        zero(),
        _recompute,
        _precision,
        row("optimizer", "optimizer.type", words=OPTIMIZERS, default="adamw"),
        fixed(LAYERS, attention=_attention),
        row("seq_len", "seq_length"),
        row("task", "train_impl", words={"normal": None, "dpo": "dpo", "kto": "kto", "rm": "reward"}),
        fixed("dpo_reference_free", reference=_reference),
        Idea(keys=SIZES, facts=("config",), read=_read, write=lambda facts, keys: {}),
        _experts,
    ),
)
