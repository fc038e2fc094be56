"""A published run as a job: model, layout, training and hardware; or the reason why it cannot be one.

The rules were written down before any error was looked at, and use nothing that was measured. A column that a source
leaves empty is a *knob*: the job has the value that the rule of `assumptions.py` names, and each other plausible value is a
variant, one knob at a time.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from loadgauge.errors import Error
from loadgauge.layers import View, block_layer
from loadgauge.spec.hardware import Gpu, gpu, gpu_ids
from loadgauge.spec.layout import SCHEDULES, TWO_CHUNKS, Layout, RecomputePolicy
from loadgauge.spec.lora import BaseName, Lora
from loadgauge.spec.model import ModelSpec, Moe
from loadgauge.spec.training import Training
from loadgauge.spec.training import training as trained
from published_runs import assumptions, vocabulary
from published_runs.free_text import Flags
from published_runs.models import Inexpressible, describe
from published_runs.run_defaults import with_overlap
from published_runs.source_rows import SourceRow
from published_runs.stages import stage_layers

NODE = 8
"""GPUs of a node where the source does not say."""


class Expressed(msgspec.Struct, frozen=True, kw_only=True):
    """What a row means. `gpu` None: a card that the catalogue does not have, or that the source does not name.

    like: the model of the catalogue that `model` differs from least in kind
    nic_bandwidth: byte/s of one GPU to other nodes, where the row says so
    """

    model: ModelSpec
    like: str
    layout: Layout
    training: Training
    gpu: Gpu | None
    gpus_per_node: int | None
    nic_bandwidth: float | None = None


class Variant(msgspec.Struct, frozen=True):
    """What a row means with another value of one open question."""

    knob: str
    value: str
    job: Expressed


class Expression(msgspec.Struct, frozen=True, kw_only=True):
    """What a row means, with its variants. Without a `job` there is a `reason`; `untimed` is why its time cannot be
    predicted."""

    job: Expressed | None = None
    variants: tuple[Variant, ...] = ()
    assumed: tuple[str, ...] = ()
    reason: str = ""
    untimed: str = ""


def express(run: SourceRow) -> Expression:
    """What a row means, or the reason why it cannot be expressed."""
    try:
        return _express(run)
    except (Inexpressible, Error) as error:
        return Expression(reason=str(error))


def _express(run: SourceRow) -> Expression:
    flags = Flags.of(run.other_flags)
    if run.task not in ("pretrain", "full-ft", "lora", "qlora"):
        raise Inexpressible(f"task: {run.task!r} is not modelled (adapters other than LoRA)")
    framework, recipe, how = assumptions.framework(run)
    described = describe(run, framework)
    assumed = [*described.assumed, *([how] if how else [])]
    card, untimed = _gpu(run)
    facts = assumptions.Facts(run=run, flags=flags, framework=framework, recipe=recipe, model=described.model)
    chosen, open_knobs = assumptions.choose(facts)
    assumed += [f"{knob.name}: {knob.default} ({knob.why})" for knob in open_knobs if knob.why]
    if run.gpus is None and not untimed:
        untimed = "gpus: the number of GPUs is not stated"

    def build(values: dict[str, Any], model: ModelSpec) -> Expressed:
        training = _training(run, flags, framework, recipe, values, model)
        layout = _layout(facts, values, model, training)
        layout.check(model)
        return Expressed(
            model=model, like=described.like, layout=layout, training=training, gpu=card, gpus_per_node=run.gpus_per_node,
            nic_bandwidth=_nic(run, flags),
        )  # fmt: skip

    job = build(chosen, described.model)
    variants: list[Variant] = []
    for knob in open_knobs:
        for value in knob.others:
            try:
                variants.append(Variant(knob.name, str(value), build({**chosen, knob.name: value}, described.model)))
            except Error:
                continue  # a value that this layout cannot have is not plausible
    for name, model in described.others:
        variants.append(Variant(name.split()[0], name, build(chosen, model)))
    return Expression(job=job, variants=tuple(variants), assumed=tuple(assumed), untimed=untimed)


def _nic(run: SourceRow, flags: Flags) -> float | None:
    """Adapters of a node, shared by its GPUs: "inter-node 4x100Gb"."""
    for phrase in flags.phrases:
        match = re.search(r"inter-node (\d+)x(\d+) ?Gb", phrase)
        if match:
            return int(match[1]) * int(match[2]) * 1e9 / 8 / (run.gpus_per_node or NODE)
    return None


def _gpu(run: SourceRow) -> tuple[Gpu | None, str]:
    if not run.hardware:
        return None, "hardware: not stated"
    name = run.hardware if run.hardware in gpu_ids() else vocabulary.HARDWARE.get(run.hardware)
    if name is None:
        raise Inexpressible(f"hardware: {run.hardware!r} is not mapped to the catalogue")
    if name == vocabulary.UNNAMED:
        return None, f"hardware: {run.hardware!r} is not in the catalogue"
    return gpu(name), ""


def _training(
    run: SourceRow, flags: Flags, framework: str, recipe: str, values: dict[str, Any], model: ModelSpec
) -> Training:
    word = vocabulary.PRECISION.get(str(values["precision"]))
    if word is None:
        raise Inexpressible(f"precision: {values['precision']!r} is not mapped")
    if framework == "megatron" and word == "fp16":
        word = "fp16-mixed-16"  # it gathers gradients in float32 for bf16 only, unless it is told to
    if recipe and word == "bf16" and "fp32 grad" not in run.sharding:
        word = f"{word}-{recipe}"
    optimizer = vocabulary.OPTIMIZER.get(run.optimizer)
    if optimizer is None:
        raise Inexpressible(f"optimizer: {run.optimizer!r} is not modelled")
    if word == "fp8-tensorwise" and run.precision == "fp8" and framework == "megatron" and (run.year or 0) < 2025:
        word = "fp8-delayed"  # the only recipe there was
    tuned = "NeMo" in run.framework or "Megatron-Bridge" in run.framework
    gathered = flags.value("fp8-param-gather") != "false" if flags.has("fp8-param-gather") else tuned
    if word.startswith(("fp8-tensorwise", "fp8-delayed", "mxfp8")) and gathered:
        word = f"{word}-primary"
    for phrase, name in (("AdamW bnb 8-bit", "adamw-8bit"), ("AdamW ao 8-bit", "adamw-8bit")):
        optimizer = name if flags.says(phrase) else optimizer
    if flags.says("4-bit"):
        raise Inexpressible("optimizer: 4-bit AdamW is not modelled")
    if flags.says("full BF16"):
        word = "bf16-pure"
    offload: Any = "none"
    if run.optimizer in vocabulary.OPTIMIZER_OFFLOADED or flags.value("optimizer_cpu_offload") == "true":
        offload = "optimizer"
    lora = None
    if run.task in ("lora", "qlora"):
        lora = _lora(run, flags, model, int(values["lora_rank"]))
        word = "bf16-pure" if word == "bf16" and run.task == "qlora" else word
    kind = trained(
        framework,
        word,
        optimizer=optimizer,
        attention=values["attention"],
        loss=_loss(run, flags, framework),
        lora=lora,
        offload=offload,
    )
    if recipe == "mixed-16" and kind.precision.master and kind.precision.gradient == 4:
        kind = msgspec.structs.replace(kind, precision=msgspec.structs.replace(kind.precision, gradient=2))
    return with_overlap(run, flags, kind, performance_recipe=tuned)


def _loss(run: SourceRow, flags: Flags, framework: str) -> str:
    """How the loss runs: Megatron-LM's fused form is its own (`native`) unless a source says otherwise, and torchtitan
    compiles its loss with the model from 2025 on."""
    if flags.value("use_liger_kernel") == "true":
        return "chunked"
    if framework == "megatron":
        if flags.says("fused cross entropy") or flags.value("cross-entropy-fusion-impl") == "te":
            return "fused"
        fused = flags.has("cross-entropy-loss-fusion") and flags.value("cross-entropy-loss-fusion") != "false"
        return "jit" if fused else "auto"
    compiled = flags.says("torch.compile") and "torchtitan" in run.framework and (run.year or 0) >= 2025
    return "compiled" if compiled else "auto"


def _lora(run: SourceRow, flags: Flags, model: ModelSpec, rank: int) -> Lora:
    # LitGPT's own default is a dropout of the adapters' input.
    stored: BaseName | bool = False
    if run.task == "qlora":
        stored = "nf4-single" if flags.says("bnb.nf4") and not flags.says("dq") else "nf4"
    lora = Lora(rank=rank, quantised=stored, dropout=0.05 if "litgpt" in run.framework.lower() else 0.0)
    if flags.value("target_modules") == "all-linear" or not ("litgpt" in run.framework.lower() or flags.says("q,v")):
        return lora
    names: set[str] = set()
    for block in model.blocks:
        layer = block_layer(block, model.hidden_size, View(tokens=1, pairs=1, lora=lora))
        names |= {name.split(".")[-2] for name in layer.names if name.endswith(".lora_a")}
    wanted = {"query", "value", "qkv"} if not flags.value("target_modules") else {"query", "key", "value", "qkv"}
    return msgspec.structs.replace(lora, targets=frozenset(names & wanted))


def _layout(facts: assumptions.Facts, values: dict[str, Any], model: ModelSpec, training: Training) -> Layout:
    run, flags = facts.run, facts.flags
    tp, pp, cp = run.tp or 1, run.pp or 1, run.cp or 1
    gpus = int(values["gpus"])
    if run.tp is None and run.pp is None and facts.framework == "megatron" and gpus > (run.dp or gpus):
        raise Inexpressible("tp, pp: how the model is split is not stated")
    within = tp * pp * cp
    if gpus % within:
        raise Inexpressible(f"gpus: {gpus} over tp {tp} x pp {pp} x cp {cp} leaves {gpus % within}")
    dp = gpus // within
    if run.dp is not None and run.gpus is not None and run.dp != dp:
        raise Inexpressible(f"dp: {run.dp} is stated, but {gpus} GPUs over tp {tp} x pp {pp} x cp {cp} are {dp}")
    micro = int(values["micro_batch"])
    local = flags.after(r"local batch (\d+) per DP rank")
    if run.global_batch is None:
        total = dp * (local or micro)
    else:
        total = run.global_batch
    schedule = _schedule(run, flags)
    vpp = run.vpp or 1
    if schedule in TWO_CHUNKS:
        vpp = 1  # two chunks are part of the schedule
    if schedule not in SCHEDULES:
        raise Inexpressible(f"schedule: {schedule!r} is not modelled")
    if schedule == "interleaved" and (pp == 1 or vpp == 1):
        schedule, vpp = "1f1b", 1
    experts = any(isinstance(block.mlp, Moe) for block in model.blocks)
    ep = run.ep or 1
    if not experts and ep > 1:
        raise Inexpressible(f"ep: {ep}, but the row states no experts")
    sequence_parallel = values["sequence_parallel"] == "yes" and tp > 1
    extra: dict[str, Any] = {}
    if flags.says("cp a2a") or "sequence_parallel_size" in run.other_flags:
        extra["cp_comm"] = "all_to_all"
    if flags.number("sequence_parallel_size"):
        raise Inexpressible("sequence_parallel_size: Ulysses over data-parallel ranks is not mapped")
    zero = vocabulary.SHARDING.get(str(values["sharding"]))
    if zero is None:
        raise Inexpressible(f"sharding: {values['sharding']!r} is not mapped")
    return Layout(
        dp=dp,
        replicas=_replicas(run, flags, dp, zero),
        tp=tp,
        pp=pp,
        cp=cp,
        ep=ep,
        etp=int(values["etp"]) if experts else 1,
        vpp=vpp,
        zero=zero,
        sequence_parallel=sequence_parallel,
        recompute=_recompute(str(values["recompute"]), facts, model, training),
        micro_batch=micro,
        global_batch=total,
        seq_len=int(values["seq_len"]),
        schedule=schedule,
        stage_layers=stage_layers(run, flags, model, pp, vpp, training),
        **extra,
    )


def _replicas(run: SourceRow, flags: Flags, dp: int, zero: int) -> int:
    """Groups that hold the same shards, where the row says over how many ranks it shards."""
    group = flags.after(r"zero1 group (\d+)")
    if run.sharding in vocabulary.REPLICATED:
        group = run.gpus_per_node or NODE
    elif "multi_dist_optimizer_instances" in run.model:
        group = dp // 2  # Megatron-LM's tests of that name have two instances
    return dp // group if zero and group and group < dp and dp % group == 0 else 1


def _schedule(run: SourceRow, flags: Flags) -> Any:
    if (run.pp or 1) == 1:
        return "1f1b"
    for phrase, name in vocabulary.SCHEDULES:
        if flags.says(phrase):
            return name
    return "interleaved" if (run.vpp or 1) > 1 else "1f1b"


def _recompute(word: str, facts: assumptions.Facts, model: ModelSpec, training: Training) -> RecomputePolicy:
    if word.startswith("selective:"):
        modules = re.findall(r"[a-z_]+", word.partition(":")[2])
        return _modules(modules, model, training)
    if word.startswith("remat_policy") and word not in vocabulary.RECOMPUTE:
        raise Inexpressible(f"recompute: {word!r} is not modelled")
    policy = vocabulary.RECOMPUTE.get(word)
    if policy is None:
        raise Inexpressible(f"recompute: {word!r} is not mapped")
    if policy == "selective" and facts.framework != "megatron":
        policy = "per-op"
    if policy == "per-op":
        return _per_op(model, training)
    return RecomputePolicy.parse(policy)


def _names(model: ModelSpec, training: Training) -> list[frozenset[str]]:
    view = View(tokens=1, pairs=1, kernels=training.kernels)
    return [block_layer(block, model.hidden_size, view).names for block in model.blocks]


def _per_op(model: ModelSpec, training: Training) -> RecomputePolicy:
    """torchtitan's: attention and every second matrix product keep their outputs, all else runs again."""
    kept = {"attention.query", "attention.value", "attention.flash", "attention.context", "mlp.gate", "mlp.down"}
    kept |= {"mlp.gate_up", "attention.qkv", "mlp.up" if not _gated(model) else "mlp.gate"}
    common = frozenset.intersection(*_names(model, training))
    return RecomputePolicy(mode="ops", ops=common - kept)


def _gated(model: ModelSpec) -> bool:
    return any(block.mlp is not None and block.mlp.gated for block in model.blocks)


def _modules(modules: list[str], model: ModelSpec, training: Training) -> RecomputePolicy:
    """Megatron-LM's list of modules that run again."""
    per_block = _names(model, training)
    wanted: set[str] = set()
    for module in modules:
        if module not in vocabulary.RECOMPUTE_MODULES:
            raise Inexpressible(f"recompute: module {module!r} is not mapped")
        for word in vocabulary.RECOMPUTE_MODULES[module]:
            for block, names in zip(model.blocks, per_block, strict=True):
                experts = isinstance(block.mlp, Moe)
                if (word == "dense" and not experts) or (word == "experts" and experts):
                    wanted |= {name for name in names if name.startswith("mlp.") and name != "mlp.residual"}
                elif word == "experts.activation" and experts:
                    wanted |= names & {"mlp.activation", "mlp.multiply", "mlp.split"}
                else:
                    wanted |= {name for name in names if name == word or name.startswith(f"{word}.")}
    common = frozenset.intersection(*per_block)
    chosen = frozenset(wanted) & common
    return RecomputePolicy(mode="ops", ops=chosen) if chosen else RecomputePolicy()
