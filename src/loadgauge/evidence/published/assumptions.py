"""What a source does not state: the default that is assumed, by a rule, and the other values that are plausible.

The rules follow what the framework itself does when nothing is said, and were fixed before any error was computed.
"""

import re
from collections.abc import Callable
from math import gcd
from typing import Any

import msgspec

from loadgauge.core.definitions.layout.layout import FULL_PIPE
from loadgauge.core.definitions.model.model import ModelSpec
from loadgauge.evidence.published import vocabulary
from loadgauge.evidence.published.free_text import Flags, named
from loadgauge.evidence.published.models import Inexpressible
from loadgauge.evidence.published.recipes import packed
from loadgauge.evidence.published.source_rows import SourceRow


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """A row, and what is settled already."""

    run: SourceRow
    flags: Flags
    framework: str
    recipe: str
    model: ModelSpec
    known: bool = True

    @property
    def performance_recipe(self) -> bool:
        """Return whether it is a run of NVIDIA's own performance recipes."""
        return performance_recipe(self.run, self.framework)


def performance_recipe(run: SourceRow, framework: str) -> bool:
    """Return whether a run is one of NVIDIA's own performance recipes, on Megatron's core."""
    return framework == "megatron" and any(named(run.framework, word) for word in ("NeMo", "Megatron-Bridge"))


class Knob(msgspec.Struct, frozen=True):
    """An open knob. `why`: the rule behind the default."""

    name: str
    default: Any
    others: tuple[Any, ...] = ()
    why: str = ""


SHARDED = frozenset({"torchtitan", "fsdp", "llm-foundry", "automodel", "maxtext"})
"""Frameworks that shard by FSDP where nothing is said."""
SPLITS = frozenset({"megatron", "megatron-deepspeed"})
"""Megatron and its kin."""
OLD_STACK = 2022
"""The last year of Megatron-DeepSpeed without FlashAttention."""
OTHERS = {
    "fsdp": "huggingface",
    "huggingface": "fsdp",
    "megatron": "torchtitan",
    "torchtitan": "megatron",
    "maxtext": "megatron",
}
"""For an unknown framework, whose habits it may have instead."""
ALPACA = 1034
"""Tokens of the longest sample of Alpaca (source: litgpt, tutorials/resource-tables.md)."""


def framework(run: SourceRow) -> tuple[str, str, str]:
    """Whose habits a run has, its 16-bit recipe where that differs, and what was assumed."""
    if named(run.framework, "ms-swift") and named(run.framework, "transformers") and run.sharding.startswith("zero"):
        return "deepspeed", "", ""  # its `--deepspeed zero2` and `zero3`; FSDP2 has a launch file of its own
    for words, name, recipe in vocabulary.FRAMEWORKS:
        if named(run.framework, words):
            if name == "megatron-deepspeed" and (run.year or 0) > OLD_STACK:
                name = "megatron"
            return name, recipe, ""
    split = max(run.tp or 1, run.pp or 1) > 1
    if run.hardware.startswith("TPU"):
        name, why = "maxtext", "the stack of its vendor"
    elif "fsdp" in run.sharding or (run.sharding == "zero3" and split):
        name, why = "torchtitan", "its sharding"
    elif split or run.sequence_parallel == "yes":
        name, why = "megatron", "its tensor and pipeline parallelism"
    elif (
        (run.gpus or run.dp or 1) > 1
        and run.task in ("pretrain", "full-ft")
        and run.sharding not in ("none", "none (ddp)")
    ):
        name, why = "fsdp", "sharded data parallelism"
    else:
        name, why = "huggingface", "one rank, or whole copies"
    return name, "", f"habits: {name}'s, by {why}, as {run.framework or 'the framework'!r} is not known"


def choose(facts: Facts) -> tuple[dict[str, Any], tuple[Knob, ...]]:
    """A value for every knob, and the knobs that are open."""
    knobs = (
        _precision(facts),
        _recompute(facts),
        _sharding(facts),
        _sequence_parallel(facts),
        _micro_batch(facts),
        _micro_batches(facts),
        _attention(facts),
        _expert_tp(facts),
        _expert_ranks(facts),
        _gpus(facts),
        _seq_len(facts),
        _lora_rank(facts),
    )
    return {knob.name: knob.default for knob in knobs}, tuple(knob for knob in knobs if knob.others or knob.why)


def _first(name: str, *rules: tuple[Any, ...]) -> Knob:
    """The knob by the first rule that holds: whether it does, the value, other values, and why."""
    return next(Knob(name, *rule) for holds, *rule in rules if holds)


