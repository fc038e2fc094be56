"""The range of memory: a calibrated 80 %, made by leaving whole sources out. `make range` writes `data/memory_range.toml`.

Sources are what is exchangeable, not rows: the rows of one source share its stack, its counter and its habits, so that whole
sources are left out. A configuration has one vote. A row's residual says by how much its peak lies outside what is known to
differ (the allocator's idle blocks, memory outside it, what the row does not state), as a logarithm; inside it is 0. Of a card
it is that of what lies in the allocator, over what is predicted that it usually holds. The range is the shortest that holds a
share of the residuals, the level, and no residual at all (what is predicted).

Cards show more than is predicted, in every class. The middle of a class of cards is the median of its rows, those of a source
together weighing the root of their number, drawn to that of all cards as if `COMMON` sources more lay there. Around it a range is
as wide as the rows of its class lie apart (their mean distance, drawn to that of all in the same way): residuals over that
distance are one distribution, of which the shortest stretch that holds `COVERAGE` counts. What a card with room shows is so much;
where the range goes beyond the card it begins at what the tensors need, times a factor (`floor`) below which few rows lie. A
source that is left out is left out of middles, distances and stretch.

Beside tables of benchmarks stand reports of users (`raw/reported_memory.csv`: a counter, its value, and the flags of the run
as its report states them), so that the range holds for runs that nobody tuned. Classes are by stack, adapters apart, and by
what is read: PyTorch's allocator, or the card, which holds idle blocks and what lies beside the allocator too.

The level is conformal: each source is left out in turn, the range made from the others, and the level is the lowest at which what
was left out has 80 % of its votes inside. All cards have one (80 % of the rows at least); of what the allocator counts each class
has its own, and one with few sources is pooled with all others.
"""

from __future__ import annotations

import csv
import datetime
import math
import shlex
from bisect import bisect_left
from collections import Counter as Counted
from collections.abc import Callable, Sequence
from importlib import resources
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from loadgauge.core.base.errors import Error
from loadgauge.core.base.units import GIB
from loadgauge.core.command_line.estimate import command
from loadgauge.core.command_line.sizes import model_or_usage
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.definitions.training.memory_range import (
    CARD,
    CLASSES,
    COVERAGE,
    Fragmentation,
    Share,
    Spread,
    class_of,
    memory_range,
)
from loadgauge.core.estimate.result import Estimate
from loadgauge.core.resolve.resolve import resolve_job
from loadgauge.evidence.validate.counters import Counter, reading
from loadgauge.evidence.validate.runs import Run, published, setup_of
from loadgauge.evidence.validate.summary import configuration_weights, grouped
from loadgauge.evidence.validate.validate import validate

QUALITIES = ("A", "B")
"""Of the rows that calibrate: of the others too little of the configuration is known."""
IDLE = ("static", "fixed", "dynamic", "sharded", "expandable")
"""Kinds of trainings of which the allocator is simulated (`MemoryRange`)."""
ON_CARD = ("device", "nvidia-smi")
"""Counters of the driver."""
REPORTS = Path(__file__).parents[1] / "published_runs" / "raw" / "reported_memory.csv"
FAR = 2.0
COMMON = 4
"""Sources that the middle, and the distance, of all cards counts for in that of a class: the best of 0, 2, 4, 10 and 100 for
sources left out."""
MOST = 0.7
"""Distance of a row, as a logarithm, beyond which it counts as so far: what doubles is another run."""
RARE = 0.05
"""Share of the rows of cards that may lie below what the tensors need."""
DIGIT = 1 / 1000
"""Last digit of the ends of a range, which are written outward: rounded inward, the rows they come from lie outside."""
FEWEST = round(COVERAGE / (1 - COVERAGE))
"""Sources below which no range of the wanted coverage follows from a class alone; the other classes are then pooled with it."""


class Residual(NamedTuple):
    """How far a row lies from its prediction, as log(measured / nearest end of the known range), and its weight.

    card: of a card, the class that its middle is of; floor: what the tensors need with the least of all else, over the prediction
    """

    source: str
    stack: str
    value: float
    weight: float
    card: str = ""
    floor: float = 0.0


def residual(measured: float, low: float | None, high: float | None) -> float:
    """Return the logarithm of measured over the nearest end of a range; 0 inside it.

    >>> round(residual(2.2, 1.0, 2.0), 4), residual(1.5, 1.0, 2.0)
    (0.0953, 0.0)
    """
    beyond, short = (math.log(measured / end) if end else math.inf for end in (high, low))
    return max(beyond, 0.0) + min(short, 0.0)


