"""torchtune's recipes (YAML): components by their names, instantiated with the keys beside them."""

from __future__ import annotations

from typing import Any

from loadgauge.job_files.hugging_face.huggingface import compiled
from loadgauge.job_files.ideas import (
    BITSANDBYTES,
    Dialect,
    Facts,
    Idea,
    Keys,
    degree,
    instantiated,
    product,
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
    if builder and builder not in MODELS:
        raise keys.wrong(component, f"{short(builder)} is no language model that is read (read: {', '.join(MODELS)})")
    return MODELS.get(builder)


def _task() -> Idea:
    """Return what is trained for: its own data, a teacher's words, or what is preferred."""
    kind, distance, share = "loss._component_", "kd_loss._component_", "kd_ratio"

    def read(keys: Keys) -> Facts:
        if keys.has(TEACHER):
            return {"task": "gkd", "teacher": _named(keys, TEACHER), "loss_terms": keys.choice(distance, DISTANCES)}
        return {"task": PAIRS.get(keys.word(kind) or "")}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        task = facts.get("task")
        if task == PAIRS.get(keys.word(kind) or ""):
            return {}
        return {kind: next(loss for loss, ours in PAIRS.items() if ours == task)} if task in PAIRS.values() else {}

    return Idea(keys=(TEACHER, distance, share), facts=("task", "teacher", "loss_terms"), read=read, write=write)


def _model() -> Idea:
    rank, modules, mlp, dropout = (
        "model.lora_rank",
        "model.lora_attn_modules",
        "model.apply_lora_to_mlp",
        "model.lora_dropout",
    )
    quantised = "model.quantize_base"

    def read(keys: Keys) -> Facts:
        idle = (
            None
            if any(key.startswith("optimizer") for key in keys.document.names())
            else next(filter(keys.has, IDLE), None)
        )
        if idle is not None:
            raise keys.idle(idle, "without an optimizer trains nothing; the file is no training job")
        kind, name = _builder(keys)[1], _named(keys, COMPONENT)
        if name is None:
            return {}
        for key, part in PARTS.items():
            if key.startswith("model.decoder") and str(keys.raw(key)).lower() in ("frozen", "false"):
                keys.note(
                    key, "trains none of the text model's own layers; they are counted", "saves", "gradients optimizer"
                )
            elif part == "encoder" and keys.has(key) and str(keys.raw(key)).lower() not in ("frozen", "false"):
                keys.note(
                    key,
                    "trains the encoder of images, which is not counted",
                    "costs",
                    "weights gradients optimizer",
                    0.3,
                )
        if not kind:
            return {"model": name, "lora_rank": 0, "qlora": False}
        chosen = keys.words(modules) or []
        unknown = [word for word in chosen if word not in ATTENTION]
        if unknown:
            raise keys.wrong(modules, f"{short(unknown[0])} is not one of {', '.join(ATTENTION)}")
        names = [ATTENTION[word] for word in chosen] + (list(MLP) if keys.flag(mlp) else [])
        four = kind == "qlora" or bool(keys.flag(quantised))
        return {
            "model": name,
            "lora_rank": keys.whole(rank) or 8,
            "qlora": four,
            "base": "nf4" if four else None,
            "lora_targets": "all" if len(names) == 7 else ",".join(names),
            "lora_dropout": keys.real(dropout) or 0.0,
        }

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        given = str(facts.get("model") or "").rpartition("/")[2].lower()
        builder = next((key for key, name in MODELS.items() if name == given), None)
        current = _builder(keys)[0]
        if current and (builder is None or _plain(current) == builder):
            builder = current
        if builder is None:
            return {}
        builder = f"{builder}_instruct" if builder in INSTRUCT_ONLY else builder
        family = max((name for name in (*SIZES, *FAMILIES) if builder.startswith(name)), key=len)
        lora, four = bool(facts.get("lora_rank")), bool(facts.get("qlora"))
        if four and (facts.get("base") or "nf4") != "nf4":
            return {}
        adapters: dict[str, Any] = dict.fromkeys((rank, modules, mlp, dropout, quantised))
        if lora:
            words = facts.get("lora_targets") or "all"
            attention = list(ATTENTION.values())
            wanted = [*attention, *MLP] if words == "all" else attention if words == "attention" else words.split(",")
            rest = [word for word in wanted if word not in attention]
            if rest and set(rest) != set(MLP):
                return {}
            adapters = {
                rank: facts["lora_rank"],
                modules: [key for key, ours in ATTENTION.items() if ours in wanted],
                mlp: bool(rest),
                quantised: True if four else None,
                dropout: facts.get("lora_dropout") or (0.0 if keys.has(dropout) else None),
            }
        prefix = "lora_" if lora else ""
        return {COMPONENT: f"torchtune.models.{family}.{prefix}{builder}"} | adapters

    return Idea(
        keys=(COMPONENT, rank, modules, mlp, dropout, quantised, *PARTS),
        facts=("model", "lora_rank", "lora_targets", "qlora", "base", "lora_dropout"),
        read=read,
        write=write,
    )


def _sharding() -> Idea:
    """FSDP2 in the distributed recipes, which are those that can start on several GPUs."""
    kind, plan = "optimizer._component_", "tensor_parallel_plan._component_"
    copies, parts = "data_parallel_replicate_dim", "data_parallel_shard_dim"
    inner = product(
        row("zero", "fsdp_reshard_after_forward", words={"true": 3, "false": 2}, default=3, quiet=3),
        row("offload", "fsdp_cpu_offload", words={"true": "all", "false": "none"}, default="none", quiet="none"),
        degree("tp", "tensor_parallel_dim"),
        degree("replicas", copies),
        degree("cp", "context_parallel_dim"),
    )

    def read(keys: Keys) -> Facts:
        facts, shards = inner.read(keys), keys.whole(parts, minimum=-1) or -1
        away, replicas = facts["offload"] == "all", facts["replicas"]
        several = {name: facts[name] if facts[name] > 1 else None for name in ("replicas", "cp")}
        # Of its plans for training those of Llama 4 split norms along the sequence (`models/llama4/_parallelism.py`).
        along = facts["tp"] > 1 and "llama4" in (keys.word(plan) or "")
        return (
            facts
            | several
            | {
                "zero": 0 if keys.given.get("gpus") == 1 and not away else facts["zero"],
                "dp": replicas * shards if shards > 0 else None,
                "offload": "all" if away else "optimizer" if keys.word(kind) in ON_HOST else "none",
                "sequence_parallel": along,
            }
        )

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        if facts.get("zero") == 1 or facts.get("offload") == "optimizer":
            return {}
        return inner.write(facts, keys) | {parts: -1 if keys.has(parts) else None}

    return Idea(
        keys=(*inner.keys[:3], copies, parts, inner.keys[4], plan),
        facts=("zero", "tp", "offload", "sequence_parallel", "replicas", "dp", "cp"),
        read=read,
        write=write,
    )


def _precision() -> Idea:
    """`dtype` of everything; products in 8 bits beside it."""
    switch, recipe = "enable_fp8_training", "fp8_recipe_name"
    inner = row("precision", "dtype", words={"bf16": "bf16-pure", "fp32": "fp32"}, default="bf16-pure")

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        word = str(facts.get("precision") or "")
        if word.startswith("fp8"):
            return {switch: True, recipe: word.partition("-")[2] or "tensorwise"}
        return inner.write(facts, keys) | {switch: None, recipe: None}

    return Idea(
        keys=(*inner.keys, switch, recipe),
        facts=inner.facts,
        read=lambda keys: (
            {"precision": f"fp8-{keys.word(recipe) or 'tensorwise'}"} if keys.flag(switch) else inner.read(keys)
        ),
        write=write,
    )


def _end_units() -> Idea:
    key, both = "custom_sharded_layers", ["tok_embeddings", "output"]

    def read(keys: Keys) -> Facts:
        names = [name.rpartition(".")[2] for name in keys.words(key) or []]
        if names and sorted(names) != sorted(both):
            keys.note(key, f"is read where it names {' and '.join(both)}", parts="gathered", share=0.5)
            return {"end_units": None}
        return {"end_units": "apart" if names else None}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        apart = facts.get("end_units") == "apart"
        if apart and keys.has(key):
            return {}
        return {key: both if apart else None}

    return Idea(keys=(key,), facts=("end_units",), read=read, write=write)


def _checkpointing() -> Idea:
    key, mode, option = "enable_activation_checkpointing", "ac_mode", "ac_option"

    def read(keys: Keys) -> Facts:
        # `ac_mode` is of the full recipes, where it goes before the switch.
        kind = keys.choice(mode, {"none": "none", "full": "full", "selective": "selective"})
        if kind == "selective":
            if keys.word(option) == "op":
                return {"recompute": "per-op"}
            every = keys.whole(option) or 1
            return {"recompute": "full" if every == 1 else f"full:every={every}"}
        return {"recompute": kind or ("full" if keys.flag(key) else "none")}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        word = facts.get("recompute") or "none"
        kind, _, every = word.partition(":every=")
        if word == "per-op" or (kind == "full" and every):
            return {key: True, mode: "selective", option: int(every) if every else "op"}
        return {key: word == "full", mode: None, option: None} if word in ("none", "full") else {}

    return Idea(keys=(key, mode, option), facts=("recompute",), read=read, write=write)


def _validation() -> Idea:
    size, every = "batch_size_val", "run_val_every_n_steps"

    return Idea(
        keys=(size, every),
        facts=("eval_batch",),
        read=lambda keys: {
            "eval_batch": (keys.whole(size) or keys.whole("batch_size") or 1) if keys.has(every) else None
        },
        # Without data to validate on there is no validation.
        write=lambda facts, keys: {size: facts.get("eval_batch")} if keys.has(every) else {},
    )


def _loss() -> Idea:
    kind, pieces = "loss._component_", "loss.num_output_chunks"

    def read(keys: Keys) -> Facts:
        name = keys.choice(kind, dict.fromkeys(IN_PIECES, "in pieces") | dict.fromkeys((AT_ONCE, *PAIRS), "at once"))
        number = 1 if name == "at once" else keys.whole(pieces) or PIECES
        return {"loss": "auto" if number == PIECES else f"float32:{number}"}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        word, _, number = str(facts.get("loss") or "auto").partition(":")
        if word not in ("auto", "float32"):
            return {}
        wanted = int(number or PIECES)
        if keys.word(kind) in PAIRS:
            return {}
        if wanted == 1:
            return {kind: AT_ONCE, pieces: None}
        same = keys.word(kind) if keys.word(kind) in IN_PIECES else IN_PIECES[0]
        return {kind: same, pieces: wanted if wanted != PIECES or keys.has(pieces) else None}

    return Idea(keys=(kind, pieces), facts=("loss",), read=read, write=write)


def _compiled() -> Idea:
    """A switch, or what of the step is compiled, the model unless it says otherwise (`recipes/full_finetune_distributed.py`)."""
    inner, model = compiled("compile"), "compile.model"

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        parts = isinstance(keys.raw("compile"), dict)
        return {model: bool(facts.get("compile"))} if parts else inner.write(facts, keys)

    return Idea(
        keys=(*inner.keys, model),
        facts=inner.facts,
        read=lambda keys: (
            {"compile": keys.flag(model) is not False} if isinstance(keys.raw("compile"), dict) else inner.read(keys)
        ),
        write=write,
    )


TORCHTUNE = Dialect(
    name="torchtune",
    title="torchtune recipe",
    versions="torchtune 0.3 - 0.6",
    syntaxes=("yaml",),
    framework="torchtune",
    blank={"yaml": "device: cuda\nepochs: 1\nenable_activation_checkpointing: false\n"},
    ideas=(
        _model(),
        _task(),
        _sharding(),
        _end_units(),
        row("micro_batch", "batch_size", default=1),
        row("accumulation", "gradient_accumulation_steps", default=1),
        row("seq_len", "tokenizer.max_seq_len"),
        _checkpointing(),
        _precision(),
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
        _validation(),
        _loss(),
        _compiled(),
    ),
)
