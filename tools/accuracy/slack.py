"""What software adds to a step, and how far a step lies from its prediction: the rates of all kernels and links are fixed.

The factor comes from published tables by a mixed model; the middle and the range of a class of runs come from all sources, reports
of users among them (`published_runs/raw/reported_times.csv`), as each is predicted by the others.

log(measured / time of kernels and transfers) of a run is the sum of effects: one that all runs share, one of models whose experts
a host drives, one of products in fewer than 16 bits, one of its source, one of its configuration, and noise. Each is normal with
the spread in `SPREADS`, so that a kind with few sources stays near what all share, and a source's own bias (its machine's power,
its version of the software) is not taken for a kind's. Spreads are stated, not fitted: left free, the fit gives to a GPU or a
class of frameworks what belongs to its only source, and fails on sources that it has not seen.
"""

from __future__ import annotations

import contextlib
import csv
import datetime
import io
import itertools
import json
import math
import shlex
from collections import Counter
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy

from loadgauge.core.base.errors import Error
from loadgauge.core.command_line.main import run as command_line
from loadgauge.core.definitions.hardware.calibration import Efficiencies, efficiencies, transferred
from loadgauge.core.definitions.hardware.hardware import gpu as card_named
from loadgauge.core.definitions.training.frameworks import FRAMEWORKS
from loadgauge.core.definitions.training.memory_range import COVERAGE, Stack
from loadgauge.core.definitions.training.software import (
    TUNINGS,
    Factor,
    Kind,
    Software,
    factor,
    hosted,
    kind_of,
    software,
)
from loadgauge.evidence.validate.runs import Run, published, setup_of
from loadgauge.evidence.validate.summary import quantile
from loadgauge.evidence.validate.validate import validate

