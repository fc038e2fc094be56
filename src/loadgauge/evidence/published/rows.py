"""The row of the package for what a source's row means: fields of a `Job`, and what no field says as overrides.

Counters of memory in sources' words.
"""

import re
from itertools import groupby
from typing import Any

import msgspec

from loadgauge.core.definitions.job.job import Job
from loadgauge.core.definitions.model.lora import Lora
from loadgauge.core.definitions.model.model import ModelSpec
from loadgauge.core.definitions.training.frameworks import FRAMEWORKS
from loadgauge.core.definitions.training.stacks import NEWEST_STACK, Stack
from loadgauge.core.definitions.training.training import Training, spell_loss
from loadgauge.core.families.catalogue import find_model
from loadgauge.core.resolve.setup import Setup
from loadgauge.evidence.published import vocabulary
from loadgauge.evidence.published.expression import Expressed, express
from loadgauge.evidence.published.free_text import named
from loadgauge.evidence.published.models import Inexpressible
from loadgauge.evidence.published.source_rows import SourceRow
from loadgauge.evidence.validate.counters import UNKNOWN, Counter
from loadgauge.evidence.validate.overrides import UNCHANGED, Changes, Overrides, apply
from loadgauge.evidence.validate.runs import Measured, Run, Variant, resolve

IDENTITY = ("source", "unused_keys", "defaults", "num_nextn_predict_layers")
"""Fields of a `ModelSpec` on which no prediction depends; nor on the longest sequence, unless it has a table of positions."""


def row_of(source: SourceRow) -> Run:
    """The package's row of a source's row."""
    expression = express(source)
    counted, miscounted = UNKNOWN, ""
    if source.peak_memory_gib is not None:
        try:
            counted = counter(source) if source.memory_kind else UNKNOWN
        except Inexpressible as error:
            miscounted = str(error)
    run = Run(
        id=source.id,
        quality=source.quality,
        source=source.source,
        model=source.model,
        hardware=source.hardware,
        layout=layout_words(source),
        assumed=expression.assumed,
        reason=expression.reason,
        untimed=expression.untimed,
        measured=Measured(**{name: getattr(source, name) for name in Measured.__struct_fields__}),
        counter=counted,
        miscounted=miscounted,
        causal_flops=counts_causal(source),
    )
    if expression.job is None:
        return run
    if (
        not expression.untimed
        and expression.job.layout.pp > 1
        and not _rated(source)
        and "micro_batches:" in " ".join(expression.assumed)
    ):
        run = msgspec.structs.replace(run, untimed="global_batch: not stated, and only the time of a step is printed")
    job, overrides = job_of(expression.job)
    variants = []
    for variant in expression.variants:
        other, _ = job_of(variant.job)
        changes = {
            name: getattr(other, name) for name in Job.__struct_fields__ if getattr(other, name) != getattr(job, name)
        }
        more = overrides_of(other, variant.job, overrides)
        variants.append(Variant(knob=variant.knob, value=variant.value, job=changes, overrides=more))
    return msgspec.structs.replace(run, job=job, overrides=overrides, variants=tuple(variants))


def _attention(target: Expressed) -> str | None:
    """The attention, or the kernel of it, that the framework would not run by itself."""
    kernels, framework = target.training.kernels, FRAMEWORKS[target.training.framework.name]
    if kernels.attention != framework.kernels.attention:
        return kernels.attention
    usual = framework.flash_on(target.gpu, Stack.parse(target.version))
    return kernels.flash if kernels.flash not in ("", usual) else None


def _rated(source: SourceRow) -> bool:
    """Return whether a rate is printed, which a larger batch hardly changes, and not only the time of a step."""
    rates = ("tokens_per_s_per_gpu", "model_tflops_per_gpu", "hw_tflops_per_gpu", "mfu", "hfu")
    return any(getattr(source, name) is not None for name in rates) or source.step_time_s is None


def counts_causal(source: SourceRow) -> bool:
    """Return whether a row's model FLOPs count half of the query-key pairs: as it says itself, else as its framework counts.

    >>> counts_causal(SourceRow(id="x", notes="TFLOPS are model FLOPs with causal attention"))
    True
    >>> counts_causal(SourceRow(id="x", notes="FLOPs formula counts full (non-causal) attention", framework="Megatron-Bridge"))
    False
    """
    for part in (*source.notes.split(";"), *source.other_flags.split(";")):
        if not re.search(r"flops|mfu", part, re.IGNORECASE):
            continue
        if vocabulary.FULL_WORDS.search(part):
            return False
        if vocabulary.CAUSAL_WORDS.search(part):
            return True
    return any(named(source.framework, word) for word in vocabulary.CAUSAL_FLOPS)


