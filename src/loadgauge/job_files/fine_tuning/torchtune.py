"""torchtune's recipes (YAML): components by their names, instantiated with the keys beside them."""

from typing import Any

from loadgauge.job_files.hugging_face.huggingface import compiled
from loadgauge.job_files.ideas import (
    BITSANDBYTES,
    Dialect,
    Facts,
    Keys,
    Named,
    degree,
    instantiated,
    product,
    reads,
    row,
    short,
)

SIZES = {
    "llama2": ("llama-2", "7b 13b 70b"), "llama3": ("llama-3", "8b 70b"), "llama3_1": ("llama-3.1", "8b 70b 405b"),
    "llama3_2": ("llama-3.2", "1b 3b"), "llama3_3": ("llama-3.3", "70b"), "gemma": ("gemma", "2b 7b"),
    "gemma2": ("gemma-2", "2b 9b 27b"), "qwen2": ("qwen2", "0_5b 1_5b 7b"),
    "qwen2_5": ("qwen2.5", "0_5b 1_5b 3b 7b 14b 32b 72b"), "qwen3": ("qwen3", "0_6b 1_7b 4b 8b 14b 32b"),
    "smollm2": ("smollm2", "135m 360m 1_7b"),
}  # fmt: skip
"""Families, the beginning of their names in the catalogue, and their sizes."""
MODELS = {
    f"{family}_{size}": f"{name}-{size.replace('_', '.')}"
    for family, (name, sizes) in SIZES.items()
    for size in sizes.split()
} | {
    "mistral_7b": "mistral-7b-v0.1", "phi3_mini": "phi-3-mini", "phi4_14b": "phi-4",
    "llama4_scout_17b_16e": "llama-4-scout", "llama4_maverick_17b_128e": "llama-4-maverick",
    **{f"code_llama2_{size}": f"codellama/CodeLlama-{size}-hf" for size in ("7b", "13b", "70b")},
    **{f"llama3_2_vision_{size}": f"meta-llama/Llama-3.2-{size.upper()}-Vision-Instruct" for size in ("11b", "90b")},
}  # fmt: skip
"""Builders of `torchtune.models`, without `lora_` and `qlora_` before and `_base` and `_instruct` behind, in the catalogue."""
INSTRUCT_ONLY = tuple(
    f"{family}_{size}"
    for family, sizes in (("qwen2_5", "1_5b 7b 14b 32b 72b"), ("qwen3", "0_6b 1_7b 4b 8b 14b"))
    for size in sizes.split()
)
"""Models with a builder for each of `_base` and `_instruct`, and none without."""
FAMILIES = ("mistral", "phi3", "phi4", "llama4", "code_llama2", "llama3_2_vision")
ATTENTION = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "output_proj": "o_proj"}
MLP = ("gate_proj", "up_proj", "down_proj")
COMPONENT = "model._component_"
ON_HOST = ("torchao.optim.CPUOffloadOptimizer", "torchao.prototype.low_bit_optim.CPUOffloadOptimizer")
"""AdamW on the host, whose gradients stay on the card unless `offload_gradients` is on."""
TORCHAO = {"AdamW8bit": "adamw-torchao-8bit", "AdamW4bit": "adamw-4bit", "AdamWFp8": "adamw-fp8"}
OPTIMIZERS = {
    "torch.optim.AdamW": "adamw", "torch.optim.Adam": "adamw", "torch.optim.SGD": "sgd", **BITSANDBYTES,
    **{f"torchao.{place}.{name}": ours for place in ("optim", "prototype.low_bit_optim") for name, ours in TORCHAO.items()},
    **dict.fromkeys(ON_HOST, "adamw-fused"),
}  # fmt: skip
"""`optimizer._component_`."""
LOSS = "torchtune.modules.loss."
IN_PIECES = (f"{LOSS}CEWithChunkedOutputLoss", f"{LOSS}LinearCrossEntropyLoss")
AT_ONCE = "torch.nn.CrossEntropyLoss"
"""Whose model makes float32 of all logits (`TransformerDecoder.unembed`)."""
PIECES = 8
"""`num_output_chunks` where it is not given."""
PAIRS = {
    f"torchtune.rlhf.loss.{name}": task
    for name, task in (("DPOLoss", "dpo"), ("RSOLoss", "dpo"), ("SimPOLoss", "simpo"))
}
"""Losses of preferences, which make log-probabilities of all logits at once (`rlhf.get_batch_log_probs`)."""
DISTANCES = {
    f"{LOSS}{name}{ending}": ours
    for name, ours in (("ForwardKL", "forward-kl"), ("ReverseKL", "reverse-kl"), ("SymmetricKL", "jsd"))
    for ending in ("Loss", "WithChunkedOutputLoss")
}
TEACHER = "teacher_model._component_"
IDLE = ("quantizer._component_", "tasks", "max_new_tokens")
"""Keys of recipes that quantise, evaluate or generate."""
PARTS = {f"model.{name}_trainable": name for name in ("encoder", "fusion", "decoder")}


