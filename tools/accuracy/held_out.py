"""Cross-validation: each source predicted with efficiencies that were fitted to all other sources of its GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from accuracy.fit import CHIPS, Sample, fit_pooled
from loadgauge.errors import Error
from loadgauge.spec.calibration import Rates, rates
from loadgauge.validate.measured import step_seconds
from loadgauge.validate.runs import Run
from loadgauge.validate.setups import setup_of
from loadgauge.validate.validate import Record, machine, validate

Progress = Callable[[str], object]
Refit = Callable[[Mapping[str, Sequence[Sample]], str], Rates | None]


def samples(runs: Iterable[Run]) -> dict[str, list[tuple[Run, Sample]]]:
    """The measured steps of the runs that can be expressed, by GPU; each configuration weighs 1 in all."""
    by_gpu: dict[str, list[tuple[Run, Sample]]] = {}
    for run in runs:
        if run.job is None or run.untimed or not run.measured.timed:
            continue
        try:
            setup = setup_of(run)
            place, seconds = machine(setup), step_seconds(run, setup)
        except Error:
            continue
        sample = Sample(
            id=run.id, model=setup.model, layout=setup.layout, training=setup.training, cluster=place, seconds=seconds
        )
        by_gpu.setdefault(place.gpu.id, []).append((run, sample))
    return {gpu: _weighted(pairs) for gpu, pairs in by_gpu.items()}


def _weighted(pairs: Sequence[tuple[Run, Sample]]) -> list[tuple[Run, Sample]]:
    count: dict[object, int] = {}
    for run, _ in pairs:
        count[run.configuration] = count.get(run.configuration, 0) + 1
    return [(run, msgspec.structs.replace(sample, weight=1 / count[run.configuration])) for run, sample in pairs]


def held_out(runs: Sequence[Run], refit: Refit = fit_pooled, say: Progress | None = None) -> tuple[Record, ...]:
    """The records of time where each source is predicted by the fit to all others; `refit` makes it, a chip at a time.

    A source that is the only one of its chip is predicted with the stated default. Nothing of a source is then an input,
    neither its rows nor those of the same runs under another name (KOR and MMFU).
    """
    same = {"MMFU": "KOR", "MJAN": "SC21"}
    records: list[Record] = []
    by_gpu = samples(runs)
    for chip, gpus in CHIPS.items():
        pairs = {gpu: by_gpu[gpu] for gpu in gpus if gpu in by_gpu}
        for source in dict.fromkeys(run.series for members in pairs.values() for run, _ in members):
            related = {source, *(name for name, of in same.items() if of == source), same.get(source, source)}
            rest = {
                gpu: [sample for run, sample in members if run.series not in related] for gpu, members in pairs.items()
            }
            if say is not None:
                say(f"{chip} without {source}: {sum(map(len, rest.values()))} rows")
            fitted = refit(rest, chip) or rates("")
            own = [run for members in pairs.values() for run, _ in members if run.series == source]
            records += validate(own, ("time",), rates=lambda _, fitted=fitted: fitted)  # type: ignore[misc]
    return tuple(records)
