"""What a source does not state: the default that is assumed, by a rule, and the other values that are plausible.

The rules follow what the framework itself does when nothing is said, and were fixed before any error was computed.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from loadgauge.spec.model import ModelSpec
from published_runs import vocabulary
from published_runs.free_text import Flags
from published_runs.models import Inexpressible
from published_runs.source_rows import SourceRow


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """A row, and what is settled already."""

    run: SourceRow
    flags: Flags
    framework: str
    recipe: str
    model: ModelSpec

    @property
    def performance_recipe(self) -> bool:
        """Whether it is a run of NVIDIA's own performance recipes."""
        return "NeMo" in self.run.framework or "Megatron-Bridge" in self.run.framework


class Knob(msgspec.Struct, frozen=True):
    """An open knob. `why`: the rule behind the default."""

    name: str
    default: Any
    others: tuple[Any, ...] = ()
    why: str = ""


def framework(run: SourceRow) -> tuple[str, str, str]:
    """Whose habits a run has, its 16-bit recipe where that differs, and what was assumed."""
    text = run.framework.lower()
    for part, name, recipe in vocabulary.FRAMEWORKS:
        if part.lower() in text:
            return name, recipe, ""
    if "fsdp" in run.sharding or (run.sharding == "zero3" and (run.tp or 1) > 1):
        name = "torchtitan"
    elif max(run.tp or 1, run.pp or 1) > 1 or run.sequence_parallel == "yes":
        name = "megatron"
    else:
        name = "huggingface"
    return name, "", f"habits: {name}'s, by the layout, as {run.framework or 'the framework'!r} is not modelled"


def choose(facts: Facts) -> tuple[dict[str, Any], tuple[Knob, ...]]:
    """A value for every knob, and the knobs that are open."""
    knobs = (
        _precision(facts),
        _recompute(facts),
        _sharding(facts),
        _sequence_parallel(facts),
        _micro_batch(facts),
        _attention(facts),
        _expert_tp(facts),
        _gpus(facts),
        _seq_len(facts),
        _lora_rank(facts),
    )
    return {knob.name: knob.default for knob in knobs}, tuple(knob for knob in knobs if knob.others or knob.why)


def _recompute(facts: Facts) -> Knob:
    run = facts.run
    if run.recompute:
        return Knob("recompute", run.recompute)
    if facts.framework == "torchtitan":
        if "torchtitan" in run.framework:
            return Knob("recompute", "selective (per-op)", ("none", "full"), "torchtitan's default")
        return Knob("recompute", "none", ("full",), "the framework's default")
    if facts.framework == "megatron":
        return Knob("recompute", "none", ("selective (attention)", "full"), "Megatron-LM's default")
    return Knob("recompute", "none", ("full",), "the framework's default")


def _sharding(facts: Facts) -> Knob:
    run = facts.run
    if run.sharding:
        return Knob("sharding", run.sharding)
    if facts.framework == "torchtitan":
        return Knob("sharding", "fsdp2", (), "the framework shards so")
    if facts.framework == "deepspeed":
        return Knob("sharding", "zero2", ("zero1", "zero3"), "a common choice")
    if facts.framework == "megatron":
        if facts.performance_recipe or facts.flags.has("use-distributed-optimizer"):
            return Knob("sharding", "zero1", ("none",), "its recipes use the distributed optimizer")
        if facts.flags.says("overlap grad reduce/param gather"):
            return Knob("sharding", "zero1", (), "parameters are gathered")
        return Knob("sharding", "none", ("zero1",), "Megatron-LM's default")
    return Knob("sharding", "none", (), "the framework's default")


def _sequence_parallel(facts: Facts) -> Knob:
    run = facts.run
    tp = run.tp or 1
    if tp == 1:
        return Knob("sequence_parallel", "no")
    if run.sequence_parallel:
        return Knob("sequence_parallel", run.sequence_parallel)
    if run.moe_experts is not None:
        return Knob("sequence_parallel", "yes", (), "experts with tensor parallelism need it")
    if facts.flags.has("sequence-parallel"):
        return Knob("sequence_parallel", "yes")
    if facts.framework == "torchtitan" or facts.performance_recipe:
        return Knob("sequence_parallel", "yes", ("no",), "the framework's recipes use it with tp")
    if facts.flags.says("tp-comm-overlap"):
        return Knob("sequence_parallel", "yes", (), "overlap of tensor parallelism needs it")
    return Knob("sequence_parallel", "no", ("yes",), "Megatron-LM's default")


