"""LLaMA-Factory's YAML, which is TrainingArguments with words of its own."""

from __future__ import annotations

from typing import Any

from loadgauge.formats.coverage import words
from loadgauge.formats.huggingface import BATCH, OPTIMIZER, SHARED, dropout, half, liger, targets
from loadgauge.formats.table import Dialect, Facts, Idea, Keys, row


def _checkpointing() -> Idea:
    key, trainers = "disable_gradient_checkpointing", ("gradient_checkpointing", "activation_checkpointing")

    def read(keys: Keys) -> Facts:
        asked = any(keys.flag(name) for name in trainers)
        if asked and keys.flag(key):
            raise keys.wrong(key, "contradicts the trainer's own switch")
        return {"recompute": "none" if keys.flag(key) else "full"}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        word = facts.get("recompute") or "none"
        if word not in ("none", "full"):
            return {}
        off: dict[str, Any] = {name: None for name in trainers if keys.has(name)} if word == "none" else {}
        return off | {key: True if word == "none" else False if keys.has(key) else None}

    return Idea(keys=(key, *trainers), facts=("recompute",), read=read, write=write)


def _adapter() -> Idea:
    inner = targets("lora_rank", "lora_target", ("finetuning_type", "full", "lora"), 8, "all")
    bits, kind, nested, method = "quantization_bit", "quantization_type", "double_quantization", "quantization_method"

    def read(keys: Keys) -> Facts:
        how = keys.choice("finetuning_type", {"lora": "lora", "full": "full"}) or "lora"
        number = keys.whole(bits)
        if how == "full":
            if number is not None:
                raise keys.wrong(bits, "goes with finetuning_type lora, not with full")
            return {"lora_rank": 0, "qlora": False}
        if number not in (None, 4):
            raise keys.wrong(bits, f"a base in {number} bits is not read; 4 bits are")
        keys.choice(kind, {"nf4": True})
        keys.choice(method, {"bnb": True, "bitsandbytes": True})
        facts = {"lora_rank": keys.whole("lora_rank") or 8, "lora_targets": inner.read(keys).get("lora_targets")}
        facts["lora_targets"] = facts.get("lora_targets") or "all"
        base = "nf4-single" if keys.flag(nested) is False else "nf4"
        return facts | {"qlora": number == 4, "base": base if number == 4 else None}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        values = inner.write(facts, keys)
        if isinstance(values.get("lora_target"), list):
            values["lora_target"] = ",".join(values["lora_target"])
        base, quantised = facts.get("base") or "nf4", bool(facts.get("qlora"))
        if quantised and base not in ("nf4", "nf4-single"):
            return {}
        single = quantised and base == "nf4-single"
        return values | {
            bits: 4 if quantised else None,
            nested: False if single else True if keys.has(nested) else None,
        }

    return Idea(
        keys=(*inner.keys, bits, kind, nested, method), facts=("lora_rank", "lora_targets", "qlora", "base"),
        read=read, write=write,
    )  # fmt: skip


def _optimizer() -> Idea:
    def read(keys: Keys) -> Facts:
        return {"optimizer": "muon"} if keys.flag("use_muon") else OPTIMIZER.read(keys)

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        muon = facts["optimizer"] == "muon"
        return ({} if muon else OPTIMIZER.write(facts, keys)) | {"use_muon": True if muon else None}

    return Idea(keys=(*OPTIMIZER.keys, "use_muon"), facts=("optimizer",), read=read, write=write)


ATTENTION = {"fa2": "flash", "auto": "flash", "sdpa": "flash", "fa3": "flash", "disabled": "eager"}
"""`flash_attn`."""

LLAMAFACTORY = Dialect(
    name="llamafactory",
    title="LLaMA-Factory",
    versions="LLaMA-Factory 0.9",
    syntaxes=("yaml", "json", "argv"),
    auto=True,
    objects=frozenset({"fsdp_config", "deepspeed"}),
    marks=words(
        """
        finetuning_type cutoff_len stage template lora_rank lora_target quantization_bit overwrite_cache dataset_dir
        preprocessing_num_workers flash_attn per_device_train_batch_size
        """
    ),
    blank={
        "yaml": "stage: sft\ndo_train: true\noutput_dir: output\n",
        "json": '{\n  "stage": "sft",\n  "do_train": true,\n  "output_dir": "output"\n}\n',
        "argv": "llamafactory-cli train --stage sft --do_train True --output_dir output\n",
    },
    ideas=(
        *SHARED,
        row("seq_len", "cutoff_len", default=2048),
        *BATCH,
        _optimizer(),
        _adapter(),
        _checkpointing(),
        half(pure="pure_bf16"),
        row("attention", "flash_attn", words=ATTENTION, default="flash"),
        liger("enable_liger_kernel", "use_liger_kernel"),
        dropout("lora_dropout"),
    ),
)
