"""What one change of the job would bring: every row is planned anew, none is extrapolated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from loadgauge.adapters import Lora
from loadgauge.cluster import cluster
from loadgauge.errors import Error, NothingFits
from loadgauge.estimate.result import Estimate
from loadgauge.overlap import Overlap
from loadgauge.search.choices import space_for
from loadgauge.search.plan import Case, Objective, plan
from loadgauge.training import OPTIMIZERS
from loadgauge.training import training as default_training

RANK = 16
"""Of adapters, where a change brings them in."""


class Change(NamedTuple):
    """A change of the job, and the best layout with it."""

    what: str
    flags: str
    best: Estimate
    before: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        step = None if self.best.time is None else self.best.time.step
        return {
            "change": self.what, "flags": self.flags, "step": step, "memory": self.best.memory.total,
            "step_before": self.before, "layout": self.best.to_dict()["layout"],
        }  # fmt: skip

    def line(self) -> str:
        """In one line."""
        assert self.best.time is not None
        time, memory = self.best.time, self.best.memory.total / 2**30
        speed = "" if self.before is None else f", {self.before / time.step:.2f} times as fast"
        return f"{self.what} ({self.flags}): {memory:.1f} GiB, a step of {time.step:.3g} s{speed}"


def variants(case: Case) -> Iterator[tuple[str, str, Case]]:
    """Changes of a job that leave less in memory, the smallest change first."""
    training, space = case.training, case.space
    if training.optimizer.name == "adamw" and training.lora is None:
        eight = msgspec.structs.replace(training, optimizer=OPTIMIZERS["adamw-8bit"])
        yield "an 8-bit optimizer", "--optimizer adamw-8bit", _with(case, training=eight)
    if training.offload == "none":
        for what in ("optimizer", "all"):
            words = "the optimizer on the host" if what == "optimizer" else "optimizer and weights on the host"
            yield words, f"--offload {what}", _with(case, training=msgspec.structs.replace(training, offload=what))
    if training.lora is None and space.model.head.kind == "lm":
        for quantised, flags in ((False, f"--lora-rank {RANK}"), (True, "--qlora")):
            adapters = msgspec.structs.replace(training, lora=Lora(rank=RANK, quantised=quantised))
            words = "adapters on a frozen base" + (" in 4 bits" if quantised else "")
            yield words, flags, _with(case, training=adapters)
    if space.lengths is None and space.seq_len >= 1024:
        half = msgspec.structs.replace(space, seq_len=space.seq_len // 2)
        yield "half the sequence length", f"--seq-len {space.seq_len // 2}", _with(case, space=half)
    for factor in (2, 4, 8):
        yield f"{factor} times the GPUs", f"--gpus {factor * space.gpus}", more_gpus(case, factor * space.gpus)


def more_gpus(case: Case, gpus: int, batch: int | None = None) -> Case:
    """The same job on another number of GPUs of the same kind and links; all axes open."""
    space, old = case.space, case.cluster
    inner = old.links[0].bandwidth if old.links[0].domain > 1 else None
    outer = old.links[-1].bandwidth if len(old.links) > 1 else None
    new = cluster(old.gpu, gpus, None, inner, outer)
    wider = space_for(
        space.model, case.training, gpus, batch or max(space.global_batch, gpus), space.seq_len, stage_layers=space.stage_layers,
        lengths=space.lengths, base=space.base,
    )  # fmt: skip
    return msgspec.structs.replace(case, space=wider, cluster=new)


def _with(case: Case, **changes: Any) -> Case:
    return msgspec.structs.replace(case, **changes)


def what_would_fit(cases: Sequence[Case], margin: float, objective: Objective, most: int = 6) -> list[Change]:
    """The changes that make a layout fit, each with the best one; those that cannot be modelled are left out."""
    found: list[Change] = []
    for what, flags, case in variants(cases[-1]):
        try:
            best = plan([case], objective=objective, margin=margin, top=1).layouts[0]
        except NothingFits:
            continue
        except Error:
            continue
        found.append(Change(what, flags, best))
        if len(found) == most or "GPUs" in what:
            break
    return found


def faster(case: Case) -> Iterator[tuple[str, str, Case]]:
    """Changes of a job that may make it faster."""
    training, space, old = case.training, case.space, case.cluster
    for index, (name, flag) in enumerate(
        (("link inside a node", "--link-bandwidth"), ("network adapter", "--nic-bandwidth"))
    ):
        if index < len(old.links) and old.links[index].domain > 1:
            doubled = msgspec.structs.replace(old.links[index], bandwidth=2 * old.links[index].bandwidth)
            links = tuple(doubled if place == index else link for place, link in enumerate(old.links))
            flags = f"{flag} {doubled.bandwidth / 1e9:g}GB/s"
            yield f"twice the {name}", flags, _with(case, cluster=msgspec.structs.replace(old, links=links))
    overlapped = msgspec.structs.replace(training, overlap=Overlap.parse("all"))
    yield "all communication beside compute", "--overlap all", _with(case, training=overlapped)
    if training.framework.name == "megatron" and training.precision.products is None and training.lora is None:
        try:
            low = default_training("megatron", "fp8", training.optimizer.name, training.kernels.attention)
            old.gpu.peak("fp8")
            yield "8-bit matrix products", "--precision fp8", _with(case, training=low)
        except Error:
            pass
    batch = msgspec.structs.replace(
        space,
        global_batch=2 * space.global_batch,
        micro_batch=tuple(dict.fromkeys((*space.micro_batch, 2 * space.global_batch))),
    )
    yield "twice the global batch, by the token", f"--global-batch {2 * space.global_batch}", _with(case, space=batch)
    yield "twice the GPUs", f"--gpus {2 * space.gpus}", more_gpus(case, 2 * space.gpus)


def what_next(case: Case, best: Estimate, margin: float, objective: Objective) -> list[Change]:
    """What each change would bring, the one with the most tokens a second first; every row is planned anew."""
    assert best.time is not None
    found = []
    for what, flags, changed in (*variants(case), *faster(case)):
        if "times the GPUs" in what or "half the sequence" in what or "adapters" in what:
            continue
        try:
            other = plan([changed], objective=objective, margin=margin, top=1).layouts[0]
        except Error:
            continue
        assert other.time is not None
        # What the old step would take for as many tokens on as many GPUs as it has.
        found.append(Change(what, flags, other, best.time.step * other.time.tokens / best.time.tokens))
    return sorted(found, key=lambda change: -change.before / change.best.time.step)  # type: ignore[operator,union-attr]