def residuals(runs: Sequence[Run]) -> list[Residual]:
    """Return the residual of every row of quality A and B whose counter is known and whose memory is predicted."""
    known = [run for run in runs if run.quality in QUALITIES and run.counter.kind != "unknown"]
    predicted = [record for record in validate(known, ("memory",), calibrated=False) if record.error is not None]
    by_id = {run.id: run for run in known}
    found = []
    for source, records in grouped(predicted, lambda record: record.source).items():
        weights = configuration_weights(records)
        for record, weight in zip(records, weights, strict=True):
            training = setup_of(by_id[record.id]).training
            adapters, card = training.lora is not None, by_id[record.id].counter.kind in ON_CARD
            stack = class_of(training.framework.stack, adapters=adapters, card=card)
            value = residual(record.measured or 0.0, record.low, record.high)
            found.append(Residual(source, stack, value, weight / sum(weights) * len(records)))
    return found


def as_typed(flags: str) -> Estimate:
    """Return the estimate of a command line, without its first two words."""
    given = command.make_context("estimate", shlex.split(flags)).params
    model = model_or_usage(given.pop("model"), given)
    said = {name: value for name, value in given.items() if name in Job.__struct_fields__ and value is not None}
    return resolve_job(Job(model=model, **said)).estimate()


def reported(file: Path = REPORTS) -> list[Residual]:
    """Return the residual of every report of a user; of a card, beyond what one must have, which is what a verdict compares.

    Reports that are far off for a known cause, more than twice or less than half, are left out.
    """
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    with file.open(newline="", encoding="utf-8") as rows:
        for row in csv.DictReader(rows):
            try:
                estimate = as_typed(row["flags"])
            except Error:
                continue
            memory, measured, card = estimate.memory, float(row["gib"]) * GIB, row["counter"] in ON_CARD
            shown = reading(Counter.parse(row["counter"]), estimate, calibrated=False)
            if not 1 / FAR < (memory.total if card else shown.value) / measured < FAR:
                continue
            training = estimate.training
            adapters, layout = training.lora is not None, estimate.layout
            stack = class_of(training.framework.stack, adapters=adapters, card=card, split=layout.tp > 1)
            if card:
                margins = memory.margins
                shown, room = margins.shown(memory.allocated), memory.capacity
                room = None if room is None else room - margins.outside.value
                usual = margins.filled(shown / margins.spread.middle, shown * margins.returned, room)
                floor = memory.allocated * (1 + margins.fragmentation.needed.low)
                value, least = (math.log(of / usual) for of in (measured - margins.outside.value, floor))
            else:
                value, least = residual(measured, shown.low, shown.high), 0.0
            found.setdefault((row["source"], stack), []).append((value, least))
    return [
        Residual(*key, value, 1.0, key[1] if key[1].endswith(CARD) else "", least)
        for key, values in found.items()
        for value, least in values
    ]


def middles(found: Sequence[Residual]) -> dict[str, float]:
    """Return the middle of each class of cards, as a logarithm.

    >>> rows = [Residual("A", "FSDP, card", 0.1, 1.0, "FSDP, card"), Residual("B", "FSDP, card", 0.3, 1.0, "FSDP, card")]
    >>> round(middles(rows)["FSDP, card"], 2), round(middles(rows)["adapters, card"], 2)
    (0.1, 0.1)
    """
    number = Counted((one.card, one.source) for one in found if one.card)
    rows = [(one.value, number[one.card, one.source] ** -0.5, one.card) for one in found if one.card]
    common, result = _median(rows), {}
    for stack in CLASSES:
        own = sum(card == stack for card, _ in number)
        middle = _median([row for row in rows if row[2] == stack])
        result[stack] = (own * middle + COMMON * common) / (own + COMMON)
    return result


def _median(rows: Sequence[tuple[float, float, str]]) -> float:
    """The weighted median of values; 0 of none."""
    ordered = sorted(rows)
    sums = list(accumulate(weight for _, weight, _ in ordered))
    return ordered[bisect_left(sums, sums[-1] / 2)][0] if rows else 0.0


def centred(found: Sequence[Residual], by: dict[str, float]) -> list[Residual]:
    """Return the residuals around the middle of their class."""
    return [
        one._replace(value=one.value - by[one.card], floor=one.floor - by[one.card]) if one.card else one
        for one in found
    ]


def distances(found: Sequence[Residual]) -> dict[str, float]:
    """Return how far the rows of each class of cards lie from its middle on average, as a logarithm; 1 of all else.

    >>> rows = [Residual("A", "FSDP, card", value, 1.0, "FSDP, card") for value in (-0.1, 0.1)]
    >>> round(distances(rows)["FSDP, card"], 2), distances(rows)["FSDP"]
    (0.1, 1.0)
    """
    cards = [one for one in found if one.card]
    common, result = _mean_log(cards), {stack: 1.0 for stack in CLASSES if not stack.endswith(CARD)}
    for stack in CLASSES:
        own = [one for one in cards if one.card == stack]
        if stack not in result:
            sources = len({one.source for one in own})
            result[stack] = math.exp((sources * _mean_log(own) + COMMON * common) / (sources + COMMON))
    return result


