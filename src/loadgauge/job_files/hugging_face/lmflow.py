"""LMFlow's scripts: transformers' arguments, and its own for adapters, layers by turns and optimizers."""

from __future__ import annotations

from typing import Any

from loadgauge.job_files.hugging_face.huggingface import (
    BATCH,
    SAVING,
    SHARED,
    TORCH_COMPILE,
    attention,
    checkpointing,
    dropout,
    half,
    liger,
    weights,
)
from loadgauge.job_files.ideas import TORCH_OPTIMIZERS, Dialect, Facts, Idea, Keys, optimizer, row
from loadgauge.job_files.ideas.evaluation import evaluation

LORA, QLORA, RANK, TARGETS = "use_lora", "use_qlora", "lora_r", "lora_target_modules"
USUAL = "q_proj,v_proj,c_attn,query_key_value"
"""PEFT's choice where none is named: what a model has of these."""
ADAM = dict.fromkeys(
    ("adam", "adabelief", "adabound", "lamb", "adamax", "nadam", "radam", "adamp", "yogi", "sophia", "adadelta"),
    "adamw-loop",
)
CUSTOM = ADAM | {
    "dummy": "sgd", "sgdp": "sgd-momentum", "lars": "sgd-momentum", "adagrad": "adagrad", "muon": "muon",
    "adamw_schedule_free": "schedule-free-adamw", "sgd_schedule_free": "schedule-free-sgd",
}  # fmt: skip
"""`customized_optim`, by the states that each keeps of a parameter: two, one or none."""


def _adapters() -> Idea:
    def read(keys: Keys) -> Facts:
        if not keys.flag(LORA) and not keys.flag(QLORA):
            return {"lora_rank": 0}
        chosen = keys.words(TARGETS)
        words = USUAL if chosen is None else "all" if chosen == ["all-linear"] else ",".join(chosen)
        facts: Facts = {"lora_rank": keys.whole(RANK) or 8, "lora_targets": words, "qlora": bool(keys.flag(QLORA))}
        if not keys.flag(QLORA):
            return facts
        base = "int8" if keys.whole("bits") == 8 else "nf4-single" if keys.flag("double_quant") is False else "nf4"
        return facts | {"base": base, "kbit_upcast": "all"}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        rank, base = facts.get("lora_rank"), facts.get("base") or "nf4"
        if not rank:
            return {LORA: None, QLORA: None, RANK: None, TARGETS: None}
        words = facts.get("lora_targets") or "all"
        named = ["all-linear"] if words == "all" else None if words == USUAL else words.split(",")
        eight, single = (8 if base == "int8" else None), (False if base == "nf4-single" else None)
        quantised = facts.get("qlora")
        return {LORA: True, RANK: rank, TARGETS: named, QLORA: True if quantised else None} | (
            {"bits": eight, "double_quant": single} if quantised else {}
        )

    return Idea(
        keys=(LORA, QLORA, RANK, TARGETS, "bits", "double_quant"),
        facts=("lora_rank", "lora_targets", "qlora", "base", "kbit_upcast"),
        read=read,
        write=write,
    )


def _optimizer() -> Idea:
    inner = optimizer("optim", TORCH_OPTIMIZERS)
    name, switch = "customized_optim", "use_customized_optim"

    return Idea(
        keys=(*inner.keys, name, switch),
        facts=inner.facts,
        read=lambda keys: {"optimizer": keys.choice(name, CUSTOM)} if keys.flag(switch) else inner.read(keys),
        write=lambda facts, keys: {name: None, switch: None} | inner.write(facts, keys),
    )


LMFLOW = Dialect(
    name="lmflow",
    trainers="trl",
    title="LMFlow",
    objects=frozenset({"deepspeed", "fsdp_config"}),
    versions="LMFlow 0.0.5 - 1.0",
    syntaxes=("argv",),
    auto=True,
    blank={"argv": "torchrun examples/finetune.py --output_dir output --disable_group_texts 1\n"},
    ideas=(
        *SHARED,
        *BATCH,
        _optimizer(),
        attention("use_flash_attention"),
        row("seq_len", "block_size", "max_length", default=512),
        checkpointing(new="gradient_checkpointing"),
        half(),
        weights("torch_dtype", "dtype", decides=True),
        # `dpo_train.py` has TRL's trainer, and the model without its adapters as the reference.
        Idea(
            keys=("beta_dpo",),
            facts=("task",),
            read=lambda keys: {"task": "dpo"} if "dpo_train" in " ".join(getattr(keys.document, "program", ())) else {},
            write=lambda facts, keys: {},
        ),
        _adapters(),
        dropout("lora_dropout", lambda keys: 0.1 if keys.flag(LORA) else None),
        evaluation(),
        SAVING,
        TORCH_COMPILE,
        liger("use_liger_kernel"),
    ),
)