def _builder(keys: Keys, component: str = COMPONENT) -> tuple[str, str]:
    """The builder of the model without its prefix, and the prefix: empty, `lora` or `qlora`."""
    name = (keys.word(component) or "").rpartition(".")[2]
    prefix, _, rest = name.partition("_")
    return (rest, prefix) if prefix in ("lora", "qlora") else (name, "")


def _plain(builder: str) -> str:
    return builder.removesuffix("_instruct").removesuffix("_base")


def _named(keys: Keys, component: str) -> str | None:
    """The model that a component builds. Raises `ConfigError` for one that is none of a language."""
    builder = _plain(_builder(keys, component)[0])
    keys.refuse(
        component,
        f"{short(builder)} is no language model that is read (read: {', '.join(MODELS)})",
        when=builder and builder not in MODELS,
    )
    return MODELS.get(builder)


TASK_KIND = "loss._component_"


def _task_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    task = facts.get("task")
    if task == PAIRS.get(keys.word(TASK_KIND) or ""):
        return {}
    return {TASK_KIND: next(loss for loss, ours in PAIRS.items() if ours == task)} if task in PAIRS.values() else {}


@reads(TEACHER, facts="task teacher loss_terms", write=_task_written, distance="kd_loss._component_", share="kd_ratio")
def _task(keys: Keys, at: Named) -> Facts:
    """Return what is trained for: its own data, a teacher's words, or what is preferred."""
    if keys.has(TEACHER):
        return {"task": "gkd", "teacher": _named(keys, TEACHER), "loss_terms": keys.choice(at.distance, DISTANCES)}
    return {"task": PAIRS.get(keys.word(TASK_KIND) or "")}


def _model_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    model = str(facts.get("model") or "").rpartition("/")[2].lower()
    listed = next((key for key, name in MODELS.items() if name == model), None)
    current = _builder(keys)[0]
    builder = current if current and listed in (None, _plain(current)) else listed
    words = facts.get("lora_targets") or "all"
    attention = list(ATTENTION.values())
    wanted = [*attention, *MLP] if words == "all" else attention if words == "attention" else words.split(",")
    rest, lora = {*wanted} - {*attention, "lm_head"}, bool(facts.get("lora_rank"))
    if builder is None or (lora and rest and rest != {*MLP}):
        return {}
    builder = f"{builder}_instruct" if builder in INSTRUCT_ONLY else builder
    family = max((name for name in (*SIZES, *FAMILIES) if builder.startswith(name)), key=len)
    component = {COMPONENT: f"torchtune.models.{family}.{'lora_' if lora else ''}{builder}"}
    if not lora:
        return component | dict.fromkeys((at.rank, at.modules, at.mlp, at.head, at.dropout, at.quantised))
    return {
        **component,
        at.rank: facts["lora_rank"],
        at.modules: [key for key, ours in ATTENTION.items() if ours in wanted],
        at.mlp: bool(rest),
        at.head: True if "lm_head" in wanted else False if keys.has(at.head) else None,
        at.quantised: True if facts.get("qlora") else None,
        at.dropout: facts.get("lora_dropout") or (0.0 if keys.has(at.dropout) else None),
    }


