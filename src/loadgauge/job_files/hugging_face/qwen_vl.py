"""Qwen-VL-Finetune's scripts (2U1): transformers' arguments, and its own for what of a model with images is trained."""

from loadgauge.job_files.hugging_face import trl_tasks
from loadgauge.job_files.hugging_face.huggingface import (
    BATCH,
    DETERMINISM,
    SAVING,
    TORCH_COMPILE,
    checkpointing,
    dropout,
    half,
    processes,
    sharding,
)
from loadgauge.job_files.ideas import (
    TORCH_OPTIMIZERS,
    Dialect,
    Facts,
    Keys,
    adapters,
    dora,
    evaluation,
    fixed,
    optimizer,
    quantised,
    reads,
    row,
    tower,
)
from loadgauge.job_files.pre_training.megatron import launched

LORA, RANK, BITS, KIND, DOUBLE = "lora_enable", "lora_rank", "bits", "quant_type", "double_quant"
LIGER = ("use_liger", "use_liger_kernel")


def _program(keys: Keys, *names: str) -> bool:
    return any(name in word for word in getattr(keys.document, "program", ()) for name in names)


ADAPTERS = adapters(
    lambda keys: keys.flag(LORA),
    row("lora_rank", RANK, default=64),
    fixed(lora_targets="all"),
    quantised(bits=(BITS,), kind=KIND, nested=DOUBLE, upcast="all"),
    dora("use_dora"),
    switch={LORA: True},
    off=lambda keys: {LORA: False if keys.has(LORA) else None},
    bare={"lora_rank": 0},
)


@reads(
    *trl_tasks.task.keys,
    facts=trl_tasks.task.facts,
    write=trl_tasks.task.write,
    when=lambda keys: _program(keys, "train_dpo", "train_grpo"),
)
def _task(keys: Keys) -> Facts:
    """TRL's trainers of preferences and of answers, whose references these scripts have unless told otherwise."""
    facts = trl_tasks.task.read(keys)
    if facts.get("task") != "grpo":
        return facts
    return facts | {
        "reference": facts["reference"] if keys.has("beta") else None,
        "answers": facts["answers"] if keys.has("max_completion_length") else "256",
        "prompt_len": facts.get("prompt_len") or 512,
    }


@reads(*LIGER, facts="kernels loss", write=lambda facts, keys: {LIGER[0]: facts.get("kernels") == "liger"})
def _kernels(keys: Keys) -> Facts:
    stated = next((flag for name in LIGER if (flag := keys.flag(name)) is not None), not _program(keys, "train_grpo"))
    on = stated and not _program(keys, "train_cls")
    # The patched forward makes whole logits without labels, as preferences are trained (`apply_liger_kernel_to_qwen2_5_vl`).
    return {"kernels": "liger" if on else "native", "loss": "float32" if on and _program(keys, "train_dpo") else None}


@reads(
    "num_labels",
    facts="head",
    write=lambda facts, keys: {"num_labels": facts.get("head")},
    when=lambda keys: _program(keys, "train_cls"),
)
def _labels(keys: Keys) -> Facts:
    """`CLSArguments`: two labels, where nothing says how many."""
    return {"head": keys.whole("num_labels") or 2}


QWEN_VL = Dialect(
    name="qwen-vl-finetune",
    trainers="trl",
    title="Qwen-VL-Finetune",
    objects=frozenset({"deepspeed", "fsdp_config"}),
    versions="Qwen-VL-Finetune 2025.1 - 2026.10",
    syntaxes=("argv",),
    blank={"argv": "torchrun src/train/train_sft.py --freeze_llm False\n"},
    auto=True,
    ideas=(
        launched(),
        processes(),
        row("model", "model_id", kind="word"),
        sharding(),
        *BATCH,
        optimizer("optim", TORCH_OPTIMIZERS, "adamw-foreach"),
        row("attention", "disable_flash_attn2", words={"false": "fa2", "true": "flash"}, default="fa2"),
        row("seq_len", "max_seq_length"),  # whose default of 32,768 cuts nothing short: rows are padded to the longest
        _labels,
        checkpointing(new="gradient_checkpointing"),
        half(),
        _task,
        ADAPTERS,
        dropout("lora_dropout", lambda keys: 0.05 if keys.flag(LORA) else None),
        _kernels,
        tower("freeze_vision_tower", "freeze_merger", "image_max_pixels", adapters="trained", usual=False),
        evaluation(),
        SAVING,
        TORCH_COMPILE,
        DETERMINISM,
    ),
)
