"""Predictions compared with measured runs: a record for each number that was measured."""

from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import msgspec

from loadgauge.core.base import GIB, Error, NotModelled
from loadgauge.core.definitions.hardware.calibration import Efficiencies
from loadgauge.core.definitions.hardware.hardware import Cluster
from loadgauge.core.estimate.estimate import estimate
from loadgauge.core.estimate.result import Estimate
from loadgauge.core.resolve.setup import Setup
from loadgauge.evidence.validate.counters import reading
from loadgauge.evidence.validate.measured import step_seconds
from loadgauge.evidence.validate.runs import Run, Runs, setup_of, variant_setups

Quantity = Literal["time", "memory"]


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One measured number and its prediction: step time [s] or peak memory [bytes].

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
        """Return the row of `validate --json`."""
        fields = msgspec.structs.asdict(self) | {"assumed": dict(line.partition(": ")[::2] for line in self.assumed)}
        del fields["configuration"]
        return fields


Others = Sequence[tuple[str, Setup]]
"""The setups of a run's variants, each with its open question (knob)."""
EfficienciesOf = Callable[[str], Efficiencies]
"""The efficiencies of a GPU by its id, in place of those that come with loadgauge."""


def validate(
    runs: Runs | Sequence[Run],
    quantities: Sequence[Quantity] = ("time", "memory"),
    efficiencies: EfficienciesOf | None = None,
    progress: Callable[[], object] | None = None,
    *,
    calibrated: bool = True,
) -> tuple[Record, ...]:
    """Predict every measured number of the runs: a `Record` each, in their order; rows that could not be read come last.

    `progress` is called after each run. A run that cannot be predicted gives a record with a `reason`; nothing is raised.
    calibrated: whether ranges of memory include the spread of published runs

    >>> from loadgauge.evidence.validate.runs import parse
    >>> text = "id,model,gpu,gpus,seq_len,zero,framework,peak_memory_gib,memory_kind"
    >>> row = "M-X-1,llama-3.1-8b,h100-sxm5-80gb,8,8192,3,torchtitan,60,allocated"
    >>> [(record.quantity, record.reason) for record in validate(parse(f"{text}\\n{row}\\n"))]
    [('memory', '')]
    """
    rows = runs.runs if isinstance(runs, Runs) else runs
    records: list[Record] = []
    for run in rows:
        records += _records(run, quantities, efficiencies, calibrated)
        if progress is not None:
            progress()
    if isinstance(runs, Runs):
        records += (
            Record(id=bad.id, quantity=quantities[0], reason=f"line {bad.line}: {bad.reason}") for bad in runs.rejected
        )
    return tuple(records)


def _records(
    run: Run, quantities: Sequence[Quantity], efficiencies: EfficienciesOf | None, calibrated: bool
) -> Iterator[Record]:
    timed = "time" in quantities and run.measured.timed
    weighed = "memory" in quantities and run.measured.peak_memory_gib is not None
    if not timed and not weighed:
        return
    setup: Setup | None = None
    others: Others = ()
    reason = run.reason
    if run.job is not None:
        try:
            setup, others = setup_of(run), tuple(variant_setups(run))
        except Error as error:
            reason = str(error)
    if timed:
        yield _checked(run, "time", setup, others, reason or run.untimed, efficiencies, calibrated)
    if weighed:
        yield _checked(run, "memory", setup, others, reason or run.miscounted, efficiencies, calibrated)


def _checked(
    run: Run,
    quantity: Quantity,
    setup: Setup | None,
    others: Others,
    reason: str,
    efficiencies: EfficienciesOf | None,
    calibrated: bool,
) -> Record:
    assumed = run.assumed
    if assumed is None:
        assumed = () if setup is None else tuple(f"{name}: {value}" for name, value in setup.assumed.items())
    peak = run.measured.peak_memory_gib
    record = Record(
        id=run.id,
        quantity=quantity,
        source=run.series,
        quality=run.quality,
        configuration=run.configuration,
        gpu="" if setup is None or setup.gpu is None else setup.gpu.id,
        assumed=assumed,
        measured=peak * GIB if quantity == "memory" and peak else run.measured.step_time_s,
    )
    if setup is None or reason:
        return msgspec.structs.replace(record, reason=reason)
    try:
        if quantity == "memory":
            return _memory(run, setup, others, record, calibrated)
        return _time(run, setup, others, record, efficiencies)
    except Error as error:
        return msgspec.structs.replace(record, reason=str(error))


def _memory(run: Run, setup: Setup, others: Others, record: Record, calibrated: bool) -> Record:
    shown = reading(run.counter, _estimate(setup), calibrated=calibrated)
    low, high = shown.low, shown.high
    # Each open question alone, and all of them together in the direction that each one pulls.
    for values in _by_knob(others, lambda other: reading(run.counter, _estimate(other)).value - shown.value):
        low += min(0.0, *values)
        high += max(0.0, *values)
    assert record.measured is not None
    return _with(record, record.measured, shown.value, max(low, 0.0), high)


def _time(run: Run, setup: Setup, others: Others, record: Record, efficiencies: EfficienciesOf | None) -> Record:
    measured = step_seconds(run, setup)
    machines = machine(setup)
    fitted = None if efficiencies is None else efficiencies(machines.gpu.id)
    time = _estimate(setup, machines, fitted).time
    if time is None:
        raise NotModelled("no time was predicted")
    predicted, low, high = time.step, time.low, time.high

    def factor(other: Setup) -> float:
        # What a variant takes is compared with what was measured if it is the variant.
        time = _estimate(other, machine(other), fitted).timing
        return time.step / predicted * (measured / step_seconds(run, other))

    for values in _by_knob(others, factor):
        low *= min(1.0, *values)
        high *= max(1.0, *values)
    return _with(record, measured, predicted, low, high)


def _with(record: Record, measured: float, predicted: float, low: float, high: float) -> Record:
    return msgspec.structs.replace(
        record, measured=measured, predicted=predicted, low=low, high=high, error=predicted / measured - 1
    )


def _by_knob(others: Others, value: Callable[[Setup], float]) -> Iterator[list[float]]:
    for knob in dict.fromkeys(knob for knob, _ in others):
        values: list[float] = []
        for other, setup in others:
            if other == knob:
                try:
                    values.append(value(setup))
                except Error:
                    continue  # a value that the estimate refuses is not plausible
        if values:
            yield values


def machine(setup: Setup) -> Cluster:
    """Return the cluster that a run used. Raises `NotModelled` where its GPU or one of its links is not known."""
    if setup.gpu is None:
        raise NotModelled("hardware: not in the catalogue")
    if setup.cluster is None:
        raise NotModelled(setup.untimed)
    return setup.cluster


def _estimate(setup: Setup, machines: Cluster | None = None, efficiencies: Efficiencies | None = None) -> Estimate:
    return estimate(setup.model, setup.layout, setup.training, setup.gpu, machines, efficiencies=efficiencies)
