"""A published run as a job: model, layout, training and hardware; or the reason why it cannot be one.

The rules were written down before any error was looked at, and use nothing that was measured. A column that a source
leaves empty is a *knob*: the job has the value that the rule of `assumptions.py` names, and each other plausible value is a
variant, one knob at a time.

How many layers each pipeline stage of a published run has.
"""

import contextlib
import re
from collections.abc import Callable
from typing import Any

import msgspec

from loadgauge.core.base.errors import Error
from loadgauge.core.definitions.hardware.hardware import Gpu, gpu, gpu_ids
from loadgauge.core.definitions.hardware.host import Host
from loadgauge.core.definitions.hardware.usual import with_usual
from loadgauge.core.definitions.layout.layout import SCHEDULES, TWO_CHUNKS, Layout, RecomputePolicy
from loadgauge.core.definitions.model.lora import BaseName, Lora
from loadgauge.core.definitions.model.model import ModelSpec, Moe
from loadgauge.core.definitions.training.frameworks import FRAMEWORKS
from loadgauge.core.definitions.training.stacks import Stack
from loadgauge.core.definitions.training.training import Training, training as trained
from loadgauge.core.estimate.estimate import estimate, view_of
from loadgauge.core.layers import View, block_layer, head_layer
from loadgauge.core.resolve.recompute_words import MODULES, REMAT, resolve_recompute
from loadgauge.evidence.published import assumptions, recipes, vocabulary
from loadgauge.evidence.published.free_text import Flags, chunks_of, named
from loadgauge.evidence.published.models import Inexpressible, describe
from loadgauge.evidence.published.run_defaults import with_overlap
from loadgauge.evidence.published.source_rows import TAKEN, SourceRow

LARGEST = (8, 4, 2)
"""Micro-batches that are tried, from the largest, where the source states none."""
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
    version: str | None = None


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
    """Return what a row means, or the reason why it cannot be expressed."""
    try:
        return _express(run)
    except (Inexpressible, Error) as error:
        return Expression(reason=str(error))


def _express(run: SourceRow) -> Expression:
    for file, says in vocabulary.FILES.items():
        if file in run.notes:
            run = msgspec.structs.replace(run, **{key: value for key, value in says.items() if not getattr(run, key)})
    flags = Flags.of(run.other_flags)
    if run.task not in ("pretrain", "full-ft", "lora", "qlora"):
        raise Inexpressible(f"task: {run.task!r} is not modelled (adapters other than LoRA)")
    framework, recipe, how = assumptions.framework(run)
    described = describe(run, framework)
    assumed = [*described.assumed, *([how] if how else [])]
    card, untimed = _gpu(run)
    facts = assumptions.Facts(
        run=run, flags=flags, framework=framework, recipe=recipe, model=described.model, known=not how
    )
    chosen, open_knobs = assumptions.choose(facts)
    if run.gpus is None and not untimed:
        untimed = "gpus: the number of GPUs is not stated"
    if re.search(r"\bis a cap\b", run.notes) and not flags.says("pack") and not untimed:
        untimed = "seq_len: it is a cap, and the lengths of the samples are not stated"
    if (again := _contradicts(facts)) is not None:
        assumed.append(again)
    assumed += [note for note in run.notes.split("; ") if note.startswith(TAKEN)]

    def build(values: dict[str, Any], model: ModelSpec, habits: str = framework) -> Expressed:
        training = _training(run, flags, habits, recipe, values, model)
        layout = _layout(facts, values, model, training)
        layout.check(model)
        return Expressed(
            model=model,
            like=described.like,
            layout=layout,
            training=training.under(layout.zero),
            gpu=card,
            gpus_per_node=run.gpus_per_node,
            nic_bandwidth=_nic(run, flags),
            version=_version(run, habits),
        )

    if run.micro_batch is None and (run.pp or 1) == 1 and run.task == "pretrain":
        open_knobs = _largest_batch(chosen, open_knobs, lambda values: build(values, described.model))
    assumed += [f"{knob.name}: {knob.default} ({knob.why})" for knob in open_knobs if knob.why]
    job = build(chosen, described.model)
    variants: list[Variant] = []
    for knob in open_knobs:
        for value in knob.others:
            try:
                variants.append(Variant(knob.name, str(value), build({**chosen, knob.name: value}, described.model)))
            except Error:
                continue  # a value that this layout cannot have is not plausible
    if how and (other := assumptions.OTHERS.get(framework)):
        with contextlib.suppress(Error):
            variants.append(Variant("framework", other, build(chosen, described.model, other)))
    for name, model in described.others:
        variants.append(Variant(name.split()[0], name, build(chosen, model)))
    return Expression(job=job, variants=tuple(variants), assumed=tuple(assumed), untimed=untimed)


