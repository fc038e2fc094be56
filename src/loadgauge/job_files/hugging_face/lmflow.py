"""LMFlow's scripts: transformers' arguments, and its own for adapters, layers by turns and optimizers."""

from collections.abc import Callable
from typing import Any

from loadgauge.job_files.hugging_face.huggingface import (
    DETERMINISM,
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
from loadgauge.job_files.hugging_face.peft import UNNAMED
from loadgauge.job_files.ideas import (
    TORCH_OPTIMIZERS,
    Dialect,
    Facts,
    Idea,
    Keys,
    Named,
    evaluation,
    names_in,
    optimizer,
    reads,
    row,
)

LORA, QLORA, RANK, TARGETS = "use_lora", "use_qlora", "lora_r", "lora_target_modules"
ADAM = dict.fromkeys(
    names_in("adam adabelief adabound lamb adamax nadam radam adamp yogi sophia adadelta muon dummy adan"), "adamw-loop"
)
CUSTOM = ADAM | {
    "sgdp": "sgd-momentum", "lars": "sgd-momentum", "novograd": "sgd-momentum", "adagrad": "adagrad",
    "adamw_schedule_free": "schedule-free-adamw", "sgd_schedule_free": "schedule-free-sgd",
}  # fmt: skip
"""`customized_optim`, by the states that each keeps of a parameter, two or one (`src/lmflow/optim`)."""


PAIRS = "q_proj,v_proj,k_proj,out_proj,fc_in,fc_out,wte"
"""The matrices that `dpo_aligner.py` always trains adapters on."""


def _program(keys: Keys, name: str) -> bool:
    return name in keys.program


def _by_program(aligner: Any, usual: Any = None, second: Any = None) -> Callable[[Keys], Any]:
    """A default that is `dpo_aligner.py`'s own (`dpo_train.py`), that of `dpov2_aligner.py`, or everybody's."""
    other = usual if second is None else second
    return lambda keys: aligner if _program(keys, "dpo_train") else other if _program(keys, "dpov2_train") else usual


def _adapters_written(facts: Facts, keys: Keys) -> dict[str, Any]:
    rank, base, quantised = facts.get("lora_rank"), facts.get("base") or "nf4", facts.get("qlora")
    if not rank:
        return {LORA: None, QLORA: None, RANK: None, TARGETS: None}
    words = facts.get("lora_targets") or "all"
    bits = {"bits": 8 if base == "int8" else None, "double_quant": False if base == "nf4-single" else None}
    return {
        LORA: True,
        RANK: rank,
        TARGETS: ["all-linear"] if words == "all" else None if words == UNNAMED else words.split(","),
        QLORA: True if quantised else None,
        **(bits if quantised else {}),
    }


@reads(
    LORA,
    QLORA,
    RANK,
    TARGETS,
    "bits",
    "double_quant",
    facts="lora_rank lora_targets qlora base kbit_upcast",
    write=_adapters_written,
)
def _adapters(keys: Keys) -> Facts:
    pairs = _program(keys, "dpo_train")
    if not keys.flag(LORA) and not keys.flag(QLORA) and not pairs:
        return {"lora_rank": 0}
    chosen = PAIRS.split(",") if pairs else keys.words(TARGETS)
    words = UNNAMED if chosen is None else "all" if chosen == ["all-linear"] else ",".join(chosen)
    facts: Facts = {"lora_rank": keys.whole(RANK) or 8, "lora_targets": words, "qlora": bool(keys.flag(QLORA))}
    if not keys.flag(QLORA):
        return facts
    base = "int8" if keys.whole("bits") == 8 else "nf4-single" if keys.flag("double_quant") is False else "nf4"
    return facts | {"base": base, "kbit_upcast": "all"}


@reads(
    write=lambda facts, keys, at: {at.name: None, at.switch: None, at.of_pairs: None} | at.inner.write(facts, keys),
    inner=optimizer("optim", TORCH_OPTIMIZERS, default=_by_program("paged-adamw-32bit", "adamw")),
    name="customized_optim",
    switch="use_customized_optim",
    of_pairs="optimizer_type",
)
def _optimizer(keys: Keys, at: Named) -> Facts:
    if keys.flag(at.switch):
        keys.note(
            at.name,
            "keeps two states more than are counted: a difference of gradients, and the last one",
            "costs",
            "optimizer",
            when=keys.word(at.name) == "adan",
        )
        return {"optimizer": keys.choice(at.name, CUSTOM)}
    chosen = keys.choice(at.of_pairs, TORCH_OPTIMIZERS)  # `dpo_aligner.py`'s name of transformers' `optim`
    return {"optimizer": chosen} if chosen else at.inner.read(keys)


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
        row("micro_batch", "per_device_train_batch_size", default=_by_program(4, 8)),
        row("accumulation", "gradient_accumulation_steps", default=_by_program(4, 1)),
        _optimizer,
        attention("use_flash_attention"),
        row("seq_len", "block_size", "max_length", default=_by_program(1024, 512, second=2048)),
        checkpointing(_by_program(True), new="gradient_checkpointing"),
        half(_by_program("bf16")),
        weights("torch_dtype", "dtype", decides=True),
        # `dpo_train.py` has TRL's trainer, and the model without its adapters as the reference; `dpov2_train.py` a whole one.
        Idea(
            keys=("beta_dpo",),
            facts=("task",),
            read=lambda keys: {"task": "dpo"} if _program(keys, "dpo_train") or _program(keys, "dpov2_train") else {},
        ),
        _adapters,
        dropout("lora_dropout", lambda keys: 0.1 if keys.flag(LORA) or _program(keys, "dpo_train") else None),
        evaluation(),
        SAVING,
        TORCH_COMPILE,
        DETERMINISM,
        liger("use_liger_kernel"),
    ),
)