@reads(
    COMPONENT,
    facts="model lora_rank lora_targets qlora base lora_dropout",
    write=_model_written,
    bases=("nf4",),
    rank="model.lora_rank",
    modules="model.lora_attn_modules",
    mlp="model.apply_lora_to_mlp",
    head="model.apply_lora_to_output",
    dropout="model.lora_dropout",
    quantised="model.quantize_base",
    also=(*PARTS,),
)
def _model(keys: Keys, at: Named) -> Facts:
    trains = any(key.startswith("optimizer") for key in keys.document.names())
    for idle in filter(keys.has, () if trains else IDLE):
        raise keys.idle(idle, "without an optimizer trains nothing; the file is no training job")
    kind, name = _builder(keys)[1], _named(keys, COMPONENT)
    if name is None:
        return {}
    still = {part: str(keys.raw(key)).lower() in ("frozen", "false") for key, part in PARTS.items()}
    encoder, _, decoder = PARTS
    keys.note(
        encoder,
        "trains the encoder of images, which is not counted",
        "costs",
        "weights gradients optimizer",
        0.3,
        when=keys.has(encoder) and not still["encoder"],
    )
    keys.note(
        decoder,
        "trains none of the text model's own layers; they are counted",
        "saves",
        "gradients optimizer",
        when=still["decoder"],
    )
    if not kind:
        return {"model": name, "lora_rank": 0, "qlora": False}
    chosen = keys.words(at.modules) or []
    for word in chosen:
        keys.refuse(at.modules, f"{short(word)} is not one of {', '.join(ATTENTION)}", when=word not in ATTENTION)
    names = [ATTENTION[word] for word in chosen] + (list(MLP) if keys.flag(at.mlp) else [])
    names += ["lm_head"] if keys.flag(at.head) else []
    four = kind == "qlora" or bool(keys.flag(at.quantised))
    return {
        "model": name,
        "lora_rank": keys.whole(at.rank) or 8,
        "qlora": four,
        "base": "nf4" if four else None,
        "lora_targets": "all" if {*names} == {*ATTENTION.values(), *MLP} else ",".join(names),
        "lora_dropout": keys.real(at.dropout) or 0.0,
    }


SHARDING_COPIES = "data_parallel_replicate_dim"
SHARDING_INNER = product(
    row("zero", "fsdp_reshard_after_forward", words={"true": 3, "false": 2}, default=3, quiet=3),
    row("offload", "fsdp_cpu_offload", words={"true": "all", "false": "none"}, default="none", quiet="none"),
    degree("tp", "tensor_parallel_dim"),
    degree("replicas", SHARDING_COPIES),
    degree("cp", "context_parallel_dim"),
)


def _sharding_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    values: dict[str, Any] = {at.parts: -1 if keys.has(at.parts) else None}
    if (facts.get("tp") or 1) > 1 and not keys.has(at.plan):
        # The recipe of adapters refuses it, and the full one asks for a plan, which Llama 3 has (`models/llama3`).
        named = str(facts.get("model") or keys.word("model._component_"))
        split = not facts.get("lora_rank") and "llama3" in named.replace("-", "")
        values |= {at.plan: "torchtune.models.llama3.base_llama_tp_plan"} if split else {}
        facts = facts if split else {**facts, "tp": 1}
    return SHARDING_INNER.write(facts, keys) | values


@reads(
    *SHARDING_INNER.keys[:3],
    SHARDING_COPIES,
    facts="zero tp offload sequence_parallel replicas dp cp",
    write=_sharding_written,
    can={"zero": (0, 2, 3), "offload": ("none", "all")},
    parts="data_parallel_shard_dim",
    also=(SHARDING_INNER.keys[4],),
    plan="tensor_parallel_plan._component_",
)
def _sharding(keys: Keys, at: Named) -> Facts:
    """FSDP2 in the distributed recipes, which are those that can start on several GPUs."""
    facts, shards = SHARDING_INNER.read(keys), keys.whole(at.parts, minimum=-1) or -1
    away, replicas = facts["offload"] == "all", facts["replicas"]
    on_host = keys.word("optimizer._component_") in ON_HOST
    return {
        **facts,
        **{name: facts[name] if facts[name] > 1 else None for name in ("replicas", "cp")},
        "zero": 0 if keys.given.get("gpus") == 1 and not away else facts["zero"],
        "dp": replicas * shards if shards > 0 else None,
        "offload": "all" if away else "optimizer" if on_host else "none",
        # Of its plans for training those of Llama 4 split norms along the sequence (`models/llama4/_parallelism.py`).
        "sequence_parallel": facts["tp"] > 1 and "llama4" in (keys.word(at.plan) or ""),
    }


def _precision_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    word = str(facts.get("precision") or "")
    if word.startswith("fp8"):
        return {at.switch: True, at.recipe: word.partition("-")[2] or "tensorwise"}
    return at.inner.write(facts, keys) | {at.switch: None, at.recipe: None}


@reads(
    inner=row("precision", "dtype", words={"bf16": "bf16-pure", "fp32": "fp32"}, default="bf16-pure"),
    switch="enable_fp8_training",
    recipe="fp8_recipe_name",
    write=_precision_written,
)
def _precision(keys: Keys, at: Named) -> Facts:
    """`dtype` of everything; products in 8 bits beside it."""
    return {"precision": f"fp8-{keys.word(at.recipe) or 'tensorwise'}"} if keys.flag(at.switch) else at.inner.read(keys)


END_UNITS_BOTH = ["tok_embeddings", "output"]


def _end_units_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    apart = facts.get("end_units") == "apart"
    return {} if apart and keys.has(at.key) else {at.key: END_UNITS_BOTH if apart else None}