def _mean_log(found: Sequence[Residual]) -> float:
    """The logarithm of the mean distance; that of nothing counts for nothing."""
    return math.log(sum(min(abs(one.value), MOST) for one in found) / len(found) + 1e-3) if found else 0.0


def scaled(found: Sequence[Residual], by: dict[str, float], stack: str) -> list[Residual]:
    """Return the residuals of cards as if they were of this class: each as many distances from the middle as from its own."""
    return [one._replace(value=one.value * by[stack] / by[one.card]) if one.card else one for one in found]


def floor_of(found: Sequence[Residual]) -> float:
    """Return the factor on what the tensors of a card need, with the least of all else, below which `RARE` of the rows lie.

    >>> round(floor_of([Residual("A", "FSDP, card", 0.1 * step, 1.0, "FSDP, card", floor=0.5) for step in range(21)]), 3)
    0.67
    """
    below = sorted(one.value - one.floor for one in found if one.card)
    return math.exp(min(below[math.floor(RARE * len(below))], 0.0)) if below else 1.0


def within(one: Residual, low: float, high: float) -> bool:
    """Return whether a range holds a row.

    >>> within(Residual("A", "FSDP, card", -0.15, 1.0), 0.9, 1.2), within(Residual("A", "FSDP, card", -0.1, 1.0), 0.9, 1.2)
    (False, True)
    """
    return math.log(low) - 1e-9 <= one.value <= math.log(high) + 1e-9


def bounds(found: Sequence[Residual], level: float) -> tuple[float, float]:
    """Return the factors of the shortest range that holds `level` of the residuals, and 1.

    >>> rows = [Residual("X", "FSDP", value / 10, 1.0) for value in (-9, 0, 1, 2, 3)]
    >>> [round(factor, 3) for factor in bounds(rows, 0.8)], [round(factor, 3) for factor in bounds(rows, 1.0)]
    ([1.0, 1.35], [0.407, 1.35])
    """
    ordered = sorted((one.value, one.weight) for one in found)
    sums = list(accumulate((weight for _, weight in ordered), initial=0.0))
    wanted = level * sums[-1] - 1e-9
    best: tuple[float, float] | None = None  # shortest in bytes, not in logarithms
    for start, (low, _) in enumerate(ordered):
        stop = bisect_left(sums, sums[start] + wanted)
        if stop >= len(sums):
            break
        ends = math.exp(min(low, 0.0)), math.exp(max(ordered[max(stop, 1) - 1][0], 0.0))
        if best is None or ends[1] - ends[0] < best[1] - best[0]:
            best = ends
    assert best is not None
    return best


def factors(found: Sequence[Residual], stack: str, level: float) -> tuple[float, float]:
    """Return the factors of the range of a class, from residuals around their middles."""
    return bounds(scaled(pool(found, stack), distances(found), stack), level)


def pool(found: Sequence[Residual], stack: str) -> list[Residual]:
    """Return the residuals of a class; of a card, or where its own sources are fewer than `FEWEST`, of all by that counter."""
    card = stack.endswith(CARD)
    own = [one for one in found if one.stack == stack]
    if not card and len({one.source for one in own}) >= FEWEST:
        return own
    return [one for one in found if one.stack.endswith(CARD) == card and (card or one.stack != "adapters")]


def voting(used: Sequence[Residual], stack: str) -> list[Residual]:
    """Return what PyTorch's allocator counts, from `pool`, as votes of this class.

    Where several classes are pooled each source has one, for they are what a new one is like.

    >>> rows = [Residual(source, "FSDP", 0.1, 1.0) for source in "AAAAB"]
    >>> [one.weight for one in voting(rows, "pretraining")] == [0.25] * 4 + [1.0], voting(rows, "FSDP") == rows
    (True, True)
    """
    if {one.stack for one in used} == {stack}:
        return list(used)
    votes: dict[str, float] = {}
    for one in used:
        votes[one.source] = votes.get(one.source, 0.0) + one.weight
    return [one._replace(stack=stack, weight=one.weight / votes[one.source]) for one in used]


class Left(NamedTuple):
    """A source that was left out: the range from the others, as factors, and which share of its rows lies in it."""

    source: str
    stack: str
    rows: int
    low: float
    high: float
    covered: float
    votes: float


def left_out(found: Sequence[Residual], level: float) -> list[Left]:
    """Return for each source and class of stacks how many of its rows the range from all other sources holds."""
    result = []
    for source, stack in dict.fromkeys((one.source, one.stack) for one in found):
        rest = [one for one in found if one.source != source]
        by = middles(rest)
        own = centred([one for one in found if (one.source, one.stack) == (source, stack)], by)
        if not pool(rest, stack):
            continue
        low, high = factors(centred(rest, by), stack, level)
        inside, votes = sum(one.weight for one in own if within(one, low, high)), sum(one.weight for one in own)
        result.append(Left(source, stack, len(own), low, high, inside / votes, votes))
    return result


