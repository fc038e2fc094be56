"""Predicted against published runs: a record for each number that a row measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import msgspec

from loadgauge.errors import Error
from loadgauge.estimate.estimate import estimate
from loadgauge.estimate.result import Estimate
from loadgauge.spec.calibration import Rates
from loadgauge.spec.cluster import cluster
from loadgauge.spec.hardware import Cluster
from loadgauge.units import GIB
from loadgauge.validate.counters import counter, reading
from loadgauge.validate.expression import Expression, Job, express
from loadgauge.validate.measured import has_time, step_seconds
from loadgauge.validate.models import Inexpressible
from loadgauge.validate.runs import Run, Runs

Quantity = Literal["time", "memory"]


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One measured number and what is predicted for it: seconds of a step, or bytes.

    `low` and `high` bound the prediction: over every plausible value of what the row does not state, and over the range
    of the estimate itself. `error` is predicted / measured - 1. Without a prediction there is a `reason`.
    """

    id: str
    quantity: Quantity
    measured: float | None = None
    predicted: float | None = None
    low: float | None = None
    high: float | None = None
    error: float | None = None
    reason: str = ""
    source: str = ""
    quality: str = ""
    gpu: str = ""
    configuration: tuple[object, ...] = ()
    assumed: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, object]:
        """The row of `validate --json`."""
        names = ("id", "quantity", "measured", "predicted", "low", "high", "error", "reason")
        return {
            **{name: getattr(self, name) for name in names},
            "source": self.source,
            "quality": self.quality,
            "gpu": self.gpu,
            "assumed": list(self.assumed),
        }


NIC = 50e9
"""Byte/s of one GPU to other nodes, where no source states them: 400 Gbit/s, the usual adapter since 2022."""
RatesOf = Callable[[str], Rates]
"""The calibration of a GPU, by its id; where it is given it stands in for the one that comes with loadgauge."""


def validate(
    runs: Runs | Sequence[Run],
    quantities: Sequence[Quantity] = ("time", "memory"),
    rates: RatesOf | None = None,
    progress: Callable[[], object] | None = None,
) -> tuple[Record, ...]:
    """A record for each number that the runs measured, in their order; rows that could not be read come last.

    `progress` is called after each run.

    >>> from loadgauge.validate.runs import parse
    >>> text = "id,model,hardware,gpus,dp,seq_len,micro_batch,global_batch,sharding,framework,peak_memory_gib,memory_kind"
    >>> row = "M-X-1,llama-3.1-8b,H100-80GB-SXM,8,8,8192,1,8,fsdp2,torchtitan,60,allocated"
    >>> [(record.quantity, record.reason) for record in validate(parse(f"{text}\\n{row}\\n"))]
    [('memory', '')]
    """
    rows = runs.runs if isinstance(runs, Runs) else runs
    records: list[Record] = []
    for run in rows:
        records += _records(run, quantities, rates)
        if progress is not None:
            progress()
    if isinstance(runs, Runs):
        for bad in runs.rejected:
            records.append(Record(id=bad.id, quantity=quantities[0], reason=f"line {bad.line}: {bad.reason}"))
    return tuple(records)


def _records(run: Run, quantities: Sequence[Quantity], rates: RatesOf | None) -> Iterator[Record]:
    timed = "time" in quantities and has_time(run)
    weighed = "memory" in quantities and run.peak_memory_gib is not None
    if not timed and not weighed:
        return
    expression = express(run)
    if timed:
        yield _checked(run, "time", expression, rates)
    if weighed:
        yield _checked(run, "memory", expression, rates)


def _checked(run: Run, quantity: Quantity, expression: Expression, rates: RatesOf | None) -> Record:
    job = expression.job
    about = Record(
        id=run.id,
        quantity=quantity,
        source=run.series,
        quality=run.quality,
        configuration=run.configuration,
        gpu="" if job is None or job.gpu is None else job.gpu.id,
        assumed=expression.assumed,
        measured=run.peak_memory_gib * GIB if quantity == "memory" and run.peak_memory_gib else run.step_time_s,
    )
    if job is None:
        return msgspec.structs.replace(about, reason=expression.reason)
    try:
        if quantity == "memory":
            return _memory(run, expression, job, about)
        if expression.untimed:
            raise Inexpressible(expression.untimed)
        return _time(run, expression, job, about, rates)
    except (Inexpressible, Error) as error:
        return msgspec.structs.replace(about, reason=str(error))


def _memory(run: Run, expression: Expression, job: Job, about: Record) -> Record:
    kind = counter(run)
    low, predicted, high = reading(kind, _estimate(job, None, None))
    # Each open knob alone, and all of them together in the direction that each one pulls.
    for values in _by_knob(expression, lambda variant: reading(kind, _estimate(variant, None, None))[1] - predicted):
        low += min(0.0, *values)
        high += max(0.0, *values)
    assert run.peak_memory_gib is not None
    return _with(about, run.peak_memory_gib * GIB, predicted, max(low, 0.0), high)


def _time(run: Run, expression: Expression, job: Job, about: Record, rates: RatesOf | None) -> Record:
    measured = step_seconds(run, job)
    about = msgspec.structs.replace(about, measured=measured)
    place = machine(job)
    known = None if rates is None else rates(place.gpu.id)
    found = _estimate(job, place, known)
    if found.time is None:
        raise Inexpressible(found.untimed or "no time was predicted")
    predicted, low, high = found.time.step, found.time.low, found.time.high

    def factor(variant: Job) -> float:
        # What a variant takes is held against what was measured if it is the variant.
        time = _estimate(variant, machine(variant), known).time
        assert time is not None
        return time.step / predicted * (measured / step_seconds(run, variant))

    for values in _by_knob(expression, factor):
        low *= min(1.0, *values)
        high *= max(1.0, *values)
    return _with(about, measured, predicted, low, high)


def _with(about: Record, measured: float, predicted: float, low: float, high: float) -> Record:
    return msgspec.structs.replace(
        about, measured=measured, predicted=predicted, low=low, high=high, error=predicted / measured - 1
    )


def _by_knob(expression: Expression, value: Callable[[Job], float]) -> Iterator[list[float]]:
    knobs = dict.fromkeys(variant.knob for variant in expression.variants)
    for knob in knobs:
        found: list[float] = []
        for variant in expression.variants:
            if variant.knob == knob:
                try:
                    found.append(value(variant.job))
                except (Error, Inexpressible):
                    continue  # a value that the estimate refuses is not plausible
        if found:
            yield found


def machine(job: Job) -> Cluster:
    """The cluster that a job runs on; raises `Inexpressible` where the card is not known."""
    if job.gpu is None:
        raise Inexpressible("hardware: not in the catalogue")
    gpus = int(job.layout.gpus)
    per_node = job.gpus_per_node
    if per_node is not None and gpus % per_node and gpus < per_node:
        per_node = gpus
    if job.nic_bandwidth is None and job.gpu.nic.bandwidth is None:
        return cluster(job.gpu, gpus, per_node, nic_bandwidth=NIC)
    return cluster(job.gpu, gpus, per_node, nic_bandwidth=job.nic_bandwidth)


def _estimate(job: Job, place: Cluster | None, rates: Rates | None) -> Estimate:
    return estimate(job.model, job.layout, job.training, job.gpu, place, rates=rates)