@reads(facts="end_units", write=_end_units_written, key="custom_sharded_layers")
def _end_units(keys: Keys, at: Named) -> Facts:
    names = [name.rpartition(".")[2] for name in keys.words(at.key) or []]
    other = names and sorted(names) != sorted(END_UNITS_BOTH)
    keys.note(at.key, f"is read where it names {' and '.join(END_UNITS_BOTH)}", parts="gathered", share=0.5, when=other)
    return {"end_units": "apart" if names and not other else None}


def _checkpointing_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    word = facts.get("recompute") or "none"
    kind, _, every = word.partition(":every=")
    if word == "per-op" or (kind == "full" and every):
        return {at.key: True, at.mode: "selective", at.option: int(every) if every else "op"}
    return {at.key: word == "full", at.mode: None, at.option: None} if word in ("none", "full") else {}


@reads(
    facts="recompute",
    write=_checkpointing_written,
    key="enable_activation_checkpointing",
    mode="ac_mode",
    option="ac_option",
)
def _checkpointing(keys: Keys, at: Named) -> Facts:
    # `ac_mode` is of the full recipes, where it goes before the switch.
    kind = keys.choice(at.mode, {"none": "none", "full": "full", "selective": "selective"})
    if kind == "selective":
        if keys.word(at.option) == "op":
            return {"recompute": "per-op"}
        every = keys.whole(at.option) or 1
        return {"recompute": "full" if every == 1 else f"full:every={every}"}
    return {"recompute": kind or ("full" if keys.flag(at.key) else "none")}


@reads(
    facts="eval_batch",
    # Without data to validate on there is no validation.
    write=lambda facts, keys, at: {at.size: facts.get("eval_batch")} if keys.has(at.every) else {},
    size="batch_size_val",
    every="run_val_every_n_steps",
)
def _validation(keys: Keys, at: Named) -> Facts:
    return {"eval_batch": keys.whole(at.size) or keys.whole("batch_size") or 1 if keys.has(at.every) else None}


def _loss_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    word, _, number = str(facts.get("loss") or "auto").partition(":")
    wanted = int(number or PIECES)
    own = keys.word(at.kind)
    if word not in ("auto", "float32") or own in PAIRS:
        return {}
    if wanted == 1:
        return {at.kind: AT_ONCE, at.pieces: None}
    pieces = wanted if wanted != PIECES or keys.has(at.pieces) else None
    return {at.kind: own if own in IN_PIECES else IN_PIECES[0], at.pieces: pieces}


@reads(facts="loss", write=_loss_written, kind="loss._component_", pieces="loss.num_output_chunks")
def _loss(keys: Keys, at: Named) -> Facts:
    name = keys.choice(at.kind, dict.fromkeys(IN_PIECES, "in pieces") | dict.fromkeys((AT_ONCE, *PAIRS), "at once"))
    number = 1 if name == "at once" else keys.whole(at.pieces) or PIECES
    return {"loss": "auto" if number == PIECES else f"float32:{number}"}


@reads(
    inner=compiled("compile"),
    model="compile.model",
    write=lambda facts, keys, at: (
        {at.model: bool(facts.get("compile"))} if isinstance(keys.raw("compile"), dict) else at.inner.write(facts, keys)
    ),
)
def _compiled(keys: Keys, at: Named) -> Facts:
    """A switch, or what of the step is compiled, the model unless it says otherwise (`recipes/full_finetune_distributed.py`)."""
    parts = isinstance(keys.raw("compile"), dict)
    return {"compile": keys.flag(at.model) is not False} if parts else at.inner.read(keys)


TORCHTUNE = Dialect(
    name="torchtune",
    title="torchtune recipe",
    versions="torchtune 0.3 - 0.6",
    syntaxes=("yaml",),
    framework="torchtune",
    blank={"yaml": "device: cuda\nepochs: 1\nenable_activation_checkpointing: false\n"},
    ideas=(
        _model,
        _task,
        _sharding,
        _end_units,
        row("micro_batch", "batch_size", default=1),
        row("accumulation", "gradient_accumulation_steps", default=1),
        row("seq_len", "tokenizer.max_seq_len"),
        _checkpointing,
        _precision,
        instantiated(
            "optimizer._component_", OPTIMIZERS, in_backward="optimizer_in_bwd", harmless=("offload_gradients",)
        ),
        row(
            "activation_offload",
            "enable_activation_offloading",
            words={"true": "all", "false": "none"},
            default="none",
            off="none",
        ),
        _validation,
        _loss,
        _compiled,
    ),
)