QUALITIES = ("A", "B")
"""Of the rows that are used: of the others too little of the configuration is known."""
SAME = {"MMFU": "KOR", "MJAN": "SC21", "MTXT": "SC21", "NEMOLS": "NEMO"}
"""Sources that tell of the runs or the machine of another one: left out together."""
TUNING = {
    **dict.fromkeys(("DG", "KOR", "MB", "MH100", "MJAN", "MMFU", "MTXT", "NEMO", "NEMOLS", "SC21"), "recipe"),
    **dict.fromkeys(("AXS", "EC", "HB", "MN", "RB", "TH1", "UT"), "first"),
}
"""Who tuned the runs of a source: `recipe`, it is a table of the maker of the chips; `first`, it is an issue, a blog, or a
person's own repository. Of all others neither is known."""
KINDS = ("pretraining", "FSDP", "fine-tuning", "experts", "recipe", "first")
TAILS = tuple(step / 50 for step in range(10))
"""Shares of the runs of a class that may lie beyond an end of its range."""
FEWEST = 4
"""Sources below which a class has the widest range known."""
SURE = 10
"""Sources below which a class has no end nearer than `pretraining`, which has the most: few of them leave 80 % of themselves inside
a range that one side alone is cut off."""
REPORTS = Path(__file__).parents[1] / "published_runs" / "raw" / "reported_times.csv"
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

    report: bool = False
    """Whether a user reported it, rather than a table."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """The classes whose middle and range it is one of: the first is its own where nothing is said of who tuned it."""
        own = "experts" if self.experts else self.stack
        return (own, *([TUNING[self.source]] if self.source in TUNING else []))

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
        kind = kind_of(stack=training.framework.stack, experts=experts)
        raw = record.predicted / known.factor / kind.factor
        found.append(
            Timed(
                record.id, record.source, "|".join(map(str, record.configuration)), record.gpu, True, training.framework.stack,
                experts, hosted(experts=experts, graphs=graphs), low, math.log(record.measured / raw),
                "|".join(map(str, record.configuration[:3])),
                (math.log(record.low / record.predicted / kind.low), math.log(record.high / record.predicted / kind.high)),
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


def reported() -> list[Left]:
    """Return the reports of users, as predicted from their command lines by the figures as they stand."""
    found = []
    for one in csv.DictReader(REPORTS.open(encoding="utf-8")):
        answer = io.StringIO()
        with contextlib.redirect_stdout(answer), contextlib.redirect_stderr(io.StringIO()):
            command_line(["estimate", *shlex.split(one["command"]), "--json"])
        document = json.loads(answer.getvalue() or "{}")
        time = document.get("time") or {}
        if not time.get("step"):
            continue
        stack = FRAMEWORKS[document["training"]["framework"]].stack
        experts = document["model"]["active_params"] != document["model"]["params"]
        kind = kind_of(stack=stack, experts=experts)
        row = Timed(
            one["id"], one["source"], one["id"], document["gpu"], True, stack, experts, experts, False,
            math.log(float(one["step_s"]) / time["step"] * kind.factor), one["source"],
            (math.log(time["low"] / time["step"] / kind.low), math.log(time["high"] / time["step"] / kind.high)), True,
        )  # fmt: skip
        found.append(Left(row, -row.value))
    return found


class Left(NamedTuple):
    """A run whose source was left out: log(predicted / measured), without the middle of its class."""

    row: Timed
    error: float


class Held(NamedTuple):
    """A run beside the prediction and the range that the other sources give: log(predicted / measured), and their ends."""

    row: Timed
    error: float
    low: float
    high: float

    @property
    def inside(self) -> bool:
        """Whether the run lies in its range, which what its row does not state widens."""
        return self.low + self.row.widened[0] <= -self.error <= self.high + self.row.widened[1]

    @property
    def width(self) -> float:
        """Half of the range over its prediction."""
        return (math.exp(self.high + self.row.widened[1]) - math.exp(self.low + self.row.widened[0])) / 2


def left_out(rows: Sequence[Timed], by: str = "family") -> list[Left]:
    """Return every run as predicted by a fit to the runs of all other sources (or GPUs)."""
    found: list[Left] = []
    for name in dict.fromkeys(getattr(row, by) for row in rows):
        own = [row for row in rows if getattr(row, by) == name]
        rest = [row for row in rows if getattr(row, by) != name]
        mean, _ = Fit(rest).predict(own)
        found += [Left(row, float(m) - row.value) for row, m in zip(own, mean, strict=True)]
    return found


class Class(NamedTuple):
    """Runs of one class: logarithms of the middle and of the ends of measured over predicted time, and how many sources."""

    middle: float
    low: float
    high: float
    sources: int


def class_of(left: Sequence[Left], kind: str, tails: tuple[float, float]) -> Class:
    """Return the middle of some runs and the ends beyond which the shares `tails` of them lie, each source having one vote.

    Only who tuned them moves the middle, as far as its sources agree: a stack's would make new sources worse. What a row does not
    state is not spread.
    """
    counts = Counter(one.row.family for one in left)
    votes = [1 / counts[one.row.family] for one in left]

    def at(share: float, values: Sequence[float]) -> float:
        pairs = sorted(zip(values, votes, strict=True))
        return quantile([value for value, _ in pairs], [vote for _, vote in pairs], share) or 0.0

    middle = at(0.5, [-one.error for one in left])
    middle *= believed(left, middle) if kind in TUNINGS else 0.0
    low = at(tails[0], [-one.error - one.row.widened[0] for one in left])
    high = at(1 - tails[1], [-one.error - one.row.widened[1] for one in left])
    return Class(middle, min(low - middle, 0.0), max(high - middle, 0.0), len(counts))


def believed(left: Sequence[Left], middle: float) -> float:
    """Return the share of a class's middle that is its own, not its sources': their number over that and their scatter around it.

    Partial pooling: middles of classes lie as far from that of all as sources do from one another (`SPREADS`).
    """
    by: dict[str, list[float]] = {}
    for one in left:
        by.setdefault(one.row.family, []).append(-one.error - middle)
    scatter = sum(float(numpy.median(errors)) ** 2 for errors in by.values()) / len(by)
    return len(by) / (len(by) + scatter / SPREADS["source",] ** 2)


def held(left: Sequence[Left], kind: str, tails: tuple[float, float]) -> list[Held]:
    """Return the runs of a class, each with the middle and the range of its class that the other sources give."""
    own = [one for one in left if kind in one.row.kinds]
    found = []
    for family in dict.fromkeys(one.row.family for one in own):
        rest = class_of([one for one in own if one.row.family != family], kind, tails)
        found += [
            Held(one.row, one.error + rest.middle, rest.low, rest.high) for one in own if one.row.family == family
        ]
    return found


def calibrated(left: Sequence[Left], kind: str) -> tuple[Class, list[Held]]:
    """Return the range of a class and its runs, each beside the range that the other sources give."""
    of, apart = _shortest(left, kind)
    if FEWEST <= of.sources < SURE:
        most = _shortest(left, KINDS[0])[0]
        of = of._replace(low=min(of.low, most.low), high=max(of.high, most.high))
        apart = [one._replace(low=min(one.low, most.low), high=max(one.high, most.high)) for one in apart]
    return of, apart


def _shortest(left: Sequence[Left], kind: str) -> tuple[Class, list[Held]]:
    """Return the shortest range of a class that holds `COVERAGE` of sources left out, on average over them, and the runs so held.

    Split conformal prediction over whole sources: what is exchangeable is a source, so each was predicted by all others. Errors are
    not the same to both sides, so that neither are the shares that stay beyond.
    """
    own = [one for one in left if kind in one.row.kinds]
    best, apart = class_of(own, kind, (0.0, 0.0)), held(left, kind, (0.0, 0.0))
    for tails in itertools.product(TAILS, TAILS):
        of = class_of(own, kind, tails)
        if of.high - of.low < best.high - best.low and by_source(found := held(left, kind, tails)) >= COVERAGE:
            best, apart = of, found
    return best, apart


def by_source(found: Sequence[Held]) -> float:
    """Return the share of the rows of a source that lie inside their range, as the mean over sources."""
    shares: dict[str, list[bool]] = {}
    for one in found:
        shares.setdefault(one.row.family, []).append(one.inside)
    return sum(sum(inside) / len(inside) for inside in shares.values()) / len(shares)


def kept_apart(left: Sequence[Left]) -> list[Held]:
    """Return all runs beside what the other sources of their class give."""
    stacks = dict.fromkeys(one.row.kinds[0] for one in left)
    return [one for kind in stacks for one in calibrated(left, kind)[1] if one.row.kinds[0] == kind]


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


def classes(left: Sequence[Left], say: Callable[[str], object]) -> tuple[Kind, ...]:
    """Return the middle and the range of each class; one of too few sources has the widest of all."""
    found = {}
    for kind in KINDS:
        made_of, apart = calibrated(left, kind)
        errors = [abs(math.expm1(one.error)) for one in apart]
        say(
            f"{kind}: {made_of.sources} sources, {len(apart)} rows, middle {made_of.middle:+.3f}, {math.exp(made_of.low):.3f} to"
            f" {math.exp(made_of.high):.3f}; left out: median {numpy.median(errors):.1%}, p90 {numpy.quantile(errors, 0.9):.1%},"
            f" inside {by_source(apart):.0%}"
        )
        found[kind] = made_of, by_source(apart)
    low, high = (pick(getattr(of, end) for of, _ in found.values()) for pick, end in ((min, "low"), (max, "high")))
    return tuple(
        Kind(
            name=name, factor=round(math.exp(of.middle), 3), sources=of.sources, covered=round(share, 2),
            low=round(math.exp(of.low if of.sources >= FEWEST else low), 3),
            high=round(math.exp(of.high if of.sources >= FEWEST else high), 3),
        )
        for name, (of, share) in found.items()
    )  # fmt: skip


def made(runs: Sequence[Run], date: str, say: Callable[[str], object]) -> Software:
    """Return what `data/software.toml` is to hold, given the factors that it holds now."""
    rows = timed(runs)
    fit, tables = Fit(rows), left_out(rows)
    left = [*tables, *reported()]
    factors = []
    for experts in (False, True):
        for low in (False, True):
            new = rows[0]._replace(source="?", configuration="?", experts=experts, hosted=experts, low=low)
            mean = float(fit.predict([new])[0][0])
            alike = [row for row in rows if (row.hosted, row.low) == (experts, low)]
            factors.append(
                Factor(
                    experts=experts, low_precision=low, factor=round(math.exp(mean), 3), runs=len(alike),
                    sources=tuple(sorted({row.source for row in alike})),
                )
            )  # fmt: skip
    own = sorted((abs(error), vote) for error, vote in after_a_run(rows))
    half = quantile([error for error, _ in own], [vote for _, vote in own], COVERAGE)
    assert half is not None
    apart = [one for one in kept_apart(left) if not one.row.report]
    errors, votes = [abs(math.expm1(one.error)) for one in apart], _votes([one.row for one in apart])
    kinds = classes(left, say)
    spread = math.log(kinds[0].high / kinds[0].low) / 2 / TENTH
    return Software(
        date=date, transferred=round(math.hypot(1.0, shifts(runs) / spread), 2), low_measured=round(math.exp(-half), 3),
        high_measured=round(math.exp(half), 3), factors=tuple(factors), kinds=kinds,
        covered=round(sum(vote for one, vote in zip(apart, votes, strict=True) if one.inside) / sum(votes), 2),
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
        lines += [f"{name} = {getattr(one, name)}" for name in ("factor", "runs")]
        lines.append(f"sources = [{names}]")
    for kind in known.kinds:
        lines += ["", "[[kinds]]", f'name = "{kind.name}"']
        lines += [f"{name} = {getattr(kind, name)}" for name in ("factor", "low", "high", "sources", "covered")]
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
        kind_of.cache_clear()


if __name__ == "__main__":
    main()
