"""What software adds to a step, from published runs: a mixed model with the rates of all kernels and links fixed.

log(measured / time of kernels and transfers) of a run is the sum of effects: one that all runs share, one of models whose experts
a host drives, one of products in fewer than 16 bits, one of its source, one of its configuration, and noise. Each is normal with
the spread in `SPREADS`, so that a kind with few sources stays near what all share, and a source's own bias (its machine's power,
its version of the software) is not taken for a kind's. Spreads are stated, not fitted: left free, the fit gives to a GPU or a
class of frameworks what belongs to its only source, and fails on sources that it has not seen.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy

from loadgauge.core.base.errors import Error
from loadgauge.core.definitions.hardware.calibration import Efficiencies, efficiencies, transferred
from loadgauge.core.definitions.hardware.hardware import gpu as card_named
from loadgauge.core.definitions.training.memory_range import COVERAGE, Stack
from loadgauge.core.definitions.training.software import Factor, Software, factor, hosted, software
from loadgauge.evidence.validate.runs import Run, published
from loadgauge.evidence.validate.setups import setup_of
from loadgauge.evidence.validate.summary import quantile
from loadgauge.evidence.validate.validate import validate

QUALITIES = ("A", "B")
"""Of the rows that are used: of the others too little of the configuration is known."""
SAME = {"MMFU": "KOR", "MJAN": "SC21", "MTXT": "SC21", "NEMOLS": "NEMO"}
"""Sources that tell of the runs or the machine of another one: left out together."""
MEAN, MEAN_SPREAD = 0.1, 0.3
SPREADS: dict[tuple[str, ...], float] = {
    ("hosted",): 0.03, ("low",): 0.03, ("source",): 0.12, ("configuration",): 0.10,
}  # fmt: skip
"""Standard deviation of each effect, as a logarithm."""
NOISE = 0.06
FREEDOM = 4
"""Degrees of freedom of Student's distribution, by which a row far from all others counts less."""
TENTH = 1.2816
"""Standard deviations beyond which a tenth of a normal distribution lies."""


class Timed(NamedTuple):
    """A run with a measured and a predicted time: `value` is log(measured / predicted without the software's factor)."""

    id: str
    source: str
    configuration: str
    gpu: str
    tables: bool
    stack: Stack
    experts: bool
    hosted: bool
    low: bool
    value: float
    machine: str
    """The source, model and hardware."""
    widened: tuple[float, float]
    """By how much what the row does not state widens its range, as logarithms."""

    @property
    def family(self) -> str:
        """The source, or the one whose runs it tells of too."""
        return SAME.get(self.source, self.source)

    def level(self, names: tuple[str, ...]) -> str:
        """Which level of an effect the run has."""
        values = {"stack": self.stack, "hosted": self.hosted, "low": self.low, "source": self.family,
                  "configuration": self.configuration}  # fmt: skip
        return "|".join(str(values[name]) for name in names)


def timed(runs: Sequence[Run]) -> list[Timed]:
    """Return the runs of quality A and B whose time is measured and predicted."""
    by_id = {run.id: run for run in runs}
    found = []
    for record in validate([run for run in runs if run.quality in QUALITIES], ("time",)):
        if record.error is None:
            continue
        assert record.measured
        assert record.predicted
        assert record.low
        assert record.high
        try:
            setup = setup_of(by_id[record.id])
        except Error:
            continue
        training = setup.training
        experts, low = setup.model.has_experts, training.precision.products is not None
        graphs = training.overlap.launch
        known = factor(experts=experts, low_precision=low, graphs=graphs)
        raw = record.predicted / known.factor
        found.append(
            Timed(
                record.id, record.source, "|".join(map(str, record.configuration)), record.gpu, True, training.framework.stack,
                experts, hosted(experts=experts, graphs=graphs), low, math.log(record.measured / raw),
                "|".join(map(str, record.configuration[:3])),
                (math.log(record.low / record.predicted / known.low), math.log(record.high / record.predicted / known.high)),
            )
        )  # fmt: skip
    return found