def _largest_batch(
    chosen: dict[str, Any], knobs: tuple[assumptions.Knob, ...], build: Callable[[dict[str, Any]], Expressed]
) -> tuple[assumptions.Knob, ...]:
    """The knobs with the largest micro-batch that fits by our memory, as runs that are published for their speed have it."""
    for size in LARGEST:
        with contextlib.suppress(Error):
            job = build({**chosen, "micro_batch": size})
            if job.gpu is None or not estimate(job.model, job.layout, job.training, job.gpu).memory.roomy:
                continue
            chosen["micro_batch"] = size
            knob = assumptions.Knob(
                "micro_batch", size, tuple(other for other in (1, *LARGEST) if other != size), "the largest that fits"
            )
            return tuple(knob if each.name == "micro_batch" else each for each in knobs)
    return knobs


def _nic(run: SourceRow, flags: Flags) -> float | None:
    """Adapters of a node, shared by its GPUs: "inter-node 4x100Gb"."""
    phrases = (re.search(r"inter-node (\d+)x(\d+) ?Gb", phrase) for phrase in flags.phrases)
    named = (machine for name, machine in vocabulary.MACHINES.items() if name in run.notes)
    each = [*((int(match[1]), int(match[2])) for match in phrases if match), *named]
    return each[0][0] * each[0][1] * 1e9 / 8 / (run.gpus_per_node or NODE) if each else None


def _gpu(run: SourceRow) -> tuple[Gpu | None, str]:
    if not run.hardware:
        return None, "hardware: not stated"
    name = run.hardware if run.hardware in gpu_ids() else vocabulary.HARDWARE.get(run.hardware)
    if name is None:
        raise Inexpressible(f"hardware: {run.hardware!r} is not mapped to the catalogue")
    if name == vocabulary.UNNAMED:
        return None, f"hardware: {run.hardware!r} is not in the catalogue"
    joined, other = vocabulary.JOINED.get(run.hardware, (0, ""))
    if other and (run.tp or 1) > joined:
        name = other
    limited = vocabulary.LIMITED.search(run.hardware)
    return with_usual(gpu(name))[0], f"hardware: {run.hardware!r} does not say to what power" if limited else ""


def _contradicts(facts: assumptions.Facts) -> str | None:
    """Return what is said where a printed `dp` is not what the GPUs leave: some sources count context-parallel ranks with it."""
    run = facts.run
    if run.dp is None or run.gpus is None:
        return None
    whole, cp = run.gpus // ((run.tp or 1) * (run.pp or 1)), run.cp or 1
    if run.dp * cp == whole:
        return None
    if run.dp == whole:
        return f"dp: {run.dp} as printed counts the {cp} ranks of context parallelism too"
    return f"dp: {run.dp} as printed contradicts the GPUs, which make {whole // cp}"


def _training(
    run: SourceRow, flags: Flags, framework: str, recipe: str, values: dict[str, Any], model: ModelSpec
) -> Training:
    word = vocabulary.PRECISION.get(str(values["precision"]))
    if word is None:
        raise Inexpressible(f"precision: {values['precision']!r} is not mapped")
    if framework in assumptions.SPLITS and word == "fp16":
        word = "fp16-mixed-16"  # it gathers gradients in float32 for bf16 only, unless it is told to
    if framework == "megatron-deepspeed" and word == "bf16" and "fp32 grad" in run.sharding:
        word = "bf16-mixed-18"
    if recipe and word == "bf16" and "fp32 grad" not in run.sharding:
        word = f"{word}-{recipe}"
    optimizer = vocabulary.OPTIMIZER.get(run.optimizer)
    if optimizer is None:
        raise Inexpressible(f"optimizer: {run.optimizer!r} is not modelled")
    if word == "fp8-tensorwise" and run.precision == "fp8" and framework == "megatron" and (run.year or 0) < 2025:
        word = "fp8-delayed"  # the only recipe there was
    tuned = assumptions.performance_recipe(run, framework)
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
    loss, compiled, host, apart = _loss(run, flags, framework), _compiled(run, flags), Host(), False
    if framework == "torchtune":
        told = recipes.recipe(run, flags, optimizer)
        optimizer, loss, compiled, offload = told.optimizer, told.loss, told.compiled, told.offload
        host, apart = Host(activations=told.activations), told.ends_apart
    kind = trained(
        framework,
        word,
        optimizer=optimizer,
        attention=values["attention"],
        loss=loss,
        lora=lora,
        offload=offload,
        host=host,
        compiled=compiled,
        kernels="liger" if _liger(flags) else "native",
        stack=Stack.parse(_version(run, framework)),
    )
    if apart:
        kind = msgspec.structs.replace(kind, ends_apart=True)
    if recipe == "mixed-16" and kind.precision.master and kind.precision.gradient == 4:
        kind = msgspec.structs.replace(kind, precision=msgspec.structs.replace(kind.precision, gradient=2))
    if kind.kernels.attention == "flash" and not kind.kernels.flash:
        kernel = kind.framework.flash_on(_gpu(run)[0], Stack.parse(_version(run, framework)))
        kind = msgspec.structs.replace(kind, kernels=msgspec.structs.replace(kind.kernels, flash=kernel))
    return with_overlap(run, flags, kind, performance_recipe=tuned)