def layout_words(source: SourceRow) -> str:
    """The number of GPUs and the layout in the source's own words; with model and hardware they are the configuration.

    >>> layout_words(SourceRow(id="x", gpus=8, tp=2, sharding="zero1", other_flags="schedule 1F1B; no comm overlap"))
    '8 GPUs, tp 2, zero1, schedule 1F1B'
    """
    schedule = next((part.strip() for part in source.other_flags.split(";") if "schedule " in part), "")
    degrees = [
        f"{name} {size}" for name in ("tp", "pp", "vpp", "cp", "ep") if (size := getattr(source, name)) is not None
    ]
    recompute = f"recompute {source.recompute}" if source.recompute else ""
    words = [f"{source.gpus} GPUs" if source.gpus else "", *degrees, source.sharding, recompute, schedule]
    return ", ".join(word for word in words if word)


def job_of(target: Expressed) -> tuple[Job, Overrides]:
    """The job of what a row means, and the overrides with which it resolves to exactly that."""
    layout, training = target.layout, target.training
    kernels, framework = training.kernels, FRAMEWORKS[training.framework.name]
    liger = kernels.loss == "liger"
    degrees = {
        name: size for name in ("tp", "pp", "vpp", "cp", "ep", "etp", "replicas") if (size := getattr(layout, name)) > 1
    }
    usual = "interleaved" if layout.vpp > 1 else "1f1b"
    adapter = _adapter(training.lora)
    job = Job(
        model=target.like,
        gpu=None if target.gpu is None else target.gpu.id,
        gpus=layout.gpus,
        **degrees,
        zero=layout.zero,
        sequence_parallel=layout.sequence_parallel or None,
        schedule=layout.schedule if layout.pp > 1 and layout.schedule != usual else None,
        recompute=str(layout.recompute),
        stage_layers=None if layout.stage_layers is None else ",".join(map(str, layout.stage_layers)),
        micro_batch=layout.micro_batch,
        global_batch=layout.global_batch,
        seq_len=layout.seq_len,
        precision=training.precision.name[:4]
        if training.weights and kernels.products is None
        else training.precision.name,
        weights=training.weights or None,
        optimizer=training.optimizer.name if training.optimizer.name != "adamw" else None,
        attention=_attention(target),
        loss=_loss(training),
        compile=True if kernels.compiled and not framework.kernels.compiled else None,
        end_units=_end_units(training),
        kernels="liger" if liger else None,
        framework=training.framework.name,
        version=target.version,
        **adapter,
        offload=training.offload if training.offload != "none" else None,
        activation_offload=training.host.activations if training.host.activations != "none" else None,
        cp_comm=layout.cp_comm if layout.cp > 1 and layout.cp_comm != "ring" else None,
        gpus_per_node=target.gpus_per_node if target.gpu is not None else None,
        nic_bandwidth=f"{target.nic_bandwidth / 1e9:g}GB/s"
        if target.nic_bandwidth and target.gpu is not None
        else None,
        overlap=training.overlap.alone() if training.overlap != framework.overlap and target.gpu is not None else None,
    )
    return job, overrides_of(job, target)


def _end_units(training: Training) -> str | None:
    """The flag of the units of embedding and head, where they are not the framework's own."""
    own = FRAMEWORKS[training.framework.name].end_units.at(NEWEST_STACK).value == "apart"
    return None if training.ends_apart == own else "apart" if training.ends_apart else "root"


def _loss(training: Training) -> str | None:
    """The flag of the loss, where it is not the framework's own."""
    kernels = training.kernels
    own = FRAMEWORKS[training.framework.name].kernels.loss
    if kernels.loss == "liger" or (kernels.compiled and kernels.loss == "compiled"):
        return None
    word = spell_loss(training)
    return None if word == own else word


def _adapter(lora: Lora | None) -> dict[str, Any]:
    if lora is None:
        return {}
    every = lora.targets == Lora(rank=1).targets
    base = lora.quantised if isinstance(lora.quantised, str) and lora.quantised != "nf4" else None
    targets = None if every else ",".join(sorted(lora.targets))
    return {
        "lora_rank": lora.rank,
        "lora_targets": targets or "all",
        "qlora": bool(lora.quantised) or None,
        "base": base,
        "kbit_upcast": lora.upcast if lora.peft and lora.quantised else None,
    }