class Fit:
    """The effects given some runs: a normal distribution, whose mean and variance for other runs are closed forms."""

    def __init__(self, rows: Sequence[Timed]) -> None:
        self.rows = rows
        self.levels = {names: _levels(rows, names) for names in SPREADS}
        shared = _covariance(self.levels, self.levels)
        values = numpy.array([row.value for row in rows]) - MEAN
        weights = numpy.ones(len(rows))
        for _ in range(2):
            whole = shared + numpy.diag(NOISE**2 / weights)
            self.solved = numpy.linalg.solve(whole, values)
            # A row whose noise is far beyond the rest's is believed less.
            noise = values - shared @ self.solved
            weights = numpy.clip((FREEDOM + 1) / (FREEDOM + (noise / NOISE) ** 2), 0.02, 1.0)
        self.inverse = numpy.linalg.inv(shared + numpy.diag(NOISE**2 / weights))
        self.solved = self.inverse @ values

    def predict(self, rows: Sequence[Timed]) -> tuple[Any, Any]:
        """Return the mean and the standard deviation of `value` of other runs, each of a source of its own if it is new."""
        shared = _covariance({names: _levels(rows, names) for names in SPREADS}, self.levels)
        own = sum(spread**2 for spread in SPREADS.values()) + MEAN_SPREAD**2 + NOISE**2
        known = numpy.einsum("ij,jk,ik->i", shared, self.inverse, shared)
        return MEAN + shared @ self.solved, numpy.sqrt(numpy.maximum(own - known, 1e-6))


def _levels(rows: Sequence[Timed], names: tuple[str, ...]) -> Any:
    return numpy.array([row.level(names) for row in rows])


def _covariance(first: dict[tuple[str, ...], Any], second: dict[tuple[str, ...], Any]) -> Any:
    total: Any = MEAN_SPREAD**2
    for names, spread in SPREADS.items():
        total = total + spread**2 * (first[names][:, None] == second[names][None, :])
    return total


class Left(NamedTuple):
    """A run whose source was left out: log(predicted / measured), and the standard deviation that was stated for it."""

    row: Timed
    error: float
    deviation: float

    def inside(self, level: float) -> bool:
        """Whether the run lies in its range, of `level` standard deviations and what its row does not state."""
        low, high = self.row.widened
        return -level * self.deviation + low <= -self.error <= level * self.deviation + high

    def width(self, level: float) -> float:
        """Half of the range over its prediction."""
        low, high = self.row.widened
        return (math.exp(level * self.deviation + high) - math.exp(-level * self.deviation + low)) / 2


def left_out(rows: Sequence[Timed], by: str = "family") -> list[Left]:
    """Return every run as predicted by a fit to the runs of all other sources (or GPUs)."""
    found: list[Left] = []
    for name in dict.fromkeys(getattr(row, by) for row in rows):
        own = [row for row in rows if getattr(row, by) == name]
        rest = [row for row in rows if getattr(row, by) != name]
        mean, deviation = Fit(rest).predict(own)
        found += [Left(row, float(m) - row.value, float(d)) for row, m, d in zip(own, mean, deviation, strict=True)]
    return found


def _votes(rows: Sequence[Timed]) -> list[float]:
    count: dict[str, int] = {}
    for row in rows:
        count[row.configuration] = count.get(row.configuration, 0) + 1
    return [1 / count[row.configuration] for row in rows]


def after_a_run(rows: Sequence[Timed]) -> list[tuple[float, float]]:
    """Return log(predicted / measured) of every run rescaled by another of its source, model and machine, with its vote.

    Each other row is taken in turn for the run of one's own.
    """
    groups: dict[str, list[Timed]] = {}
    for row in rows:
        groups.setdefault(row.machine, []).append(row)
    found: list[tuple[float, float]] = []
    for own in groups.values():
        for row, vote in zip(own, _votes(own), strict=True):
            others = [other for other in own if other is not row]
            found += [(other.value - row.value, vote / len(others)) for other in others]
    return found


def calibrated_level(left: Sequence[Left]) -> float:
    """Return the fewest standard deviations at which sources left out have `COVERAGE` inside, by rows and on average over sources.

    Split conformal prediction over whole sources: what is exchangeable is a source, so each was predicted by all others. By
    rows, those of one configuration share one vote.
    """
    steps = [step / 100 for step in range(20, 400)]
    return next((step for step in steps if min(covered(left, step), by_source(left, step)) >= COVERAGE), steps[-1])


def covered(left: Sequence[Left], level: float) -> float:
    """Return the share of rows inside their range of `level` standard deviations; those of a configuration share a vote."""
    votes = _votes([one.row for one in left])
    return sum(vote for one, vote in zip(left, votes, strict=True) if one.inside(level)) / sum(votes)


def by_source(left: Sequence[Left], level: float) -> float:
    """Return the share of the rows of a source that lie inside their range, as the mean over sources."""
    shares: dict[str, list[bool]] = {}
    for one in left:
        shares.setdefault(one.row.family, []).append(one.inside(level))
    return sum(sum(inside) / len(inside) for inside in shares.values()) / len(shares)


