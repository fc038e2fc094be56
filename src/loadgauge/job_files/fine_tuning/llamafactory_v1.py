"""LLaMA-Factory's second layout (`llamafactory.v1`): one level of keys, with sections that name a plugin each.

A model that is trained whole is made float32 (`core/model_engine.py`); only FSDP2 and DeepSpeed compute it in bfloat16.
"""

from typing import Any

from loadgauge.job_files.fine_tuning.llamafactory import ATTENTION
from loadgauge.job_files.fine_tuning.started import started
from loadgauge.job_files.hugging_face.deepspeed import context_parallel
from loadgauge.job_files.hugging_face.huggingface import dropout, targets
from loadgauge.job_files.hugging_face.trl_tasks import words_of_path
from loadgauge.job_files.ideas import (
    IDLE,
    Dialect,
    Facts,
    Keys,
    Named,
    freeze,
    quantised,
    reads,
    row,
    whole_and_dora,
)
from loadgauge.job_files.pre_training.megatron import launched

METHOD, SHARDED, KERNELS, QUANTISED = "peft_config.name", "dist_config.name", "kernel_config.name", "quant_config.name"


def _sharding_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    stage, away = facts.get("zero") or 0, facts.get("offload") == "all"
    if keys.word(SHARDED) == "deepspeed" or stage == 1 or facts.get("offload") == "optimizer":
        return {}
    if not stage:
        return dict.fromkeys((SHARDED, at.reshard, at.moved, at.pinned))
    return {SHARDED: "fsdp2", at.reshard: False if stage == 2 else None, at.moved: True if away else None}


@reads(
    SHARDED,
    facts="framework zero offload pin_memory",
    write=_sharding_written,
    reshard="dist_config.reshard_after_forward",
    moved="dist_config.offload_params",
    pinned="dist_config.pin_memory",
)
def _sharding(keys: Keys, at: Named) -> Facts:
    """FSDP2 (`plugins/trainer_plugins/distributed/fsdp2.py`), DeepSpeed by its file, or nothing but data parallelism."""
    name = keys.choice(SHARDED, {"fsdp2": "fsdp2", "deepspeed": "deepspeed", "fsdpturbo": "fsdp2"})
    if name is None:
        return {"framework": "huggingface", "zero": 0, "offload": "none"}
    if name == "deepspeed":
        return {"framework": "deepspeed"}
    keys.note(
        SHARDED,
        "shards in a way of its own, and is counted as FSDP2",
        "either",
        "gathered transient",
        when=keys.word(SHARDED) != "fsdp2",
    )
    away = keys.flag(at.moved)
    return {
        "framework": "huggingface",
        "zero": 2 if keys.flag(at.reshard) is False else 3,
        "offload": "all" if away else "none",
        "pin_memory": False if away and keys.flag(at.pinned) is False else None,
    }


def _precision_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    name = facts.get("precision") or "bf16"
    return {at.key: None if name == "bf16" else False} if name in ("bf16", "fp32") else {}


@reads(facts="precision weights", write=_precision_written, key="bf16")
def _precision(keys: Keys, at: Named) -> Facts:
    """`bf16`, which is FSDP2's: without it nothing casts, so that a whole model runs in float32, adapters in the checkpoint's
    bfloat16."""
    whole, sharded = not keys.has(METHOD) or keys.word(METHOD) == "freeze", keys.word(SHARDED)
    if sharded == "deepspeed":  # by its file, bfloat16 where that leaves it open
        return {"precision": "bf16"}
    if sharded is not None and keys.flag(at.key) is not False:
        return {"precision": "bf16", "weights": "float32" if whole else "bfloat16"}
    if sharded is not None and keys.word("flash_attn") == "flash_attention_2":  # which has no float32
        keys.note(
            at.key, "computes in float32 what is counted in bfloat16", "costs", "gathered activations loss transient"
        )
        return {"precision": "bf16", "weights": "float32" if whole else "bfloat16"}
    return {"precision": "fp32", "weights": "float32"} if whole or sharded is not None else {"precision": "bf16-pure"}


def _quantises(keys: Keys) -> bool:
    return keys.has(QUANTISED) and (keys.has("quant_config.quantization_bit") or keys.word(QUANTISED) == "bnb")


ADAPTER_INNER = targets("peft_config.r", "peft_config.target_modules", (METHOD, None, "lora"), 8, "all")
ADAPTER_BASE = quantised(
    bits=("quant_config.quantization_bit",),
    on=_quantises,
    kind="quant_config.quantization_type",
    nested="quant_config.double_quantization",
    upcast="none",
)
ADAPTER_BESIDE = whole_and_dora("peft_config.modules_to_save", "peft_config.use_dora")


