"""Megatron-Bridge's configuration container: as YAML, or as overrides on its command line (`model.x=...`)."""

from __future__ import annotations

from typing import Any

from loadgauge.job_files.ideas.table import Dialect, Facts, Idea, Keys, row
from loadgauge.job_files.ideas.words import TRANSFORMER_ENGINE
from loadgauge.job_files.pre_training.megatron import (
    STRATEGIES,
    context,
    experts,
    launched,
    loss,
    offload,
    pipeline,
    recompute,
    tensor_parallel,
)

RECIPES = {
    "bf16_mixed": "bf16", "fp16_mixed": "fp16", "bf16_with_fp8_delayed_scaling_mixed": "fp8-delayed",
    "bf16_with_fp8_current_scaling_mixed": "fp8-tensorwise", "bf16_with_fp8_subchannel_scaling_mixed": "fp8-blockwise",
    "bf16_with_mxfp8_mixed": "mxfp8", "bf16_with_nvfp4_mixed": "nvfp4",
}  # fmt: skip
"""`mixed_precision`, by name."""
TARGETS = {"linear_qkv": ("q_proj", "k_proj", "v_proj"), "linear_proj": ("o_proj",)}
TARGETS |= {"linear_fc1": ("gate_proj", "up_proj"), "linear_fc2": ("down_proj",)}


def _zero() -> Idea:
    optimizer, instances = "ddp.use_distributed_optimizer", "ddp.num_distributed_optimizer_instances"
    fsdp, strategy = "ddp.use_megatron_fsdp", "ddp.data_parallel_sharding_strategy"
    also = ("dist.use_megatron_fsdp", "optimizer.use_distributed_optimizer")

    def read(keys: Keys) -> Facts:
        replicas = keys.whole(instances) or 1
        stage = 0
        if keys.flag(fsdp) or keys.flag(also[0]):
            given = keys.choice(strategy, STRATEGIES)
            stage = 3 if given is None else given
        elif keys.flag(optimizer) or keys.flag(also[1]):
            stage = 1
        elif not keys.has(optimizer, also[1], fsdp):
            return {}
        return {"zero": stage, "replicas": replicas if stage else 1}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        stage, replicas = (facts.get("zero") or 0), facts.get("replicas") or 1
        values: dict[str, Any] = {optimizer: stage > 0, fsdp: stage > 1 if stage > 1 or keys.has(fsdp) else None}
        values[also[1]] = stage > 0 if keys.has(also[1]) else None
        values[also[0]] = stage > 1 if keys.has(also[0]) else None
        values[strategy] = {number: word for word, number in STRATEGIES.items()}[stage] if stage > 1 else None
        values[instances] = replicas if replicas > 1 and stage else None
        return values

    return Idea(keys=(optimizer, instances, fsdp, strategy, *also), facts=("zero", "replicas"), read=read, write=write)


def _lora() -> Idea:
    rank, modules = "peft.dim", "peft.target_modules"

    def read(keys: Keys) -> Facts:
        if not keys.has(rank, modules, "peft._target_"):
            return {"lora_rank": 0}
        if (kind := keys.word("peft._target_")) is not None and not kind.endswith(".LoRA"):
            raise keys.wrong("peft._target_", f"{kind!r} is not read; LoRA is")
        chosen = keys.words(modules) or list(TARGETS)
        if any(name not in TARGETS for name in chosen):
            raise keys.wrong(modules, f"read: {', '.join(TARGETS)}")
        names = [name for word in chosen for name in TARGETS[word]]
        return {
            "lora_rank": keys.whole(rank) or 32,
            "lora_targets": "all" if set(chosen) == set(TARGETS) else ",".join(names),
        }

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        if not facts.get("lora_rank"):
            return {rank: None, modules: None, "peft._target_": None}
        wanted = facts.get("lora_targets") or "all"
        chosen = (
            list(TARGETS)
            if wanted == "all"
            else list(TARGETS)[:2]
            if wanted == "attention"
            else [word for word, names in TARGETS.items() if set(names) <= set(wanted.split(","))]
        )
        return {
            "peft._target_": "megatron.bridge.peft.lora.LoRA",
            rank: facts["lora_rank"],
            modules: chosen,
        }

    return Idea(keys=(rank, modules, "peft._target_"), facts=("lora_rank", "lora_targets"), read=read, write=write)


BRIDGE = Dialect(
    name="megatron-bridge",
    title="Megatron-Bridge configuration",
    versions="Megatron-Bridge 0.2 - 0.3",
    syntaxes=("yaml", "argv"),
    framework="megatron",
    style="hydra",
    blank={"yaml": "", "argv": "torchrun --nproc_per_node=1 pretrain.py\n"},
    ideas=(
        launched(),
        tensor_parallel("model.tensor_model_parallel_size", "model.sequence_parallel"),
        pipeline(
            {
                "pp": "model.pipeline_model_parallel_size", "chunks": "model.virtual_pipeline_model_parallel_size",
                "chunk_layers": "model.num_layers_per_virtual_pipeline_stage", "layers": "model.num_layers",
                "first": "model.num_layers_in_first_pipeline_stage", "last": "model.num_layers_in_last_pipeline_stage",
            }
        ),
        context("model.context_parallel_size", "model.cp_comm_type"),
        experts(
            "model.expert_model_parallel_size", "model.expert_tensor_parallel_size",
            "model.tensor_model_parallel_size", "model.num_moe_experts",
        ),
        _zero(),
        recompute("model."),
        row("micro_batch", "train.micro_batch_size"),
        row("global_batch", "train.global_batch_size"),
        row("seq_len", "dataset.sequence_length", "dataset.seq_length", "model.seq_length"),
        row("precision", "mixed_precision", words=RECIPES),
        row("optimizer", "optimizer.optimizer", words={"adam": "adamw", "sgd": "sgd-momentum", "muon": "muon", "lion": "lion"}),
        row("attention", "model.attention_backend", words=TRANSFORMER_ENGINE),
        offload("optimizer.", share=1.0),
        _lora(),
        loss("model."),
        row("model", "model.hf_model_id", kind="word", add=False),
    ),
)  # fmt: skip
