"""open-instruct's `finetune.py` and `dpo_tune_cache.py`: YAML, or the command line of `accelerate launch`."""

from typing import Any

from loadgauge.job_files.hugging_face.huggingface import BATCH, checkpointing, dropout, liger, processes
from loadgauge.job_files.hugging_face.trl_tasks import words_of_path
from loadgauge.job_files.ideas import Dialect, Facts, Keys, adapters, fixed, names_in, quantised, reads, row
from loadgauge.job_files.pre_training.megatron import launched

LINEAR = "q_proj,o_proj,v_proj,k_proj,gate_proj,up_proj,down_proj"
"""Holds what gets adapters; no argument says otherwise."""
LORA, QLORA, RANK, EIGHT, FUSED = "use_lora", "use_qlora", "lora_rank", "use_8bit_optimizer", "fused_optimizer"
LOSSES = {"dpo": "dpo", "dpo_norm": "dpo", "wpo": "dpo", "simpo": "simpo"}
"""Losses of preferences, which differ in sums of the same log-probabilities; SimPO's has no reference."""
KINDS = ("dpo_loss_type", "loss_type")
OF_PAIRS = (
    *KINDS,
    *names_in(
        "dpo_beta beta dpo_gamma_beta_ratio gamma_beta_ratio dpo_label_smoothing label_smoothing concatenated_forward"
        " dpo_use_paged_optimizer"
    ),
)
"""Arguments that only the training on preferences has."""


def of_pairs(keys: Keys) -> bool:
    """Return whether a file is `dpo_tune_cache.py`'s: by the command line, its arguments, or `dpo` in the path of the file."""
    if "finetune.py" in keys.program or "dpo_tune" in keys.program or keys.has(*OF_PAIRS):
        return "finetune.py" not in keys.program
    named = "dpo" in words_of_path(keys.file)
    keys.remark("it is taken for dpo_tune_cache.py's, by its name or folder", when=named)
    return named


def _task_written(facts: Facts, keys: Keys) -> dict[str, Any]:
    task = facts.get("task")
    if task not in LOSSES or (task == "dpo" and facts.get("reference") != "precomputed"):
        return {}
    return {next(filter(keys.has, KINDS), KINDS[0]): task}


@reads(*OF_PAIRS, facts="task reference loss_terms", write=_task_written, when=of_pairs)
def _task(keys: Keys) -> Facts:
    task = keys.agreed(KINDS, lambda key: keys.choice(key, LOSSES)) or "dpo"
    # The reference's log-probabilities are made once, before the first step, with the model that is trained.
    simpo = {"task": task, "loss_terms": "no-nll"}
    return simpo if task == "simpo" else {"task": task, "reference": "precomputed"}


ADAPTERS = adapters(
    lambda keys: keys.flag(LORA),
    row("lora_rank", RANK, default=64),
    fixed(lora_targets=LINEAR),
    # `prepare_model_for_kbit_training` makes float32 of what is not quantised.
    quantised(four=QLORA, upcast="all"),
    switch={LORA: True},
    bare={"lora_rank": 0},
)


OPTIMIZER_PAGED = ("paged-adamw-8bit", "paged-adamw-32bit")


@reads(
    EIGHT,
    FUSED,
    facts="optimizer",
    write=lambda facts, keys: {
        FUSED: False if facts.get("optimizer") == "adamw-loop" else None,
        EIGHT: True if facts.get("optimizer") == OPTIMIZER_PAGED[0] else None,
    },
)
def _optimizer(keys: Keys) -> Facts:
    if keys.flag(QLORA) or keys.flag("dpo_use_paged_optimizer"):
        return {"optimizer": OPTIMIZER_PAGED[not keys.flag(EIGHT)]}
    return {"optimizer": "adamw-loop" if keys.flag(FUSED) is False else "adamw-fused"}


STAGE = "zero_stage"


def _started_written(facts: Facts, keys: Keys) -> dict[str, Any]:
    if keys.document.syntax != "yaml" or facts.get("framework") not in ("huggingface", "deepspeed"):
        return {STAGE: facts["zero"]} if "zero" in facts and keys.has(STAGE) else {}
    return {STAGE: facts.get("zero") or 0}


@reads(STAGE, facts="framework zero precision weights", write=_started_written)
def _started(keys: Keys) -> Facts:
    """Take what a YAML file leaves to its launcher from the commands of the tool's documents (`docs/tulu3.md`, `docs/olmo2.md`)."""
    stage = keys.whole(STAGE, minimum=0)
    if keys.document.syntax != "yaml" or stage == 0:
        return {"zero": stage, "precision": "fp32", "weights": "bfloat16"}
    keys.remark(
        "its launcher is taken to be told of DeepSpeed, ZeRO 3 and bf16, as open-instruct's documents start it",
        when=stage is None and not keys.given.keys() & {"zero", "framework", "precision"},
    )
    return {"framework": "deepspeed", "zero": 3 if stage is None else stage, "precision": "bf16", "weights": "bfloat16"}


OPEN_INSTRUCT = Dialect(
    name="open-instruct",
    title="open-instruct",
    versions="open-instruct 2024.11 - 2025.12",
    syntaxes=("yaml", "argv"),
    trainers="softmax",
    blank={
        "yaml": "use_slow_tokenizer: false\nwith_tracking: false\n",
        "argv": "torchrun open_instruct/finetune.py --with_tracking False\n",
    },
    ideas=(
        launched(),
        processes(),
        row("model", "model_name_or_path", kind="word"),
        *BATCH,
        row("seq_len", "max_seq_length"),
        _task,
        ADAPTERS,
        dropout("lora_dropout", lambda keys: 0.1 if keys.flag(LORA) else None),
        _optimizer,
        checkpointing(new="gradient_checkpointing"),
        row("attention", "use_flash_attn", words={"true": "fa2", "false": "eager"}, default="fa2"),
        liger("use_liger_kernel"),
        _started,
    ),
)
