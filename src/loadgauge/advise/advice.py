"""What to change when a run does not fit. Every suggestion is a command line that was really estimated."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import Any

import msgspec

from loadgauge.errors import Error
from loadgauge.estimate.result import Estimate
from loadgauge.resolve.reproduce import completer
from loadgauge.resolve.rescale import changed
from loadgauge.resolve.resolve import framework_of, resolve_job
from loadgauge.resolve.setup import Setup
from loadgauge.spec.frameworks import DEFAULT_SPLIT
from loadgauge.spec.job import Job

MOST_GPUS = 4096
MOST_SHOWN = 6
ENOUGH = 3
NODE = 8
"""GPUs that a fast link joins, where the GPU's sources do not say."""


class Change(msgspec.Struct, frozen=True):
    """Flags to add, what they give, and the whole job with them."""

    flags: str
    note: str
    result: Estimate
    job: Job

    @property
    def command(self) -> str:
        """The complete command line of the changed run."""
        return completer(self.job)(self.result).command()


def advice(given: Setup) -> list[Change]:
    """Changes that make a run fit, the mildest first; where none does, the closest ones.

    First one change at a time, then two; then the mildest combination, more GPUs, adapters instead of full training.
    """
    changes = list(_single(given))
    single = [found for change, note in changes if (found := _try(given, change, note)) is not None]
    fitting = [change for change in single if change.result.memory.fits]
    if len(fitting) < ENOUGH:
        fitting += _pairs(given, changes, {change.flags for change in fitting})
    if not fitting:
        fitting += [found for found in (_together(given), _more_gpus(given), _adapters(given)) if found is not None]
    if fitting:
        return fitting[:MOST_SHOWN]
    total = given.estimate().memory.total
    better = [change for change in single if change.result.memory.total < total]
    return sorted(better, key=lambda change: change.result.memory.total)[:ENOUGH]


def whole(given: Setup, change: dict[str, Any]) -> dict[str, Any]:
    """A change with what must be said so that nothing else changes.

    Where another framework would be the default, it is named: the one that the change needs, else the one of the run. A
    measured run is described without the change.
    """
    job, found = given.job, dict(change)
    if job.framework is None and "framework" not in change:
        was, new = (framework_of(msgspec.structs.replace(job, **some)) for some in ({}, change))
        if was != new:
            found["framework"] = DEFAULT_SPLIT
    if job.measured is not None:
        found["measured"] = changed(job, found)
    return found


def _try(given: Setup, change: dict[str, Any], note: str = "") -> Change | None:
    """The change estimated, or None where it cannot be."""
    change = whole(given, change)
    job = msgspec.structs.replace(given.job, **change)
    try:
        result = resolve_job(job, given.model).estimate()
    except Error:
        return None
    return Change(_flags(change), note, result, job)


def _flags(change: dict[str, Any]) -> str:
    """A change as flags to add to a command line."""
    return Job(model="", **change).flags()


def _pairs(given: Setup, changes: list[tuple[dict[str, Any], str]], fitting: set[str]) -> list[Change]:
    """Two changes together, where neither does it alone, the mildest first; a few are enough."""
    found: list[Change] = []
    alone = [(change, note) for change, note in changes if _flags(whole(given, change)) not in fitting]
    ranked = sorted(combinations(range(len(alone)), 2), key=lambda pair: (sum(pair), pair))
    for first, second in ranked:
        (change, note), (other, further) = alone[first], alone[second]
        if change.keys() & other.keys():
            continue
        both = _try(given, change | other, f"{note}; {further}")
        if both is not None and both.result.memory.fits:
            found.append(both)
        if len(found) + len(fitting) >= ENOUGH:
            break
    return found