def _version(run: SourceRow, framework: str) -> str | None:
    """The releases of libraries that a run of its year had, where what its framework does hangs on them.

    bitsandbytes 0.41 is what LitGPT asked for in 2023, and the newest of that year.
    """
    releases_of = {"bitsandbytes": "0.41"} if run.task == "qlora" and (run.year or 9999) <= 2023 else {}
    libraries = {library for choice in FRAMEWORKS[framework].flash for library, _ in choice.since}
    for library, releases in vocabulary.RELEASES.items():
        if library in libraries and run.year is not None and (run.year in releases or run.year < min(releases)):
            releases_of[library] = releases.get(run.year, releases[min(releases)])
    return ",".join(f"{name}={release}" for name, release in releases_of.items()) or None


def _liger(flags: Flags) -> bool:
    return flags.value("use_liger_kernel") == "true" or (flags.says("Liger-Kernel") and not flags.says("no Liger"))


def _loss(run: SourceRow, flags: Flags, framework: str) -> str:
    """How the loss runs: Megatron-LM's fused form is its own (`native`) unless a source says otherwise. Where torchtitan
    compiled the layers, it compiled the loss with them from its release 0.1 on."""
    if framework in assumptions.SPLITS:
        if flags.says("fused cross entropy") or flags.value("cross-entropy-fusion-impl") == "te":
            return "fused"
        fused = flags.has("cross-entropy-loss-fusion") and flags.value("cross-entropy-loss-fusion") != "false"
        return "jit" if fused else "auto"
    if not _compiled(run, flags):
        return "auto"
    before = (run.year or 0) < vocabulary.LOSS_COMPILED or any(words in run.source for words in vocabulary.LOSS_PLAIN)
    return "float32" if before else "compiled"


def _compiled(run: SourceRow, flags: Flags) -> bool:
    """Return whether torchtitan compiled the layers."""
    return flags.says("torch.compile") and named(run.framework, "torchtitan")


def _lora(run: SourceRow, flags: Flags, model: ModelSpec, rank: int) -> Lora:
    # LitGPT's own default is a dropout of the adapters' input.
    stored: BaseName | bool = False
    if run.task == "qlora":
        stored = "nf4-single" if flags.says("bnb.nf4") and not flags.says("dq") else "nf4"
    lora = Lora(rank=rank, quantised=stored, dropout=0.05 if "litgpt" in run.framework.lower() else 0.0)
    if named(run.framework, "torchtune") and not flags.says("LoRA layers"):
        return msgspec.structs.replace(lora, targets=recipes.TARGETS)
    # NVIDIA's performance recipes adapt `linear_qkv` alone (megatron-bridge: scripts/performance, llama3_70b_lora_config).
    tuned = not flags.has("target_modules") and any(named(run.framework, word) for word in ("NeMo", "Megatron-Bridge"))
    few = tuned or named(run.framework, "LitGPT") or flags.says("q,v")
    if flags.value("target_modules") == "all-linear" or not few:
        return lora
    names: set[str] = set()
    for block in model.blocks:
        layer = block_layer(block, model.hidden_size, View(tokens=1, pairs=1, lora=lora))
        names |= {name.split(".")[-2] for name in layer.names if name.endswith(".lora_a")}
    whole = tuned or flags.value("target_modules")
    wanted = {"query", "key", "value", "qkv"} if whole else {"query", "value", "qkv"}
    return msgspec.structs.replace(lora, targets=frozenset(names & wanted))


