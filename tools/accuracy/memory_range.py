"""The range of memory: a calibrated 80 %, made by leaving whole sources out. `make range` writes `data/memory_range.toml`.

Sources are what is exchangeable, not rows: the rows of one source share its stack, its counter and its habits. Each source
has one vote, split over its configurations. A row's residual says by how much the measured peak lies outside what is known to
differ (the allocator's idle blocks, memory outside it, what the row does not state), as a logarithm; inside it is 0. The range
is the weighted median of the residuals, give or take the half-width that holds a share of them, the level.

The level is conformal: each source is left out in turn, the range made from the others, and the level is the lowest at which
the sources left out have 80 % of their rows inside, on average over sources. It is one for all classes of stacks.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import NamedTuple, get_args

from loadgauge.core.definitions.training.memory_range import COVERAGE, Fragmentation, Share, Spread, Stack, memory_range
from loadgauge.evidence.validate.runs import Run, published
from loadgauge.evidence.validate.setups import setup_of
from loadgauge.evidence.validate.summary import configuration_weights, grouped, quantile
from loadgauge.evidence.validate.validate import Record, validate

QUALITIES = ("A", "B")
"""Of the rows that calibrate: of the others too little of the configuration is known."""
IDLE = ("static", "fixed", "dynamic", "sharded", "expandable")
"""Kinds of trainings of which the allocator is simulated (`MemoryRange`)."""
FEWEST = round(COVERAGE / (1 - COVERAGE))
"""Sources below which no range of the wanted coverage follows from a class alone; the other classes are then pooled with it."""


class Residual(NamedTuple):
    """How far a row lies from its prediction, as log(measured / nearest end of the known range), and its weight."""

    source: str
    stack: Stack
    value: float
    weight: float


def residual(record: Record) -> float:
    """Return the logarithm of measured over the nearest end of the range; 0 inside it.

    >>> round(residual(Record(id="M-X-1", quantity="memory", measured=2.2, predicted=1.5, low=1.0, high=2.0)), 4)
    0.0953
    """
    assert record.measured
    assert record.high
    beyond = math.log(record.measured / record.high)
    short = math.log(record.measured / record.low) if record.low else math.inf
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
            stack = setup_of(by_id[record.id]).training.framework.stack
            found.append(Residual(source, stack, residual(record), weight / sum(weights)))
    return found


def bounds(found: Sequence[Residual], level: float) -> tuple[float, float]:
    """Return the factors between which `level` of the residuals lie, around their median; 1 always lies in between.

    >>> rows = [Residual("X", "FSDP", value / 10, 1.0) for value in range(-5, 6)]
    >>> [round(factor, 3) for factor in bounds(rows, 0.8)], [round(factor, 3) for factor in bounds(rows, 1.0)]
    ([0.67, 1.492], [0.607, 1.649])
    """
    values, weights = [one.value for one in found], [one.weight for one in found]
    middle = quantile(values, weights, 0.5)
    assert middle is not None
    width = quantile([abs(value - middle) for value in values], weights, level)
    assert width is not None
    return min(1.0, math.exp(middle - width)), max(1.0, math.exp(middle + width))


def pool(found: Sequence[Residual], stack: Stack) -> list[Residual]:
    """Return the residuals of a class of stacks; of all classes where its own sources are fewer than `FEWEST`."""
    own = [one for one in found if one.stack == stack]
    return own if len({one.source for one in own}) >= FEWEST else list(found)


class Left(NamedTuple):
    """A source that was left out: the range from the others, as factors, and which share of its rows lies in it."""

    source: str
    stack: Stack
    rows: int
    low: float
    high: float
    covered: float


def left_out(found: Sequence[Residual], level: float) -> list[Left]:
    """Return for each source and class of stacks how many of its rows the range from all other sources holds."""
    result = []
    for source, stack in dict.fromkeys((one.source, one.stack) for one in found):
        own = [one for one in found if (one.source, one.stack) == (source, stack)]
        others = pool([one for one in found if one.source != source], stack)
        if not others:
            continue
        low, high = bounds(others, level)
        inside = sum(one.weight for one in own if math.log(low) - 1e-9 <= one.value <= math.log(high) + 1e-9)
        result.append(Left(source, stack, len(own), low, high, inside / sum(one.weight for one in own)))
    return result


def covered(left: Sequence[Left]) -> float:
    """Return the share of the rows of a source that lie inside, as the mean over sources."""
    return sum(one.covered for one in left) / len(left) if left else 0.0


def calibrated_level(found: Sequence[Residual]) -> float:
    """Return the lowest level at which sources that were left out have `COVERAGE` of their rows inside; at most 1."""
    levels = [0.5 + step / 100 for step in range(51)]
    return next((level for level in levels if covered(left_out(found, level)) >= COVERAGE - 1e-9), 1.0)


def spreads(found: Sequence[Residual]) -> tuple[Spread, ...]:
    """Return the spread of each class of stacks, with its coverage of sources that it was not made from."""
    level = calibrated_level(found)
    apart, made = left_out(found, level), []
    for stack in get_args(Stack):
        used = pool(found, stack)
        low, high = bounds(used, level)
        own = covered([one for one in apart if one.stack == stack])
        sources = tuple(sorted({one.source for one in used}))
        made.append(
            Spread(
                stack=stack,
                low=round(low, 3),
                high=round(high, 3),
                runs=len(used),
                sources=sources,
                covered=round(own, 2),
            )
        )
    return tuple(made)


def text(made: Sequence[Spread], idle: dict[str, Fragmentation], date: str) -> str:
    """Return the content of `data/memory_range.toml`."""

    def share(of: Share) -> str:
        return f"{{ low = {of.low}, usual = {of.usual}, high = {of.high} }}"

    lines = [
        "# How far measured memory lies from what is predicted; `make range` writes this file.",
        "# spread: factors on the prediction, from the published runs of data/runs; covered: of sources left out.",
        "# static, fixed, dynamic: what the caching allocator holds idle, as shares of what it handed out, from simulated",
        "# trainings of one length with gradients that exist from the start, of one length, and of lengths that change;",
        "# sharded, expandable: the same of the main stream under FSDP2, and where the allocator's segments grow.",
        f'date = "{date}"',
    ]
    for one in made:
        names = ", ".join(f'"{source}"' for source in one.sources)
        lines += ["", "[[spread]]", f'stack = "{one.stack}"', f"low = {one.low}", f"high = {one.high}",
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
    found = residuals(published().runs)
    made = spreads(found)
    place.write_text(text(made, idle, date), encoding="utf-8")
    level = calibrated_level(found)
    say(f"level {level:.2f}: {covered(left_out(found, level)):.0%} of the rows of sources left out lie inside")
    for one in left_out(found, level):
        say(
            f"{one.source} ({one.stack}, {one.rows} rows) left out: {one.low:.2f} to {one.high:.2f} holds {one.covered:.0%}"
        )
    for spread in made:
        say(f"{spread.stack}: {spread.low} to {spread.high}, covered {spread.covered:.0%}")


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
