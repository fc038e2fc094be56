"""ms-swift's trainers with Megatron-Core: `megatron sft`, `pt` and `rlhf`, with Megatron's arguments and words of ms-swift.

Defaults are those of 4.6 (`swift/megatron/arguments/megatron_args.py`), which differ from Megatron-LM's own.
"""

from typing import Any

import msgspec

from loadgauge.job_files.fine_tuning.started import world
from loadgauge.job_files.fine_tuning.swift import (
    DTYPES,
    MODEL,
    adapters,
    batch,
    environment,
    labels,
    length,
    read_only,
    rlhf,
    tuner,
)
from loadgauge.job_files.fine_tuning.swift_answers import answers, of_all
from loadgauge.job_files.hugging_face.huggingface import dropout
from loadgauge.job_files.ideas import (
    IDLE,
    TRANSFORMER_ENGINE,
    Dialect,
    Facts,
    Idea,
    Keys,
    Named,
    frozen_share,
    reads,
    row,
    tower,
    writes,
)
from loadgauge.job_files.pre_training.megatron import (
    context,
    launched,
    loss,
    offload,
    overlap,
    pipeline,
    precision,
    recompute,
    tensor_parallel,
    zero,
)

KERNELS = TRANSFORMER_ENGINE | {"flash_2": "fa2", "flash_3": "fa3", "flash_4": "fa4"}
OPTIMIZERS = {"adam": "adamw", "sgd": "sgd-momentum", "muon": "muon", "dist_muon": "muon"}


@writes(recompute(otherwise="selective"))
def _recompute(facts: Facts, keys: Keys, inner: Idea) -> dict[str, Any]:
    """The core of attention, unless it is said that there is none (`recompute_granularity` has that word)."""
    return inner.write(facts, keys) | ({"recompute_granularity": "none"} if facts.get("recompute") == "none" else {})


def _half(keys: Keys) -> Facts:
    """16 bits by the format that weights are loaded in, the checkpoint's where nothing is said: nearly always bfloat16
    (`_init_mixed_precision` of `arguments/base_args/model_args.py`)."""
    if keys.has("bf16", "fp16", "fp8_format", "fp4_format"):
        return precision.read(keys)
    return {"precision": "bf16" if (keys.choice("torch_dtype", DTYPES) or "bfloat16") == "bfloat16" else "fp16"}


ZERO_INNER, ZERO_SWITCH = zero(), "use_distributed_optimizer"


def _zero_written(facts: Facts, keys: Keys) -> dict[str, Any]:
    return ZERO_INNER.write(facts, keys) | {ZERO_SWITCH: None if facts.get("zero") else False}


@reads(*ZERO_INNER.keys, facts=ZERO_INNER.facts, write=_zero_written)
def _zero(keys: Keys) -> Facts:
    """The distributed optimizer, which is on unless it is said, and never with Muon (`_check_muon`)."""
    facts = ZERO_INNER.read(keys)
    muon = "muon" in (keys.word("optimizer") or "")
    if keys.flag("use_megatron_fsdp"):
        return facts
    return facts | {"zero": 0 if muon or keys.flag(ZERO_SWITCH) is False else 1}


@reads(
    facts="ep etp",
    write=lambda facts, keys, at: {
        key: facts[name] if (facts.get(name) or 1) > 1 else None for name, key in (("ep", at.ep), ("etp", at.etp))
    },
    ep="expert_model_parallel_size",
    etp="expert_tensor_parallel_size",
)
def experts(keys: Keys, at: Named) -> Facts:
    """Expert parallelism; where nothing says on how many GPUs, the fewest that hold all experts."""
    ranks, within = keys.whole(at.ep) or 1, keys.whole(at.etp) or 1
    inside = (keys.whole("tensor_model_parallel_size") or 1) * (keys.whole("context_parallel_size") or 1)
    fewest = (keys.whole("pipeline_model_parallel_size") or 1) * ranks * within
    return {"ep": ranks, "etp": within, "gpus": fewest if world(keys) is None and ranks * within > inside else None}


MEGATRON_SWIFT = Dialect(
    name="megatron-swift",
    title="ms-swift with Megatron",
    versions="ms-swift 3.4 - 4.6",
    syntaxes=("argv", "yaml"),
    framework="megatron",
    style="value",
    objects=frozenset({"model_kwargs", "megatron_extra_kwargs"}),
    blank={"argv": "megatron sft --output_dir output\n", "yaml": "finetune: true\nsplit_dataset_ratio: 0\n"},
    blanks={
        task: f"megatron rlhf --rlhf_type {word} --output_dir output\n"
        for task, word in {"dpo": "dpo", "kto": "kto", "rm": "rm", "grpo": "grpo", "gkd": "gkd", "opd": "gkd"}.items()
    },
    ideas=(
        read_only(launched()),
        environment,
        row("model", *MODEL, kind="word"),
        labels,
        tensor_parallel("tensor_model_parallel_size", "sequence_parallel"),
        pipeline({
            "pp": "pipeline_model_parallel_size", "chunks": "virtual_pipeline_model_parallel_size", "layers": "num_layers",
            "size": "num_virtual_stages_per_pipeline_rank", "chunk_layers": "num_layers_per_virtual_pipeline_stage",
            "first": "decoder_first_pipeline_num_layers", "last": "decoder_last_pipeline_num_layers",
            "accounted": "account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split",
        }),
        context("context_parallel_size", "cp_comm_type"),
        experts,
        _zero,
        _recompute,
        batch("micro_batch", "micro_batch_size", 1),
        batch("global_batch", "global_batch_size", 16),
        length,
        msgspec.structs.replace(precision, keys=(*precision.keys, "torch_dtype"), read=_half),
        row("optimizer", "optimizer", words=OPTIMIZERS, default="adamw"),
        overlap(),
        offload(),
        row("attention", "attention_backend", words=KERNELS, default="fa2"),
        loss(usual=lambda keys: keys.since(4, 0)),
        adapters("full"),
        dropout("lora_dropout", lambda keys: None if tuner(keys, "full") == "full" else 0.05),
        frozen_share,
        tower("freeze_vit", "freeze_aligner", "max_pixels", "model_kwargs.max_pixels"),
        rlhf,
        answers(of_all, on=True),
    ),
    programs={r"\bmegatron export\b": IDLE},
)  # fmt: skip