def _layout(facts: assumptions.Facts, values: dict[str, Any], model: ModelSpec, training: Training) -> Layout:
    run, flags = facts.run, facts.flags
    tp, pp, cp = run.tp or 1, run.pp or 1, run.cp or 1
    gpus = int(values["gpus"])
    if run.tp is None and run.pp is None and facts.framework in assumptions.SPLITS and gpus > (run.dp or gpus):
        raise Inexpressible("tp, pp: how the model is split is not stated")
    parted = (run.tp, run.pp, run.ep) != (None, None, None) or run.dp is not None
    if facts.framework in assumptions.SPLITS and run.moe_experts is not None and gpus > 1 and not parted:
        raise Inexpressible("tp, pp, ep: how the model and its experts are split is not stated")
    within = tp * pp * cp
    if gpus % within:
        raise Inexpressible(f"gpus: {gpus} over tp {tp} x pp {pp} x cp {cp} leaves {gpus % within}")
    dp = gpus // within
    # Sources that have a batch of each chip share a sequence over the chips of tensor parallelism.
    micro = int(values["micro_batch"]) * (tp if flags.has("per_device_batch_size") else 1)
    stated = assumptions.stated_batch(facts)
    if run.global_batch is not None:
        total = run.global_batch
    elif stated is not None:
        total = stated(dp, micro)
    else:
        total = dp * micro * int(values["micro_batches"])
    schedule = _schedule(run, flags)
    # Two chunks are part of some schedules, and torchtitan's own default for others.
    vpp = (
        1
        if schedule in TWO_CHUNKS
        else run.vpp or 1 + (schedule == "interleaved" and named(run.framework, "torchtitan"))
    )
    if schedule not in SCHEDULES:
        raise Inexpressible(f"schedule: {schedule!r} is not modelled")
    if schedule == "interleaved" and (pp == 1 or vpp == 1):
        schedule, vpp = "1f1b", 1
    experts = any(isinstance(block.mlp, Moe) for block in model.blocks)
    ep = int(values["ep"])
    if not experts and ep > 1:
        raise Inexpressible(f"ep: {ep}, but the row states no experts")
    sequence_parallel = values["sequence_parallel"] == "yes" and tp > 1
    extra: dict[str, Any] = {}
    if flags.says("cp a2a") or "sequence_parallel_size" in run.other_flags:
        extra["cp_comm"] = "all_to_all"
    if flags.number("sequence_parallel_size"):
        raise Inexpressible("sequence_parallel_size: Ulysses over data-parallel ranks is not mapped")
    zero = _zero(str(values["sharding"]), facts, pp)
    sample = recipes.sample(flags)
    if sample is not None:
        # Packed samples see themselves alone: as many tokens, but each sees those of its own sample.
        tokens = micro * int(values["seq_len"])
        extra |= {"tokens": tokens, "pairs": tokens * sample}
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


def _zero(word: str, facts: assumptions.Facts, stages: int) -> int:
    """The ZeRO stage. In a pipeline Megatron's kin that shard gradients "like ZeRO 2" reduce those of a chunk after its last
    backward, as ZeRO 1 sends them (MegaScale, arXiv:2402.15627, section 3.2), and torchtitan does not shard weights again."""
    zero = vocabulary.SHARDING.get(word)
    if zero is None:
        raise Inexpressible(f"sharding: {word!r} is not mapped")
    if zero == 2 and stages > 1 and facts.framework in assumptions.SPLITS:
        return 1
    if zero == 3 and stages > 1 and facts.framework == "torchtitan":
        return 2
    return zero


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
    schedules = (name for phrase, name in vocabulary.SCHEDULES if flags.says(phrase))
    return next(schedules, "interleaved" if (run.vpp or 1) > 1 else "1f1b")


def _recompute(word: str, facts: assumptions.Facts, model: ModelSpec, training: Training) -> RecomputePolicy:
    if word.startswith("selective:"):
        return _modules(re.findall(r"[a-z_]+", word.partition(":")[2]), model, training)
    if word.startswith("remat_policy "):
        policy = word.removeprefix("remat_policy ")
        if policy not in REMAT:
            raise Inexpressible(f"recompute: {word!r} does not say what it keeps")
        return RecomputePolicy.parse(resolve_recompute(f"remat:{policy}", model, training))
    mapped = vocabulary.RECOMPUTE.get(word)
    if mapped is None:
        raise Inexpressible(f"recompute: {word!r} is not mapped")
    if mapped == "selective" and facts.framework not in assumptions.SPLITS:
        mapped = "per-op"
    if mapped == "per-op":
        return _per_op(facts, model, training)
    return RecomputePolicy.parse(mapped)