def _adapter_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    name = {QUANTISED: "bnb" if facts.get("qlora") else None}
    return ADAPTER_INNER.write(facts, keys) | name | ADAPTER_BASE.write(facts, keys) | ADAPTER_BESIDE.write(facts, keys)


@reads(
    *ADAPTER_INNER.keys,
    QUANTISED,
    *ADAPTER_BASE.keys,
    *ADAPTER_BESIDE.keys,
    facts=("adapter", *ADAPTER_INNER.facts, *ADAPTER_BASE.facts, *ADAPTER_BESIDE.facts),
    write=_adapter_written,
    can={"adapter": ("lora",)},
    bases=("nf4", "nf4-single", "int8"),
    out="peft_config.export_dir",
)
def _adapter(keys: Keys, at: Named) -> Facts:
    """LoRA (`plugins/model_plugins/peft.py`), on a base that bitsandbytes quantises where it is said (`quantization.py`)."""
    if keys.has(at.out):
        raise keys.idle(at.out, "writes a model with its adapters, and trains nothing")
    if keys.choice(METHOD, {"lora": "lora", "freeze": "freeze"}) == "lora":
        facts = (
            ADAPTER_INNER.read(keys)
            | (ADAPTER_BASE.read(keys) if _quantises(keys) else {"qlora": False})
            | ADAPTER_BESIDE.read(keys)
        )
        return facts | {"lora_targets": facts["lora_targets"] or "all"}
    keys.refuse(QUANTISED, "needs peft_config.name lora", when=_quantises(keys))
    return {"lora_rank": 0, "qlora": False}


@reads("train_dataset")
def _pairs(keys: Keys) -> Facts:
    """Preferences, by the names of the file and of its data: of their trainers the release has none (`launcher.py`)."""
    keys.note(
        "train_dataset",
        "is of pairs, whose trainer 0.9.5 does not have; counted as SFT, without a reference",
        "costs",
        "weights gathered activations loss",
        when="dpo" in words_of_path(keys.file, 1) | words_of_path(str(keys.raw("train_dataset")), 1),
    )
    return {}


@reads(
    KERNELS,
    facts="kernels loss",
    write=lambda facts, keys: {KERNELS: "liger_kernel" if facts.get("kernels") == "liger" else None},
)
def _kernels(keys: Keys) -> Facts:
    """Liger's kernels, whose loss is left out as the trainer needs the logits (`require_logits`)."""
    names = keys.words(KERNELS) or []
    others = [name for name in names if name != "liger_kernel"]
    keys.note(
        KERNELS,
        "runs parts of a layer in kernels that are chosen at the start",
        "either",
        "activations",
        0.5,
        when=others,
    )
    return {"kernels": "liger" if len(others) < len(names) else "native", "loss": "float32"}


V1 = Dialect(
    name="llamafactory-v1",
    title="LLaMA-Factory v1",
    versions="LLaMA-Factory 0.9.5 (llamafactory.v1)",
    syntaxes=("yaml", "json", "argv"),
    objects=frozenset({"peft_config", "kernel_config", "quant_config", "dist_config", "optim_config"}),
    blank={"yaml": "model_class: llm\nsample_backend: hf\n", "json": '{\n  "model_class": "llm",\n  "sample_backend": "hf"\n}\n',
           "argv": "torchrun src/llamafactory/v1/launcher.py sft --sample_backend hf\n"},
    ideas=(
        launched(),
        started(),
        row("model", "model", kind="word"),
        row("head", "model_class", words={"llm": None, "cls": 1}),
        _sharding,
        context_parallel("dist_config.cp_size", "cp_size"),
        row("micro_batch", "micro_batch_size", default=1),
        row("global_batch", "global_batch_size"),
        row("seq_len", "cutoff_len", default=2048),
        _adapter,
        dropout("peft_config.lora_dropout", lambda keys: 0.05 if keys.word(METHOD) == "lora" else None),
        _pairs,
        freeze(METHOD, "peft_config."),
        row("recompute", "enable_activation_checkpointing", words={"true": "full", "false": "none"}, default="full"),
        _precision,
        row("attention", "flash_attn", words=ATTENTION | {"eager": "eager", "flash_attention_2": "fa2"}, default="flash"),
        _kernels,
    ),
    programs={r"\bllamafactory-cli merge\b": IDLE},
)  # fmt: skip