def shifts(runs: Sequence[Run]) -> float:
    """Return the spread of log(time with a GPU's rates by rule / with its own), each measured GPU having one vote.

    By rule are the rates of a GPU that nobody measured; where it is a chip's only measured one, the rule knows its chip.
    """
    chosen = [run for run in runs if run.quality in QUALITIES]
    own = {record.id: record for record in validate(chosen, ("time",)) if record.predicted}
    ruled = validate(chosen, ("time",), efficiencies=by_rule)
    by_gpu: dict[str, list[float]] = {}
    for record in ruled:
        if record.predicted and record.id in own and efficiencies(record.gpu).basis == "measured":
            by_gpu.setdefault(record.gpu, []).append(math.log(record.predicted / (own[record.id].predicted or 1)))
    squares = [float(numpy.mean(numpy.square(values))) for values in by_gpu.values()]
    return math.sqrt(sum(squares) / len(squares))


def by_rule(gpu: str) -> Efficiencies:
    """Return the rates of a GPU as if nobody had measured it."""
    return msgspec.convert(transferred(card_named(gpu)) | {"gpu": gpu}, Efficiencies)


def made(runs: Sequence[Run], date: str, say: Callable[[str], object]) -> Software:
    """Return what `data/software.toml` is to hold, given the factors that it holds now."""
    rows = timed(runs)
    fit, left = Fit(rows), left_out(rows)
    level = calibrated_level(left)
    factors = []
    for experts in (False, True):
        for low in (False, True):
            new = rows[0]._replace(source="?", configuration="?", experts=experts, hosted=experts, low=low)
            mean, deviation = (float(values[0]) for values in fit.predict([new]))
            alike = [row for row in rows if (row.hosted, row.low) == (experts, low)]
            factors.append(
                Factor(
                    experts=experts, low_precision=low, factor=round(math.exp(mean), 3),
                    low=round(math.exp(-level * deviation), 3), high=round(math.exp(level * deviation), 3), runs=len(alike),
                    sources=tuple(sorted({row.source for row in alike})),
                )
            )  # fmt: skip
    deviation = math.log(factors[0].high) / level
    own = sorted((abs(error), vote) for error, vote in after_a_run(rows))
    half = quantile([error for error, _ in own], [vote for _, vote in own], COVERAGE)
    assert half is not None
    errors = [abs(math.expm1(one.error)) for one in left]
    votes = _votes([one.row for one in left])

    say(
        f"{len(rows)} rows, sources left out: median {numpy.median(errors):.1%}, p90 {numpy.quantile(errors, 0.9):.1%};"
        f" level {level:.2f} holds {covered(left, level):.0%} of rows, {by_source(left, level):.0%} over sources,"
        f" half-width {numpy.median([one.width(level) for one in left]):.0%}"
    )
    return Software(
        date=date, transferred=round(math.hypot(1.0, shifts(runs) / deviation), 2), low_measured=round(math.exp(-half), 3),
        high_measured=round(math.exp(half), 3), covered=round(covered(left, level), 2), factors=tuple(factors),
        median=round(quantile(errors, votes, 0.5) or 0.0, 3), most=round(quantile(errors, votes, 0.9) or 0.0, 3),
    )  # fmt: skip


def text(known: Software) -> str:
    """Return the content of `data/software.toml`."""
    lines = [
        "# What software adds to the time of kernels, and how far measured step times lie from the prediction; `make range` writes",
        "# this file from the published runs of data/runs, with the rates of kernels (data/calibration) fixed.",
        f'date = "{known.date}"',
        *(
            f"{name} = {getattr(known, name)}"
            for name in ("transferred", "low_measured", "high_measured", "median", "most", "covered")
        ),
    ]
    for one in known.factors:
        names = ", ".join(f'"{source}"' for source in one.sources)
        lines += [
            "",
            "[[factors]]",
            f"experts = {str(one.experts).lower()}",
            f"low_precision = {str(one.low_precision).lower()}",
        ]
        lines += [f"{name} = {getattr(one, name)}" for name in ("factor", "low", "high", "runs")]
        lines.append(f"sources = [{names}]")
    return "\n".join([*lines, ""])


ROUNDS = 3
"""The factor is of compute alone, not of the whole step, so it is found again with the last one in place."""


def main(say: Callable[[str], object] = print) -> None:
    """Writes the file."""
    place = Path(str(resources.files("loadgauge"))) / "data" / "software.toml"
    date = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    for _ in range(ROUNDS):
        place.write_text(text(made(published().runs, date, say)), encoding="utf-8")
        software.cache_clear()
        factor.cache_clear()


if __name__ == "__main__":
    main()