def _per_op(facts: assumptions.Facts, model: ModelSpec, training: Training) -> RecomputePolicy:
    """torchtitan's: attention and every second matrix product keep their outputs, all else runs again."""
    again = frozenset(resolve_recompute("per-op", model, training).split(","))
    before = (facts.run.year or 9999) <= vocabulary.CUDNN_RUNS_AGAIN
    if training.kernels.flash == "cudnn" and before and named(facts.run.framework, "torchtitan"):
        again |= {"attention.flash"}
    return RecomputePolicy(mode="ops", ops=again)


def _modules(modules: list[str], model: ModelSpec, training: Training) -> RecomputePolicy:
    """Megatron-LM's list of modules that run again."""
    unknown = [module for module in modules if module not in MODULES]
    if unknown:
        raise Inexpressible(f"recompute: module {unknown[0]!r} is not mapped")
    return RecomputePolicy.parse(resolve_recompute(f"modules:{','.join(modules)}", model, training))


def stage_layers(
    run: SourceRow, flags: Flags, model: ModelSpec, pp: int, vpp: int, training: Training
) -> tuple[int, ...] | None:
    """Layers of each stage; None where they are equal.

    A layout that the row states is taken. Else layers that do not divide leave one fewer to the first and the last stage
    (or to the last alone), as embedding and loss count for one layer each; else the first stages have one more.
    """
    layers = model.num_hidden_layers
    if pp == 1:
        return None
    stated = flags.value("pipeline-model-parallel-layout") or flags.value("pp_layout")
    if stated and "L" in stated:
        return _from_layout(stated, pp, layers)
    ends = [flags.number(f"decoder_{end}_pipeline_num_layers") for end in ("first", "last")]
    if any(end is not None for end in ends):
        return _ends_given(layers, pp, ends[0], ends[1])
    if flags.says("redistributed") or "redis" in flags.phrases:
        return _balanced(run, model, pp, training)
    if layers % (pp * vpp) == 0:
        return None
    chunks = _chunks(layers, pp * vpp)
    return tuple(sum(chunks[stage::pp]) for stage in range(pp))


def _from_layout(text: str, pp: int, layers: int) -> tuple[int, ...]:
    chunks = [count + (1 if further else 0) for count, further in chunks_of(text)]
    stages = tuple(sum(chunks[stage::pp]) for stage in range(pp))
    if len(chunks) % pp or sum(stages) != layers:
        raise Inexpressible(
            f"the pipeline layout {text!r} has {sum(stages)} layers in {len(chunks)} chunks, not {layers}"
        )
    return stages


def _ends_given(layers: int, pp: int, first: int | None, last: int | None) -> tuple[int, ...]:
    between = pp - (first is not None) - (last is not None)
    rest = layers - (first or 0) - (last or 0)
    if between < 1 or rest % between:
        raise Inexpressible(f"{rest} layers over {between} stages leaves {rest % max(between, 1)}")
    middle = (rest // between,) * between
    return (*(() if first is None else (first,)), *middle, *(() if last is None else (last,)))


def _chunks(layers: int, count: int) -> list[int]:
    """Layers of each chunk, in order.

    >>> _chunks(22, 8), _chunks(61, 4), _chunks(126, 32)[:2]
    ([2, 3, 3, 3, 3, 3, 3, 2], [16, 15, 15, 15], [3, 4])
    """
    if (layers + 2) % count == 0:
        chunks = [(layers + 2) // count] * count
        chunks[0] -= 1
        chunks[-1] -= 1
    elif (layers + 1) % count == 0:
        chunks = [(layers + 1) // count] * count
        chunks[-1] -= 1
    else:
        chunks = [layers // count + (index < layers % count) for index in range(count)]
    return chunks


def _balanced(run: SourceRow, model: ModelSpec, pp: int, training: Training) -> tuple[int, ...]:
    """As many layers to the last stage, which has the head, as leaves the slowest stage the least work."""
    view = view_of(Layout(seq_len=run.seq_len or 1, micro_batch=1), training)
    head = float(head_layer(model, view).forward_flops)
    layer = float(block_layer(model.blocks[0], model.hidden_size, view).forward_flops)
    layers = model.num_hidden_layers

    def slowest(last: int) -> float:
        return max(last + head / layer, float(-(-(layers - last) // (pp - 1))))

    best = min(range(layers // pp, -1, -1), key=slowest)
    rest = layers - best
    # The first stages hold the most micro-batches, so they get no layer more than they must.
    others = [rest // (pp - 1) + (pp - 2 - index < rest % (pp - 1)) for index in range(pp - 1)]
    return (*others, best)
