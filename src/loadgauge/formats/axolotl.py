"""axolotl's YAML."""

from __future__ import annotations

from typing import Any

from loadgauge.formats.coverage import words
from loadgauge.formats.huggingface import dropout, sharding, targets
from loadgauge.formats.table import Dialect, Facts, Idea, Keys, row
from loadgauge.formats.words import ATTENTION, TORCH_OPTIMIZERS

SWITCHES = {"flash_attention": "flash", "sdp_attention": "flash", "flex_attention": "flash", "eager_attention": "eager"}
SWITCHES |= {"xformers_attention": "flash", "sage_attention": "flash"}


def _attention() -> Idea:
    word = "attn_implementation"

    def read(keys: Keys) -> Facts:
        values = {kind for key, kind in SWITCHES.items() if keys.flag(key)}
        named = keys.choice(word, ATTENTION | {"xformers": "flash", "sage": "flash"})
        values |= {named} if named else set()
        if len(values) > 1:
            raise keys.wrong(
                "eager_attention" if keys.has("eager_attention") else word, "contradicts the other kind of attention"
            )
        return {"attention": values.pop() if values else None}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        wanted = facts["attention"]
        off: dict[str, Any] = {key: None for key in SWITCHES if keys.has(key)}
        if keys.has(word) or not off:
            return off | {word: "eager" if wanted == "eager" else "flash_attention_2"}
        return off | {"eager_attention" if wanted == "eager" else "flash_attention": True}

    return Idea(keys=(word, *SWITCHES), facts=("attention",), read=read, write=write)


def _checkpointing() -> Idea:
    key, own, part = "gradient_checkpointing", "fsdp_config.activation_checkpointing", "selective_checkpointing"
    old = "fsdp_config.fsdp_activation_checkpointing"

    def read(keys: Keys) -> Facts:
        word = keys.raw(key)
        if word in ("offload", "offload_disk"):
            raise keys.wrong(key, f"{word!r}, activations in host memory, is not read; true is")
        if keys.raw(part) not in (None, False):
            raise keys.wrong(part, "operations that are kept are not read")
        return {"recompute": "full" if keys.flag(key) or keys.flag(own) or keys.flag(old) else "none"}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        word = facts.get("recompute") or "none"
        if word not in ("none", "full"):
            return {}
        present = [name for name in (key, own, old) if keys.has(name)] or [key]
        return dict.fromkeys(present, word == "full")

    return Idea(keys=(key, own, old, part), facts=("recompute",), read=read, write=write)


def _precision() -> Idea:
    switches = {"bf16": "bf16", "fp16": "fp16", "bfloat16": "bf16-pure", "float16": "fp16", "float32": "fp32"}

    def read(keys: Keys) -> Facts:
        values = {kind for key, kind in switches.items() if keys.raw(key) not in (None, "full") and keys.flag(key)}
        if keys.raw("bf16") == "full":
            values |= {"bf16-pure"}
        if "bf16" in keys.left and not values:
            values = {"bf16"}
        if len(values) > 1:
            raise keys.wrong("bf16", f"contradicts another switch: {', '.join(sorted(values))}")
        if keys.flag("fp8"):
            raise keys.wrong("fp8", "8-bit products through torchao in accelerate are not read")
        return {"precision": values.pop() if values else "bf16" if not keys.has(*switches) else "fp32"}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        name = facts["precision"]
        key = {"bf16": "bf16", "fp16": "fp16", "bf16-pure": "bfloat16", "fp32": "float32"}.get(name)
        if key is None:
            return {}
        return {other: None for other in switches if keys.has(other) or other in keys.left} | {key: True}

    return Idea(keys=(*switches, "fp8"), facts=("precision",), read=read, write=write)


def _loss() -> Idea:
    key, count = "chunked_cross_entropy", "chunked_cross_entropy_num_chunks"
    fused = ("liger_fused_linear_cross_entropy", "cut_cross_entropy")

    def read(keys: Keys) -> Facts:
        if keys.flag(key):
            number = keys.whole(count)
            return {"loss": f"chunked:{number}" if number else "chunked"}
        return {"loss": "chunked" if any(keys.flag(name) for name in fused) else "auto"}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        kind, _, number = (facts.get("loss") or "auto").partition(":")
        off: dict[str, Any] = dict.fromkeys((key, count, *fused))
        if kind == "auto":
            return off
        if kind != "chunked":
            return {}
        present = [name for name in fused if keys.flag(name)]
        return off | (
            {present[0]: True} if present and not number else {key: True, count: int(number) if number else None}
        )

    return Idea(keys=(key, count, *fused), facts=("loss",), read=read, write=write)


