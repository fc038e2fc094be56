"""LLaMA-Factory's files for Megatron-Core (`USE_MCA=1`): its own keys, and those of mcore_adapter's training arguments."""

from loadgauge.job_files.fine_tuning.llamafactory import ATTENTION, _adapter, _stage, _trains
from loadgauge.job_files.fine_tuning.started import started
from loadgauge.job_files.fine_tuning.swift_megatron import experts
from loadgauge.job_files.hugging_face.huggingface import BATCH, dropout, half
from loadgauge.job_files.ideas import Dialect, Facts, Keys, reads, row, tower
from loadgauge.job_files.pre_training.megatron import (
    context,
    launched,
    loss,
    offload,
    overlap,
    pipeline,
    recompute,
    tensor_parallel,
    zero,
)


@reads(
    *_adapter.keys,
    facts=_adapter.facts,
    write=lambda facts, keys: {} if facts.get("qlora") else _adapter.write(facts, keys),
)
def _method(keys: Keys) -> Facts:
    """`finetuning_type: full` where a file does not say lora: adapters of mcore_adapter are those of PEFT."""
    return _adapter.read(keys) if keys.word("finetuning_type") != "full" else {"lora_rank": 0, "qlora": False}


LLAMAFACTORY_MEGATRON = Dialect(
    name="llamafactory-megatron",
    title="LLaMA-Factory with Megatron",
    versions="LLaMA-Factory 0.9.4 - 0.9.5",
    syntaxes=("yaml", "json", "argv"),
    framework="megatron",
    blank={
        "yaml": "stage: sft\ndo_train: true\ntensor_model_parallel_size: 1\n",
        "json": '{\n  "stage": "sft",\n  "do_train": true,\n  "tensor_model_parallel_size": 1\n}\n',
        "argv": "torchrun src/train.py --stage sft --do_train True --tensor_model_parallel_size 1\n",
    },
    ideas=(
        _trains,
        launched(),
        started("ray_num_workers"),
        row("model", "model_name_or_path", kind="word"),
        _stage,
        row("seq_len", "cutoff_len", default=2048),
        tower("freeze_vision_tower", "freeze_multi_modal_projector", "image_max_pixels", body="freeze_language_model"),
        *BATCH,
        _method,
        dropout("lora_dropout"),
        tensor_parallel("tensor_model_parallel_size", "sequence_parallel"),
        pipeline({
            "pp": "pipeline_model_parallel_size", "chunks": "virtual_pipeline_model_parallel_size", "layers": "num_layers",
            "chunk_layers": "num_layers_per_virtual_pipeline_stage", "first": "num_layers_in_first_pipeline_stage",
            "last": "num_layers_in_last_pipeline_stage",
        }),
        context("context_parallel_size", "cp_comm_type"),
        experts,
        zero(),
        recompute(usual="group"),
        half(),
        row("optimizer", "optimizer", words={"adam": "adamw", "sgd": "sgd-momentum"}, default="adamw"),
        overlap(),
        offload(),
        row("attention", "flash_attn", words=ATTENTION, default="flash"),
        loss(),
    ),
)  # fmt: skip