def _recompute(facts: Facts) -> Knob:
    run, of = facts.run, facts.framework
    return _first(
        "recompute",
        (run.recompute, run.recompute),
        (named(run.framework, "torchtitan"), "selective (per-op)", ("none", "full"), "torchtitan's default"),
        (of == "maxtext", "remat_policy full", ("remat_policy minimal",), "MaxText's default"),
        (of == "torchtune", "full", ("none",), "torchtune's recipes switch activation checkpointing on"),
        (of in SPLITS, "none", ("selective (attention)", "full"), "Megatron-LM's default"),
        (named(run.framework, "ms-swift"), "full", ("none",), "ms-swift's default"),
        (True, "none", ("full",), "the framework's default"),
    )


def _sharding(facts: Facts) -> Knob:
    flags, of = facts.flags, facts.framework
    recipe = facts.performance_recipe or flags.has("use-distributed-optimizer")
    gathers = flags.says("overlap grad reduce/param gather")
    return _first(
        "sharding",
        (facts.run.sharding, facts.run.sharding),
        (of in SHARDED, "fsdp2", () if facts.known else ("zero1", "none"), "the framework shards so"),
        (of == "deepspeed", "zero2", ("zero1", "zero3"), "a common choice"),
        (of == "megatron-deepspeed", "zero1", ("none",), "DeepSpeed is there for it"),
        (of != "megatron", "none", (), "the framework's default"),
        (recipe, "zero1", ("none",), "its recipes use the distributed optimizer"),
        (gathers, "zero1", (), "parameters are gathered"),
        (not facts.known, "zero1", ("none",), "usual beside a split model"),
        (True, "none", ("zero1",), "Megatron-LM's default"),
    )


def _sequence_parallel(facts: Facts) -> Knob:
    run, flags = facts.run, facts.flags
    recipe = facts.framework in SHARDED or facts.performance_recipe
    return _first(
        "sequence_parallel",
        ((run.tp or 1) == 1, "no"),
        (run.sequence_parallel, run.sequence_parallel),
        (run.moe_experts is not None, "yes", (), "experts with tensor parallelism need it"),
        (flags.has("sequence-parallel"), "yes"),
        (recipe, "yes", ("no",), "the framework's recipes use it with tp"),
        (flags.says("tp-comm-overlap"), "yes", (), "overlap of tensor parallelism needs it"),
        (not facts.known, "yes", ("no",), "usual with tp since 2022"),
        (True, "no", ("yes",), "Megatron-LM's default"),
    )