def overrides_of(job: Job, target: Expressed, *before: Overrides) -> Overrides:
    """Return what remains to be changed after `before` so that the job resolves to `target`."""
    model = find_model(job.model)
    for changes in before:
        model = apply(model, changes.model)
    changed = difference(model, target.model, _identity(target.model))
    setup = resolve(job, *before, Overrides(model=changed))
    layout, training = difference(setup.layout, target.layout), difference(setup.training, target.training)
    overrides = Overrides(model=changed, layout=layout, training=training) or UNCHANGED
    check(resolve(job, *before, overrides), target)
    return overrides


def _identity(model: ModelSpec) -> tuple[str, ...]:
    return IDENTITY if model.learned_positions else (*IDENTITY, "max_position_embeddings")


def check(setup: Setup, target: Expressed) -> None:
    """Raises `AssertionError` unless a setup is exactly what a row means."""
    same = {name: getattr(setup.model, name) for name in _identity(target.model)}
    assert setup.model == msgspec.structs.replace(target.model, **same), (setup.model, target.model)
    assert setup.layout == target.layout, (setup.layout, target.layout)
    assert setup.training == target.training, (setup.training, target.training)
    assert setup.gpu == target.gpu


def difference(old: msgspec.Struct, new: msgspec.Struct, without: tuple[str, ...] = ()) -> Changes:
    """The changes that `loadgauge.evidence.validate.overrides.apply` makes `new` of `old` with.

    >>> from loadgauge.core.definitions.model.model import Norm
    >>> difference(Norm(), Norm("layernorm", bias=True))
    {'kind': 'layernorm', 'bias': True}
    """
    changes: Changes = {}
    for name in new.__struct_fields__:
        before, after = getattr(old, name), getattr(new, name)
        if name in without or before == after:
            continue
        if name == "blocks":
            changes[name] = [
                difference(before[min(index, len(before) - 1)], block) for index, block in enumerate(after)
            ]
        elif name == "pattern":
            changes[name] = run_lengths(after)
        elif isinstance(after, msgspec.Struct) and type(before) is type(after):
            changes[name] = difference(before, after)
        elif isinstance(after, msgspec.Struct):
            changes[name] = {"type": type(after).__name__} | _stated(after)
        else:
            changes[name] = sorted(after) if isinstance(after, frozenset) else msgspec.to_builtins(after)
    return changes


def run_lengths(pattern: tuple[int, ...]) -> list[list[int]]:
    """Return blocks in order, each with how many layers in a row it is.

    >>> run_lengths((0, 0, 1, 0))
    [[0, 2], [1, 1], [0, 1]]
    """
    return [[block, len(list(layers))] for block, layers in groupby(pattern)]


def _stated(record: msgspec.Struct) -> Changes:
    """The fields of a record that differ from their defaults."""
    changes: Changes = {}
    for field in msgspec.structs.fields(record):
        value = getattr(record, field.name)
        if field.required or value != field.default:
            nested = isinstance(value, msgspec.Struct)
            changes[field.name] = (
                {"type": type(value).__name__} | _stated(value) if nested else msgspec.to_builtins(value)
            )
    return changes


def counter(run: SourceRow) -> Counter:
    """The counter of a row's peak memory; raises `Inexpressible` where it is not of one GPU.

    >>> counter(SourceRow(id="x", memory_kind="allocated (torch max_memory_allocated; last rank = last pipeline stage)"))
    Counter(kind='allocated', last_stage=True)
    >>> counter(SourceRow(id="x", memory_kind="nvidia-smi snapshot (integer GB)")).kind
    'device'
    """
    text = run.memory_kind.lower()
    if "not per gpu" in text:
        raise Inexpressible(f"memory_kind: {run.memory_kind!r} is not the memory of one GPU")
    words = {"allocated": "allocated", "active": "active", "reserved": "reserved", "nvidia-smi": "device"}
    kind: Any = next((kind for word, kind in words.items() if text.startswith(word)), "unknown")
    if (
        "default metric is peak active" in text and kind != "allocated"
    ):  # what the tool prints where nothing else is asked for
        kind = "active"
    return Counter(kind, "last rank" in text)