def covered(left: Sequence[Left]) -> float:
    """Return the share of the votes of what was left out that lie inside."""
    return sum(one.covered * one.votes for one in left) / sum(one.votes for one in left) if left else 0.0


def calibrated_level(found: Sequence[Residual], least: float = 0.5) -> float:
    """Return the lowest level at which what was left out has `COVERAGE` of its votes inside; at least `least`, at most 1."""
    for step in range(round(100 * least), 100):
        if covered(left_out(found, step / 100)) >= COVERAGE - 1e-9:
            return step / 100
    return 1.0


class Made(NamedTuple):
    """The range of a class: the spread, its level, and its own sources left out."""

    spread: Spread
    level: float
    left: tuple[Left, ...]


def ranges(found: Sequence[Residual]) -> list[Made]:
    """Return the range of each class."""
    made, by = [], middles(found)
    cards = pool(found, CARD)
    shared, floor = calibrated_level(cards, COVERAGE) if cards else 1.0, floor_of(centred(found, by))
    for stack in CLASSES:
        card = stack.endswith(CARD)
        used = pool(found, stack) if card else voting(pool(found, stack), stack)
        if not used:
            continue
        own = {one.source for one in found if one.stack == stack}
        level = shared if card else calibrated_level(used)
        low, high = factors(centred(used, by), stack, level)
        left = tuple(one for one in left_out(used, level) if (one.stack == stack if card else one.source in own))
        spread = Spread(
            stack=stack, middle=round(math.exp(by[stack]), 3) if card else 1.0,
            low=math.floor(low / DIGIT) * DIGIT, high=math.ceil(high / DIGIT) * DIGIT,
            floor=round(floor, 3) if card else 1.0, runs=len(used), sources=tuple(sorted({one.source for one in used})),
            covered=round(covered(left), 2),
        )  # fmt: skip
        made.append(Made(spread, level, left))
    return made


def every_residual(runs: Sequence[Run]) -> list[Residual]:
    """Return the residuals of published runs and of users' reports."""
    return residuals(runs) + reported()


def text(made: Sequence[Spread], idle: dict[str, Fragmentation], date: str) -> str:
    """Return the content of `data/memory_range.toml`."""

    def share(of: Share) -> str:
        return f"{{ low = {of.low}, usual = {of.usual}, high = {of.high} }}"

    lines = [
        "# How far measured memory lies from what is predicted; `make range` writes this file.",
        "# spread: factors on the prediction, from the published runs of data/runs and users' reports; covered: of those left out.",
        "# static, fixed, dynamic: what the caching allocator holds idle, as shares of what it handed out, from simulated",
        "# trainings of one length with gradients that exist from the start, of one length, and of lengths that change;",
        "# sharded, expandable: the same of the main stream under FSDP2, and where the allocator's segments grow.",
        f'date = "{date}"',
    ]
    for one in made:
        names = ", ".join(f'"{source}"' for source in one.sources)
        lines += ["", "[[spread]]", f'stack = "{one.stack}"', f"middle = {one.middle}", f"low = {one.low:.3f}",
                  f"high = {one.high:.3f}", f"floor = {one.floor}",
                  f"sources = [{names}]", f"runs = {one.runs}", f"covered = {one.covered}"]  # fmt: skip
    for kind, both in idle.items():
        lines += ["", f"[{kind}]", f"reserved = {share(both.reserved)}", f"needed = {share(both.needed)}"]
    return "\n".join([*lines, ""])


def main(arguments: Sequence[str], say: Callable[[str], object] = print) -> None:
    """Writes the file. `--spread-only` keeps the simulated shares of the allocator, which take some minutes."""
    place = Path(str(resources.files("loadgauge"))) / "data" / "memory_range.toml"
    date = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    known = memory_range()
    idle = {kind: getattr(known, kind) for kind in IDLE}
    if "--spread-only" not in arguments:
        from accuracy.fragmentation import fragmentation  # with PyTorch

        idle = fragmentation(say)
    place.write_text(text(known.spread, idle, date), encoding="utf-8")
    memory_range.cache_clear()
    made = ranges(every_residual(published().runs))
    place.write_text(text([one.spread for one in made], idle, date), encoding="utf-8")
    for one in made:
        for left in one.left:
            say(
                f"{left.source} ({left.rows} rows) left out: {left.low:.2f} to {left.high:.2f} holds {left.covered:.0%}"
            )
        ends = f"{one.spread.low:.3f} to {one.spread.high:.3f}"
        say(f"{one.spread.stack}: {ends}, level {one.level:.2f} holds {covered(one.left):.0%}")


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