def _adapter() -> Idea:
    inner = targets("lora_r", "lora_target_modules", ("adapter", None, "lora"), 8)
    linear, four, eight = "lora_target_linear", "load_in_4bit", "load_in_8bit"
    nested = "bnb_config_kwargs.bnb_4bit_use_double_quant"

    def read(keys: Keys) -> Facts:
        kind = keys.choice("adapter", {"lora": "lora", "qlora": "qlora"})
        if kind is None:
            if keys.flag(four):
                raise keys.wrong(four, "says a base in 4 bits, and no adapter trains on it")
            return {"lora_rank": 0, "qlora": False}
        if keys.flag(eight):
            raise keys.wrong(eight, "a base in 8 bits is not read; 4 bits are")
        facts = inner.read(keys)
        if keys.flag(linear):
            facts["lora_targets"] = "all"
        quantised = kind == "qlora" or bool(keys.flag(four))
        base = "nf4-single" if keys.flag(nested) is False else "nf4"
        return facts | {"qlora": quantised, "base": base if quantised else None}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        values = inner.write(facts, keys)
        if not facts.get("lora_rank"):
            return values | {"adapter": None, linear: None, four: None, eight: None}
        base = facts.get("base") or "nf4"
        quantised = bool(facts.get("qlora"))
        if quantised and base not in ("nf4", "nf4-single"):
            return {}
        everything = facts.get("lora_targets") == "all"
        return values | {
            "adapter": "qlora" if quantised else "lora", four: True if quantised else None,
            linear: True if everything else None,
            "lora_target_modules": None if everything else values["lora_target_modules"],
            nested: False if quantised and base == "nf4-single" else None,
        }  # fmt: skip

    return Idea(
        keys=(*inner.keys, linear, four, eight, nested), facts=("lora_rank", "lora_targets", "qlora", "base"),
        read=read, write=write,
    )  # fmt: skip


def _degrees() -> Idea:
    copies, shards, tp = "dp_replicate_size", "dp_shard_size", "tensor_parallel_size"
    cp = ("context_parallel_size", "sequence_parallel_degree")

    def read(keys: Keys) -> Facts:
        replicas, parts = keys.whole(copies), keys.whole(shards)
        facts: Facts = {"tp": keys.whole(tp) or 1, "cp": keys.agreed(cp, keys.whole) or 1}
        if replicas is not None:
            facts["replicas"] = replicas if parts is None or parts > 1 else 1
        if parts is not None:
            facts["dp"] = parts * (replicas or 1)
        return facts

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        replicas, ranks, tensor = facts.get("replicas") or 1, facts.get("cp") or 1, facts.get("tp") or 1
        values: dict[str, Any] = {
            tp: tensor if tensor > 1 or keys.has(tp) else None, cp[0]: ranks if ranks > 1 or keys.has(cp[0]) else None,
            cp[1]: None,
        }  # fmt: skip
        whole = facts.get("dp")
        if not facts.get("zero"):
            return values | {copies: None, shards: None}
        if replicas > 1 or keys.has(shards, copies) or ranks > 1 or tensor > 1:
            values[copies] = replicas if replicas > 1 or keys.has(copies) else None
            values[shards] = whole // replicas if whole is not None else None
        return values

    return Idea(keys=(copies, shards, tp, *cp), facts=("tp", "cp", "replicas", "dp"), read=read, write=write)


AXOLOTL = Dialect(
    name="axolotl",
    title="axolotl",
    versions="axolotl 0.8 - 0.19",
    syntaxes=("yaml",),
    auto=True,
    marks=words(
        """
        base_model sequence_len sample_packing adapter micro_batch_size datasets num_epochs dataset_prepared_path
        val_set_size lora_target_linear flash_attention
        """
    ),
    blank={"yaml": "num_epochs: 1\nval_set_size: 0.0\n"},
    ideas=(
        row("model", "base_model", kind="word"),
        row("seq_len", "sequence_len", default=512),
        row("micro_batch", "micro_batch_size", default=1),
        row("accumulation", "gradient_accumulation_steps", default=1),
        row(
            "optimizer",
            "optimizer",
            words=TORCH_OPTIMIZERS | {"muon": "muon", "ao_adamw_8bit": "adamw-8bit"},
            default="adamw",
        ),
        row("ep", "expert_parallel_size", default=1, off=1),
        sharding(switched=False),
        _degrees(),
        _adapter(),
        _checkpointing(),
        _precision(),
        _attention(),
        _loss(),
        dropout("lora_dropout"),
    ),
)