def _micro_batch(facts: Facts) -> Knob:
    run = facts.run
    if run.micro_batch is not None:
        return Knob("micro_batch", run.micro_batch)
    local, stages = facts.flags.after(r"local batch (\d+) per DP rank"), run.pp or 1
    if local and stages > 1 and local % stages == 0 and named(run.framework, "torchtitan") and run.year == 2024:
        why = "torchtitan of that year cut a rank's batch into as many micro-batches as there are stages"
        return Knob("micro_batch", local // stages, (), why)
    return Knob("micro_batch", 1, (2, 4), "the smallest")


def _micro_batches(facts: Facts) -> Knob:
    """Micro-batches of a step and rank, where no column or flag gives the batch."""
    run, stages = facts.run, facts.run.pp or 1
    if run.global_batch is not None or stated_batch(facts) is not None:
        return Knob("micro_batches", None)
    if stages > 1:
        full = FULL_PIPE * stages
        return Knob("micro_batches", full, (full // 4, 4 * full), "a full pipe, as the batch is not stated")
    return Knob("micro_batches", 1, (8,), "one a step, as the batch is not stated")


def stated_batch(facts: Facts) -> Callable[[int, int], int] | None:
    """The sequences of a step by ranks and micro-batch, where a flag gives them in other words."""
    run, flags = facts.run, facts.flags
    for phrase in flags.phrases:
        tokens = re.search(r"([\d.]+) ?([kM])-token global batch", phrase)
        if tokens and run.seq_len:
            sequences = float(tokens[1]) * {"k": 1e3, "M": 1e6}[tokens[2]] / run.seq_len
            return lambda dp, micro: max(round(sequences / (dp * micro)), 1) * dp * micro
    minibatch = flags.after(r"grad accumulation to minibatch (\d+)")
    if minibatch:
        return lambda dp, micro: max(minibatch // (dp * micro), 1) * dp * micro
    local = flags.after(r"local batch (\d+) per DP rank")
    return None if local is None else lambda dp, micro: dp * local


def _attention(facts: Facts) -> Knob:
    run, flags = facts.run, facts.flags
    unfused = flags.value("attention-backend") == "unfused" or flags.says("no flash")
    local = flags.value("transformer-impl") == "local" and not flags.has("use-flash-attn")
    kernels = (kernel for words, kernel in vocabulary.FLASH if flags.says(words) and not flags.says(f"no {words}"))
    kernel = next(kernels, "")
    first = any(named(run.framework, words) and (run.year or 9999) <= year for words, year in vocabulary.FLASH_1)
    stated = any(flags.says(word) for word in ("flash", "sdpa", "transformer_engine", "torch.compile"))
    old = facts.framework in SPLITS and run.year is not None and run.year <= OLD_STACK
    between = facts.framework == "megatron" and run.year == 2023 and facts.known and not facts.performance_recipe
    return _first(
        "attention",
        (unfused or local, "eager"),
        (kernel, kernel),
        (first, "fa1", ("fa2",), "what its instructions of that year ask for"),
        (stated, "flash"),
        (old, "eager", (), "Megatron-LM had no flash attention before 2023"),
        (between, "eager", ("flash",), "Megatron-LM's default until Transformer Engine was it, in 2024"),
        (True, "flash", (), "the framework's default"),
    )


def _expert_tp(facts: Facts) -> Knob:
    tp, stated = facts.run.tp or 1, re.search(r"etp(\d+)", facts.run.model)
    return _first(
        "etp",
        (facts.run.moe_experts is None or tp == 1, 1),
        (stated, int(stated[1]) if stated else None),
        (facts.performance_recipe, 1, (tp,), "its recipes do not split experts"),
        (True, tp, (1,), "Megatron-LM's default is tp"),
    )


def _expert_ranks(facts: Facts) -> Knob:
    run = facts.run
    sent = run.ep is None and facts.flags.says("DeepEP")
    ranks = (run.gpus or 1) // ((run.tp or 1) * (run.pp or 1))
    widest = gcd(run.moe_experts or 1, ranks) if sent else 1
    return _first(
        "ep",
        (not sent, run.ep or 1),
        (
            True,
            widest,
            (gcd(widest, run.gpus_per_node or 8),),
            "DeepEP sends tokens between ranks; all that share them evenly",
        ),
    )


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
    if run.seq_len is not None and re.search(r"unpacked \(seq \d+ is a cap\)", run.notes) and not packed(facts.flags):
        why = "the longest sample of Alpaca, the data of torchtune's recipes; the row states a cap"
        return Knob("seq_len", min(ALPACA, run.seq_len), (ALPACA // 4, run.seq_len), why)
    packs = packed(facts.flags) or facts.flags.value("packing") == "true"
    if run.seq_len is not None and re.search(r"\bis a cap unless packing\b", run.notes) and not packs:
        why = "a cap, and the lengths of the samples are not stated"
        return Knob("seq_len", run.seq_len, (run.seq_len // 8, run.seq_len // 2), why)
    if run.seq_len is not None:
        return Knob("seq_len", run.seq_len)
    longest = re.search(r"longest sample (\d+) tokens", run.notes)
    stated = facts.flags.number("max_target_length") or facts.flags.number("max_length")
    if not longest and not stated and facts.framework != "maxtext" and not named(run.framework, "torchtitan"):
        raise Inexpressible("seq_len: the sequence length is not stated")
    return _first(
        "seq_len",
        (longest, int(longest[1]) if longest else None, (), "the longest sample, which makes the peak"),
        (stated, stated),
        (facts.framework == "maxtext", 2048, (), "MaxText's default"),
        (True, 8192, (), "torchtitan's Llama 3 configurations"),
    )


def _precision(facts: Facts) -> Knob:
    run, stated = facts.run, re.search(r"default (fp16|bf16)", facts.run.notes)
    fork = facts.framework == "megatron" and named(run.framework, "fork")
    return _first(
        "precision",
        (run.precision, run.precision),
        (stated, stated and stated[1], (), "the fork's default, by the row's notes"),
        (fork, "fp16", ("bf16",), "the scripts of the zero-bubble fork"),
        (True, "bf16", (), "usual; fp16 takes the same bytes at the same rate"),
    )


def _lora_rank(facts: Facts) -> Knob:
    return _first(
        "lora_rank",
        (facts.run.task not in ("lora", "qlora"), 0),
        (facts.run.lora_rank, facts.run.lora_rank),
        (facts.performance_recipe, 32, (8, 16, 64), "NeMo's default"),
        (True, 8, (16, 32, 64), "PEFT's default"),
    )