def _micro_batch(facts: Facts) -> Knob:
    run = facts.run
    if run.micro_batch is not None:
        return Knob("micro_batch", run.micro_batch)
    return Knob("micro_batch", 1, (2, 4), "the smallest")


def _attention(facts: Facts) -> Knob:
    run, flags = facts.run, facts.flags
    if flags.value("attention-backend") == "unfused" or flags.says("no flash"):
        return Knob("attention", "eager")
    if flags.value("transformer-impl") == "local" and not flags.has("use-flash-attn"):
        return Knob("attention", "eager")
    stated = ("flash", "sdpa", "transformer_engine", "torch.compile")
    if any(flags.says(word) for word in stated):
        return Knob("attention", "flash")
    if facts.framework == "megatron" and run.year is not None and run.year <= 2022:
        return Knob("attention", "eager", (), "Megatron-LM had no flash attention before 2023")
    if facts.framework == "megatron" and run.year == 2023 and not facts.performance_recipe:
        return Knob("attention", "eager", ("flash",), "Megatron-LM's default until Transformer Engine was it, in 2024")
    return Knob("attention", "flash", (), "the framework's default")


def _expert_tp(facts: Facts) -> Knob:
    run = facts.run
    tp = run.tp or 1
    if run.moe_experts is None or tp == 1:
        return Knob("etp", 1)
    stated = re.search(r"etp(\d+)", run.model)
    if stated:
        return Knob("etp", int(stated[1]))
    if facts.performance_recipe:
        return Knob("etp", 1, (tp,), "its recipes do not split experts")
    return Knob("etp", tp, (1,), "Megatron-LM's default is tp")


def _gpus(facts: Facts) -> Knob:
    run = facts.run
    if run.gpus is not None:
        return Knob("gpus", run.gpus)
    within = (run.tp or 1) * (run.pp or 1) * (run.cp or 1)
    if run.dp is not None:
        return Knob("gpus", within * run.dp)
    node = run.gpus_per_node or 8
    least = within * max(1, -(-node // within)) if within < node and node % within == 0 else within
    if run.moe_experts is not None and run.ep:
        while (least // (run.pp or 1)) % (run.ep * int(_expert_tp(facts).default)):
            least *= 2
    if run.global_batch is None:
        return Knob("gpus", least, (), "one node, or one replica where that is larger")
    limit = within * (run.global_batch // (run.micro_batch or 1))
    sizes = [least, *(size for factor in (2, 4, 8, 16, 32, 64) if (size := least * factor) <= limit)]
    if "release" not in run.model and "mcore-ci" in run.model:
        return Knob("gpus", least, tuple(sizes[1:]), "one node, as Megatron-LM's other functional tests say")
    middle = sizes[(len(sizes) - 1) // 2]
    others = tuple(size for size in sizes if size != middle)
    return Knob("gpus", middle, others, "the middle of what is possible, from one node to one micro-batch a rank")


def _seq_len(facts: Facts) -> Knob:
    run = facts.run
    if run.seq_len is not None:
        return Knob("seq_len", run.seq_len)
    longest = re.search(r"longest sample (\d+) tokens", run.notes)
    if longest:
        return Knob("seq_len", int(longest[1]), (), "the longest sample, which makes the peak")
    stated = facts.flags.number("max_target_length") or facts.flags.number("max_length")
    if stated:
        return Knob("seq_len", stated)
    if "torchtitan" in run.framework:
        return Knob("seq_len", 8192, (), "torchtitan's Llama 3 configurations")
    raise Inexpressible("seq_len: the sequence length is not stated")


def _precision(facts: Facts) -> Knob:
    run = facts.run
    if run.precision:
        return Knob("precision", run.precision)
    stated = re.search(r"default (fp16|bf16)", run.notes)
    if stated:
        return Knob("precision", stated[1], (), "the fork's default, by the row's notes")
    if facts.framework == "megatron" and "fork" in run.framework:
        return Knob("precision", "fp16", ("bf16",), "the scripts of the zero-bubble fork")
    return Knob("precision", "bf16", (), "usual; fp16 takes the same bytes at the same rate")


def _lora_rank(facts: Facts) -> Knob:
    run = facts.run
    if run.task not in ("lora", "qlora"):
        return Knob("lora_rank", 0)
    if run.lora_rank:
        return Knob("lora_rank", run.lora_rank)
    if facts.performance_recipe:
        return Knob("lora_rank", 32, (8, 16, 64), "NeMo's default")
    return Knob("lora_rank", 8, (16, 32, 64), "PEFT's default")