def _single(given: Setup) -> Iterator[tuple[dict[str, Any], str]]:
    """One change at a time, the mildest first."""
    layout, training = given.layout, given.training
    if given.model.head.kind == "lm" and training.kernels.loss != "chunked":
        yield {"loss": "chunked"}, "the loss in chunks"
    for stage in range(layout.zero + 1, 4):
        if layout.zero_ranks > 1:
            yield {"zero": stage}, "shards more of the model states"
    if layout.micro_batch > 1:
        yield {"micro_batch": 1}, "more, smaller micro-batches"
    if training.kernels.attention == "eager":
        yield {"attention": "flash"}, "never keeps the scores"
        if layout.recompute.mode == "none":
            yield {"recompute": "selective"}, "attention runs again in backward"
    if layout.recompute.mode in ("none", "selective"):
        yield {"recompute": "full"}, "layers run again in backward"
    if layout.tp > 1 and not layout.sequence_parallel:
        yield {"sequence_parallel": True}, "shares norms and dropouts too"
    for factor in (2, 4, 8):
        if layout.dp % factor == 0 and layout.tp * factor <= _node(given):
            yield {"tp": layout.tp * factor}, "splits every layer"
    if layout.dp % 2 == 0 and layout.stage_layers is None and layout.vpp == 1:
        yield {"pp": layout.pp * 2}, "fewer layers on each GPU"
    if training.optimizer.name == "adamw":
        yield {"optimizer": "adamw-8bit"}, "8-bit optimizer states"
    if training.offload == "none":
        yield {"offload": "optimizer"}, "optimizer states in host memory; slower"


def _node(given: Setup) -> int:
    """GPUs joined by a fast link, over which tensor parallelism pays."""
    domain = None if given.gpu is None else given.gpu.interconnect.domain
    return NODE if domain is None else min(NODE, int(domain.value))


def _lean(given: Setup) -> dict[str, Any]:
    """Everything mild at once."""
    change: dict[str, Any] = {}
    if given.model.head.kind == "lm":
        change["loss"] = "chunked"
    if given.layout.micro_batch > 1:
        change["micro_batch"] = 1
    if given.layout.recompute.mode != "full":
        change["recompute"] = "full"
    if given.training.kernels.attention == "eager":
        change["attention"] = "flash"
    return change


def _together(given: Setup) -> Change | None:
    """The mildest combination that fits on the same GPUs."""
    lean, layout = _lean(given), given.layout
    tried: list[dict[str, Any]] = [lean]
    if layout.zero_ranks > 1:
        tried += [{"zero": 1} | lean, {"zero": 3} | lean]
    factors = [factor for factor in (2, 4, 8, 16) if layout.dp % factor == 0 and layout.tp * factor <= _node(given)]
    tried += [{"tp": layout.tp * factor, "sequence_parallel": True, **lean} for factor in factors]
    tried += [{"tp": layout.tp * factor, "sequence_parallel": True, "zero": 1, **lean} for factor in factors]
    tried += [{"offload": "optimizer", **lean}]
    if layout.zero_ranks > 1:
        tried += [{"zero": 3, "offload": "all", **lean}]
    return _first(given, tried, "together, on the same GPUs")


def _more_gpus(given: Setup) -> Change | None:
    """The fewest GPUs, doubling, on which ZeRO 3 and everything mild make it fit."""
    gpus, counts = given.layout.gpus, []
    while gpus * 2 <= MOST_GPUS:
        gpus *= 2
        counts.append(gpus)
    batch = {} if given.job.global_batch is None else {"global_batch": given.job.global_batch}
    lean = _lean(given)
    for count in counts:
        for change in ({"gpus": count, "zero": 3}, {"gpus": count, "zero": 3, **lean}):
            found = _try(given, {**change, **batch}, f"{count} GPUs")
            if found is None and batch:
                found = _try(given, change | {"global_batch": _grown(given, count)}, f"{count} GPUs, a larger batch")
            if found is not None and found.result.memory.fits:
                return found
    return None


def _grown(given: Setup, gpus: int) -> int:
    """The global batch with as many micro-batches a rank as before."""
    before: int = given.layout.global_batch
    return before * gpus // int(given.layout.gpus)


def _adapters(given: Setup) -> Change | None:
    """QLoRA, with as little else as it takes."""
    if given.training.lora is not None and given.training.lora.quantised:
        return None
    changes: list[dict[str, Any]] = [
        {"qlora": True},
        {"qlora": True, "loss": "chunked"},
        {"qlora": True} | _lean(given),
    ]
    return _first(given, changes, "trains adapters on a 4-bit base only")


def _first(given: Setup, changes: list[dict[str, Any]], note: str) -> Change | None:
    for change in changes:
        found = _try(given, change, note)
        if found is not None and found.result.memory.fits:
            return found
    return None
