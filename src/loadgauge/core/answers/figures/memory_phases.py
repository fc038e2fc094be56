"""Memory through one step: the moments of the estimate, and between them the worst rank as it works through its schedule."""

from collections.abc import Iterator
from typing import Any

from loadgauge.core.answers.figure import Figure
from loadgauge.core.answers.figures.schedule import MICROBATCHES, flights, playable
from loadgauge.core.estimate.memory.in_flight import Flight, Work
from loadgauge.core.estimate.memory.phases import PARTS, Moment, StageAtWork
from loadgauge.core.estimate.result import Estimate
from loadgauge.core.estimate.schedule.simulate import Simulation

ROWS = 800
"""Points of the curve."""


@Figure(title="Memory through one step", form="areas", order=2, plot="step", row=1, shown=("notebook",))
def moments(result: Estimate) -> dict[str, Any]:
    """Return the estimate's moments (`points`, in order), and the curve of the worst rank over its schedule.

    Each row of the curve: seconds (in units of a forward where none are known), then bytes by part. Its highest point is
    the peak where enough micro-batches are drawn to reach it (`reaches_peak`).
    """
    memory = result.memory
    rows = [
        [seconds, *(moment.parts[part] for part in PARTS[:-1]), memory.parts["outside"]]
        for seconds, moment in curve(result)
    ]
    peak = max(sum(row[1:]) for row in rows)
    return {
        "rank": {"stage": memory.rank.stage},
        "capacity": memory.capacity,
        "peak": memory.moment,
        "points": [
            {"name": moment.name, "t": place, "total": moment.total, "parts": moment.parts}
            for place, moment in enumerate(memory.moments)
        ],
        "curve": {
            "columns": ["t", *PARTS],
            "rows": thinned(rows),
            "microbatches_shown": _batches(result),
            "microbatches": int(result.layout.num_microbatches),
            "timed": result.time is not None,
            "reaches_peak": abs(peak - memory.total) <= 1e-9 * memory.total,
        },
    }


def thinned(rows: list[list[Any]], most: int = ROWS) -> list[list[Any]]:
    """Return about `most` of the rows: both ends, the highest one, and others at even distances.

    >>> thinned([[0, 1], [1, 5], [2, 9], [3, 4], [4, 1]], 3)
    [[0, 1], [2, 9], [4, 1]]
    """
    if len(rows) <= most:
        return rows
    peak = max(range(len(rows)), key=lambda place: sum(rows[place][1:]))
    step = -(-len(rows) // most)
    chosen = {peak, len(rows) - 1, *range(0, len(rows), step)}
    return [rows[place] for place in sorted(chosen)]


def curve(result: Estimate) -> Iterator[tuple[float, Moment]]:
    """Yield the worst rank's way through its schedule: seconds and the moment."""
    played = result.workings.play(_batches(result), timed=result.time is not None)
    return _curve(result.workings.worst.rank, played)


def _batches(result: Estimate) -> int:
    """Micro-batches that are drawn: enough to fill every stage, and chunk, of any schedule."""
    return playable(result.layout, max(MICROBATCHES, 2 * result.layout.pp))


def _curve(at_work: StageAtWork, played: Simulation) -> Iterator[tuple[float, Moment]]:
    """Seconds and what is alive: at the end of a forward, and layer after layer through a backward."""
    moments_of: dict[object, list[tuple[float, Moment]]] = {}
    last: Moment | None = None
    held, pieces = flights(played.order, at_work.stage.index)
    for (start, end), (kind, _, chunk, finds) in zip(played.spans(at_work.stage.index), pieces, strict=True):
        if kind == "W":
            continue
        key = kind, chunk, finds
        if key not in moments_of:
            moments_of[key] = list(_within(at_work, Work(kind == "F", chunk, kind == "B", Flight(*held[finds]))))
        if kind == "F" and last is not None:
            yield start, last
        for share, moment in moments_of[key]:
            yield start + share * (end - start), moment
            last = moment
    if at_work.memory.fully_sharded and at_work.layout.pp > 1:
        yield played.total, at_work.at_reduction()
    if at_work.memory.engine is not None:
        yield played.total, at_work.at_clip()
    yield played.total, at_work.at_step()


def _within(at_work: StageAtWork, work: Work) -> Iterator[tuple[float, Moment]]:
    """The moments within one piece of work, by the share of it that is over."""
    memory, stage, chunk = at_work.memory, at_work.stage, at_work.chunk(work)
    layers = max(1, chunk.stop - chunk.start)
    if work.forward:
        lasts = dict.fromkeys(position for _, position in at_work.positions(chunk, "last"))
        for position in sorted({*lasts, *at_work.between(forward=True)}):
            yield (position - chunk.start + 1) / layers, at_work.forward(work, memory.key(stage, position), position)
        return
    if chunk.last:
        yield 0.0, at_work.at_loss(work)
        if memory.engine is not None and at_work.layout.zero < 3:
            yield 0.0, at_work.at_head_gradient(work)
        if memory.prediction is not None:
            yield 0.0, at_work.predicted(work, memory.prediction)
    places = {position: (key, "last") for key, position in at_work.positions(chunk, "last")}
    for key, position in at_work.positions(chunk, "first"):
        places.setdefault(position, (key, "first"))
    for position in at_work.between(forward=False):
        places.setdefault(position, (memory.key(stage, position), ""))
    for position in sorted(places, reverse=True):
        key, order = places[position]
        yield (chunk.stop - 1 - position) / layers, at_work.backward(work, key, position, order)
    if chunk.first:
        yield 1.0, at_work.at_embedding(work)
        if memory.by_layer:
            yield 1.0, at_work.at_ends(work)
