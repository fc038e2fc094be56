"""torchtune's recipes (YAML): components by their names, instantiated with the keys beside them."""

from __future__ import annotations

from typing import Any

from loadgauge.job_files.hugging_face.huggingface import compiled
from loadgauge.job_files.ideas.optimizers import instantiated
from loadgauge.job_files.ideas.table import Dialect, Facts, Idea, Keys, row, short
from loadgauge.job_files.ideas.words import BITSANDBYTES

SIZES = {
    "llama2": ("llama-2", "7b 13b 70b"), "llama3": ("llama-3", "8b 70b"), "llama3_1": ("llama-3.1", "8b 70b 405b"),
    "llama3_2": ("llama-3.2", "1b 3b"), "llama3_3": ("llama-3.3", "70b"), "gemma": ("gemma", "2b 7b"),
    "gemma2": ("gemma-2", "2b 9b 27b"), "qwen2": ("qwen2", "0_5b 1_5b 7b"),
    "qwen2_5": ("qwen2.5", "0_5b 1_5b 3b 7b 14b 32b 72b"),
}  # fmt: skip
"""Families, the beginning of their names in the catalogue, and their sizes."""
MODELS = {
    f"{family}_{size}": f"{name}-{size.replace('_', '.')}"
    for family, (name, sizes) in SIZES.items()
    for size in sizes.split()
} | {"mistral_7b": "mistral-7b-v0.1", "phi3_mini": "phi-3-mini", "phi4_14b": "phi-4"}  # fmt: skip
"""Builders of `torchtune.models`, without `lora_` and `qlora_` before and `_base` and `_instruct` behind, in the catalogue."""
INSTRUCT_ONLY = ("qwen2_5_1_5b", "qwen2_5_7b", "qwen2_5_14b", "qwen2_5_32b", "qwen2_5_72b")
"""Models with a builder for each of `_base` and `_instruct`, and none without."""
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


def _builder(keys: Keys) -> tuple[str, str]:
    """The builder of the model without its prefix, and the prefix: empty, `lora` or `qlora`."""
    name = (keys.word(COMPONENT) or "").rpartition(".")[2]
    prefix, _, rest = name.partition("_")
    return (rest, prefix) if prefix in ("lora", "qlora") else (name, "")


def _plain(builder: str) -> str:
    return builder.removesuffix("_instruct").removesuffix("_base")


def _model() -> Idea:
    rank, modules, mlp, dropout = (
        "model.lora_rank",
        "model.lora_attn_modules",
        "model.apply_lora_to_mlp",
        "model.lora_dropout",
    )
    quantised = "model.quantize_base"

    def read(keys: Keys) -> Facts:
        builder, kind = _builder(keys)
        if not builder:
            return {}
        name = MODELS.get(_plain(builder))
        if name is None:
            raise keys.wrong(
                COMPONENT,
                f"{short(builder)} is no language model that is read (read: {', '.join(SIZES)}, mistral, phi)",
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
        family = max((name for name in (*SIZES, "mistral", "phi3", "phi4") if builder.startswith(name)), key=len)
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
        keys=(COMPONENT, rank, modules, mlp, dropout, quantised),
        facts=("model", "lora_rank", "lora_targets", "qlora", "base", "lora_dropout"),
        read=read,
        write=write,
    )


def _sharding() -> Idea:
    """FSDP2 in the distributed recipes, which are those that can start on several GPUs."""
    reshard, offload, tp = "fsdp_reshard_after_forward", "fsdp_cpu_offload", "tensor_parallel_dim"
    kind = "optimizer._component_"

    def read(keys: Keys) -> Facts:
        facts: Facts = {"zero": 2 if keys.flag(reshard) is False else 3, "tp": keys.whole(tp) or 1}
        if keys.given.get("gpus") == 1 and not keys.flag(offload):
            facts["zero"] = 0
        moved = "all" if keys.flag(offload) else "optimizer" if keys.word(kind) in ON_HOST else "none"
        return facts | {"offload": moved, "sequence_parallel": False}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        stage, moved, ranks = facts.get("zero") or 0, facts.get("offload") or "none", facts.get("tp") or 1
        if stage == 1 or moved == "optimizer":
            return {}
        return {
            reshard: False if stage == 2 else True if keys.has(reshard) else None,
            offload: True if moved == "all" else False if keys.has(offload) else None,
            tp: ranks if ranks > 1 or keys.has(tp) else None,
        }

    return Idea(
        keys=(reshard, offload, tp), facts=("zero", "tp", "offload", "sequence_parallel"), read=read, write=write
    )


def _end_units() -> Idea:
    key, both = "custom_sharded_layers", ["tok_embeddings", "output"]

    def read(keys: Keys) -> Facts:
        names = keys.words(key)
        if names is not None and sorted(names) != sorted(both):
            raise keys.wrong(key, f"is read where it names {' and '.join(both)}")
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

    def read(keys: Keys) -> Facts:
        return {"eval_batch": (keys.whole(size) or keys.whole("batch_size") or 1) if keys.has(every) else None}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        # Without data to validate on there is no validation.
        return {size: facts.get("eval_batch")} if keys.has(every) else {}

    return Idea(keys=(size, every), facts=("eval_batch",), read=read, write=write)


def _loss() -> Idea:
    kind, pieces = "loss._component_", "loss.num_output_chunks"

    def read(keys: Keys) -> Facts:
        name = keys.choice(kind, dict.fromkeys(IN_PIECES, "in pieces") | {AT_ONCE: "at once"})
        number = 1 if name == "at once" else keys.whole(pieces) or PIECES
        return {"loss": "auto" if number == PIECES else f"float32:{number}"}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        word, _, number = str(facts.get("loss") or "auto").partition(":")
        if word not in ("auto", "float32"):
            return {}
        wanted = int(number or PIECES)
        if wanted == 1:
            return {kind: AT_ONCE, pieces: None}
        same = keys.word(kind) if keys.word(kind) in IN_PIECES else IN_PIECES[0]
        return {kind: same, pieces: wanted if wanted != PIECES or keys.has(pieces) else None}

    return Idea(keys=(kind, pieces), facts=("loss",), read=read, write=write)


TORCHTUNE = Dialect(
    name="torchtune",
    title="torchtune recipe",
    versions="torchtune 0.3 - 0.6",
    syntaxes=("yaml",),
    framework="torchtune",
    blank={"yaml": "device: cuda\nepochs: 1\nenable_activation_checkpointing: false\n"},
    ideas=(
        _model(),
        _sharding(),
        _end_units(),
        row("micro_batch", "batch_size", default=1),
        row("accumulation", "gradient_accumulation_steps", default=1),
        row("seq_len", "tokenizer.max_seq_len"),
        _checkpointing(),
        row("precision", "dtype", words={"bf16": "bf16-pure", "fp32": "fp32"}, default="bf16-pure"),
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
        compiled("compile"),
    ),
)
