"""Single changes of a job and what each gains: every change is re-planned, none is extrapolated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from enum import Enum, auto
from typing import Any, NamedTuple

import msgspec

from loadgauge.errors import Error
from loadgauge.estimate.result import Estimate
from loadgauge.plan.axis_values import space_for
from loadgauge.plan.search import Case, Objective, search
from loadgauge.spec.cluster import cluster
from loadgauge.spec.frameworks import DEFAULT
from loadgauge.spec.hardware import Link
from loadgauge.spec.lora import Lora
from loadgauge.spec.optimizers import OPTIMIZERS
from loadgauge.spec.overlap import Overlap
from loadgauge.spec.training import Training
from loadgauge.spec.training import training as default_training
from loadgauge.units import rate

RANK = 16
"""Rank of adapters that a change introduces."""
Progress = Callable[[str], None]


class Kind(Enum):
    """What a change alters."""

    OPTIMIZER = auto()
    PRECISION = auto()
    OFFLOAD = auto()
    ADAPTERS = auto()
    SEQUENCE_LENGTH = auto()
    MORE_GPUS = auto()
    LINKS = auto()
    OVERLAP = auto()
    GLOBAL_BATCH = auto()


class Variant(NamedTuple):
    """A change in words and as flags, and a function that makes the changed job; it raises `Error` where that is impossible."""

    kind: Kind
    what: str
    flags: str
    make: Callable[[], Case]


class Change(NamedTuple):
    """A change of the job and the best layout with it. before: time of as many tokens without the change [s]."""

    what: str
    flags: str
    best: Estimate
    before: float | None = None

    @property
    def step(self) -> float:
        """Step time with the change [s]."""
        assert self.best.time is not None
        return self.best.time.step

    @property
    def speed(self) -> float | None:
        """Throughput relative to that without the change; None where they are not comparable."""
        return None if self.before is None else self.before / self.step

    def to_dict(self) -> dict[str, Any]:
        """The change as plain values: texts, seconds, bytes."""
        return {
            "change": self.what, "flags": self.flags, "step": self.step, "memory": self.best.memory.total,
            "step_before": self.before, "speed": self.speed, "layout": self.best.to_dict()["layout"],
        }  # fmt: skip


def reopened(
    case: Case,
    *,
    gpus: int | None = None,
    global_batch: int | None = None,
    seq_len: int | None = None,
    training: Training | None = None,
) -> Case:
    """Return the case with another size or training; its open axes are derived again and locks are kept.

    >>> from loadgauge import cluster, gpu, model, training
    >>> kind, locks = training("megatron"), {"tp": (2,)}
    >>> space = space_for(model("llama-3.1-8b"), kind, 8, 8, 4096, locks=locks)
    >>> small = Case(space=space, training=kind, cluster=cluster(gpu("h100-sxm5-80gb"), 8), locks=locks)
    >>> large = reopened(small, gpus=16, global_batch=32)
    >>> large.space.tp, large.space.pp, large.space.micro_batch, large.cluster.gpus
    ((2,), (1, 2, 4, 8, 16), (1, 2, 4, 8, 16, 32), 16)
    """
    space, kind = case.space, training or case.training
    machines = case.cluster if gpus in (None, space.gpus) else wider(case, gpus or 1)
    wanted = {
        name: value for name, value in (("global_batch", global_batch), ("seq_len", seq_len)) if value is not None
    }
    if case.locks is None and gpus is None:
        return msgspec.structs.replace(case, space=msgspec.structs.replace(space, **wanted), training=kind)
    remade = space_for(
        space.model, kind, machines.gpus, global_batch or space.global_batch, seq_len or space.seq_len,
        locks=case.locks, stage_layers=space.stage_layers, lengths=space.lengths, base=space.base,
    )  # fmt: skip
    return msgspec.structs.replace(case, space=remade, training=kind, cluster=machines)


def wider(case: Case, gpus: int) -> Any:
    """Return a cluster of another number of the same GPUs with the same links."""
    old = case.cluster
    inner = old.links[0].bandwidth if old.links[0].domain > 1 else None
    outer = old.links[-1].bandwidth if len(old.links) > 1 else None
    usual = old.gpus_per_node if old.gpus > old.gpus_per_node else None
    return cluster(old.gpu, gpus, usual if usual and gpus % usual == 0 else None, inner, outer)


def variants(case: Case) -> Iterator[Variant]:
    """Yield changes of a job that reduce memory, the smallest change first."""
    kind, space = case.training, case.space

    def with_kind(**changes: Any) -> Callable[[], Case]:
        return lambda: reopened(case, training=msgspec.structs.replace(kind, **changes))

    if kind.optimizer.name == "adamw":
        eight = with_kind(optimizer=OPTIMIZERS["adamw-8bit"])
        yield Variant(Kind.OPTIMIZER, "an 8-bit optimizer", "--optimizer adamw-8bit", eight)
    if kind.precision.master and kind.precision.products is None and kind.lora is None:
        what = "all in bf16, without float32 weights"
        yield Variant(Kind.PRECISION, what, "--precision bf16-pure", lambda: _recast(case, "bf16-pure"))
    if kind.offload == "none":
        for what, parts in (("the optimizer on the host", "optimizer"), ("optimizer and weights on the host", "all")):
            yield Variant(Kind.OFFLOAD, what, f"--offload {parts}", with_kind(offload=parts))
    # Without the framework's name, adapters mean transformers', and so does one GPU.
    name = kind.framework.name
    same = "" if name == DEFAULT else f" --framework {name}"
    if kind.lora is None and space.model.head.kind == "lm":
        flags = f"--lora-rank {RANK}{same}"
        yield Variant(Kind.ADAPTERS, "adapters on a frozen base", flags, with_kind(lora=Lora(rank=RANK)))
    if space.model.head.kind == "lm" and (kind.lora is None or not kind.lora.quantised):
        rank = RANK if kind.lora is None else kind.lora.rank
        four = (
            Lora(rank=rank, quantised=True) if kind.lora is None else msgspec.structs.replace(kind.lora, quantised=True)
        )
        what = "adapters on a frozen base in 4 bits"
        yield Variant(Kind.ADAPTERS, what, f"--qlora{same}", with_kind(lora=four))
    if space.lengths is None and space.seq_len >= 1024:
        half = space.seq_len // 2
        what = "half the sequence length"
        yield Variant(Kind.SEQUENCE_LENGTH, what, f"--seq-len {half}", lambda: reopened(case, seq_len=half))
    for factor in (2, 4, 8):
        yield _more_gpus(case, factor, f"{factor} times the GPUs")


def _more_gpus(case: Case, factor: int, what: str) -> Variant:
    """More GPUs, with a global batch of at least one sequence per GPU."""
    space, name = case.space, case.training.framework.name
    gpus = factor * space.gpus
    batch = max(space.global_batch, gpus)
    flags = f"--gpus {gpus}" + (f" --global-batch {batch}" if batch != space.global_batch else "")
    flags += f" --framework {name}" if space.gpus == 1 and case.training.lora is None else ""
    return Variant(Kind.MORE_GPUS, what, flags, lambda: reopened(case, gpus=gpus, global_batch=batch))


def what_would_fit(
    cases: Sequence[Case], margin: float, objective: Objective, most: int = 6, progress: Progress | None = None
) -> list[Change]:
    """Return up to `most` changes with which a layout fits, each with the best one; `margin` [bytes] stays free."""
    found: list[Change] = []
    for variant in variants(cases[-1]):
        if progress is not None:
            progress(variant.what)
        try:
            best = search([variant.make()], objective=objective, margin=margin, top=1).layouts[0]
        except Error:
            continue
        found.append(Change(variant.what, variant.flags, best))
        if len(found) == most or variant.kind is Kind.MORE_GPUS:
            break
    return found


def faster(case: Case) -> Iterator[Variant]:
    """Yield changes of a job that may make it faster."""
    kind, space, old = case.training, case.space, case.cluster
    for name, flag, place in (
        ("link inside a node", "--link-bandwidth", 0), ("network adapter", "--nic-bandwidth", 1),
    ):  # fmt: skip
        if place < len(old.links) and old.links[place].domain > 1:
            doubled = msgspec.structs.replace(old.links[place], bandwidth=2 * old.links[place].bandwidth)
            flags = f"{flag} {rate(doubled.bandwidth)}"
            yield Variant(Kind.LINKS, f"twice the {name}", flags, _with_link(case, place, doubled))
    yield Variant(
        Kind.OVERLAP, "all communication beside compute", "--overlap all",
        lambda: reopened(case, training=msgspec.structs.replace(kind, overlap=Overlap.parse("all"))),
    )  # fmt: skip
    if kind.framework.transformer_engine and kind.precision.products is None and kind.lora is None:
        yield Variant(Kind.PRECISION, "8-bit matrix products", "--precision fp8", lambda: _recast(case, "fp8"))
    batch = 2 * space.global_batch
    what = "twice the global batch"
    yield Variant(Kind.GLOBAL_BATCH, what, f"--global-batch {batch}", lambda: reopened(case, global_batch=batch))
    yield _more_gpus(case, 2, "twice the GPUs")


def _with_link(case: Case, place: int, link: Link) -> Callable[[], Case]:
    links = tuple(link if number == place else one for number, one in enumerate(case.cluster.links))
    machines = msgspec.structs.replace(case.cluster, links=links)
    return lambda: msgspec.structs.replace(case, cluster=machines)


def _recast(case: Case, precision: str) -> Case:
    """In another precision; an error where the framework or the GPU has none."""
    kind, kernels = case.training, case.training.kernels
    if precision == "fp8":
        case.cluster.gpu.peak("fp8")
    loss = f"chunked:{kernels.loss_chunks}" if kernels.loss == "chunked" else kernels.loss
    other = default_training(kind.framework.name, precision, kind.optimizer.name, kernels.attention, loss)
    return reopened(case, training=msgspec.structs.replace(other, overlap=kind.overlap, offload=kind.offload))


OTHER_JOBS = (Kind.ADAPTERS, Kind.SEQUENCE_LENGTH, Kind.MORE_GPUS)
"""Changes that reduce memory by making it another job, whose throughput cannot be compared."""


def what_next(
    case: Case, best: Estimate, margin: float, objective: Objective, progress: Progress | None = None
) -> list[Change]:
    """Re-plan with each single change; the changes with the highest throughput come first."""
    assert best.time is not None
    found = []
    leaner = (variant for variant in variants(case) if variant.kind not in OTHER_JOBS)
    for variant in (*leaner, *faster(case)):
        if progress is not None:
            progress(variant.what)
        try:
            other = search([variant.make()], objective=objective, margin=margin, top=1).layouts[0]
        except Error:
            continue
        assert other.time is not None
        # What the old step would take for as many tokens on as many GPUs as it has.
        found.append(Change(variant.what, variant.flags, other, best.time.step * other.time.tokens / best.time.tokens))
    return sorted(found, key=lambda change: -(change.speed or 0))
