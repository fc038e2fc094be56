"""A pipeline schedule played through for many layouts at once: `estimate.schedule_timeline` with arrays of times.

The order of work is the same for all of them, so what waits for what is worked out once, as levels of entries that
do not wait for one another; each level is an addition and a maximum over arrays. The sums are those of the simulation
of one layout, in the same order.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from loadgauge.estimate.schedule_orders import BW, PAIR_BW, PAIR_END, PAIR_F, PAIR_WAIT, B, F, Order, W, order_of_work

ELEMENTS = 1_000_000
"""Of the table of times, at most."""
MAKES = {F: "F", PAIR_END: "F", B: "B", BW: "B", PAIR_BW: "B"}
"""What work of each kind hands on: activations or their gradient."""
COSTS = {F: 0, PAIR_F: 0, B: 1, W: 2, BW: 3, PAIR_BW: 3, PAIR_WAIT: 4, PAIR_END: 4}
"""Whose time each kind takes: forward, gradient of the input, of the weights, both, none."""
KINDS = 5


class Level(NamedTuple):
    """Entries that do not wait for one another, as rows of the table of times: `start:stop`.

    before: the entry before on the same stage; source: whose output they read (row 0: nothing to wait for)
    cost: (stage x chunks + chunk) x `KINDS` + whose time; held: whether the stage waits for what the entry before sends; sent:
    whether the input comes from another stage
    """

    start: int
    stop: int
    before: Any
    source: Any
    cost: Any
    held: Any
    sent: Any


class Waits(NamedTuple):
    """What waits for what under a schedule. ends: each stage's last entry, and whether it sends something."""

    levels: tuple[Level, ...]
    rows: int
    ends: Any
    held: Any


@functools.lru_cache(maxsize=128)
def waits(schedule: str, stages: int, batches: int, chunks: int | None) -> Waits:
    """What waits for what, by levels."""
    import numpy

    order = order_of_work(schedule, stages, batches, chunks)
    source, sends = _ways(order)
    made: dict[tuple[str, int, int], list[tuple[int, int] | None]] = {}

    def outputs(key: tuple[str, int, int]) -> list[tuple[int, int] | None]:
        """Of each micro-batch, the level and place of the entry that makes it."""
        return made.setdefault(key, [None] * batches)

    tables: list[list[tuple[list[tuple[int, int] | None] | None, Any, int, bool]]] = []
    for stage in range(stages):
        table = []
        for row in range((max(COSTS) + 1) * order.chunks):
            kind, chunk = divmod(row, order.chunks)
            wanted = source(kind, stage, chunk)
            # What the same stage has made is there by now: entries follow one another.
            inputs = None if wanted is None or wanted[1] == stage else outputs(wanted)
            output = outputs((MAKES[kind], stage, chunk)) if kind in MAKES else None
            cost = (stage * order.chunks + chunk) * KINDS + COSTS[kind]
            table.append((inputs, output, cost, sends(kind, stage, chunk)))
        tables.append(table)
    levels: list[list[tuple[Any, ...]]] = []
    nothing = -1, 0
    reached = [0] * stages
    behind: list[tuple[int, int, bool]] = [(-1, 0, False)] * stages
    moving = True
    while moving:
        moving = False
        for stage, (rows, numbers) in enumerate(zip(order.rows, order.microbatches, strict=True)):
            table, before = tables[stage], behind[stage]
            for place in range(reached[stage], len(rows)):
                inputs, output, cost, leaves = table[rows[place]]
                found = nothing
                if inputs is not None:
                    arrived = inputs[numbers[place]]
                    if arrived is None:
                        break
                    found = arrived
                level = 1 + max(before[0], found[0])
                if level == len(levels):
                    levels.append([])
                levels[level].append((before, found, cost, before[2], inputs is not None))
                mark = level, len(levels[level]) - 1
                if output is not None:
                    output[numbers[place]] = mark
                before = (*mark, leaves)
                reached[stage] += 1
                moving = True
            behind[stage] = before
    starts = [1]
    for each in levels:
        starts.append(starts[-1] + len(each))

    def place_of(mark: tuple[int, ...]) -> int:
        return 0 if mark[0] < 0 else starts[mark[0]] + mark[1]

    def column(values: Any, kind: Any = "int64") -> Any:
        return numpy.array(list(values), dtype=kind)

    done = []
    for (start, stop), each in zip(pairwise(starts), levels, strict=True):
        befores, sources, costs, held, sent = zip(*each, strict=True)
        done.append(
            Level(
                start, stop, column(map(place_of, befores)), column(map(place_of, sources)), column(costs),
                column(held, "float64")[:, None], column(sent, "float64")[:, None],
            )
        )  # fmt: skip
    held = column((each[2] for each in behind), "float64")[:, None]
    return Waits(tuple(done), starts[-1], column(map(place_of, behind)), held)


def _ways(order: Order) -> tuple[Any, Any]:
    """Two functions of (kind, stage, chunk): whose output some work reads, and whether its own goes to another stage."""
    after: dict[tuple[int, int], tuple[int, int]] = {}
    before: dict[tuple[int, int], tuple[int, int]] = {}
    for route in order.routes:
        for one, other in pairwise(route):
            after[one], before[other] = other, one

    def source(kind: int, stage: int, chunk: int) -> tuple[str, int, int] | None:
        part = stage, chunk
        if kind in (F, PAIR_F):
            return ("F", *before[part]) if part in before else None
        if kind == W:
            return ("B", *part)
        if kind == PAIR_END:
            return None
        return ("B", *after[part]) if part in after else ("F", *part)

    def sends(kind: int, stage: int, chunk: int) -> bool:
        target = (after if MAKES.get(kind) == "F" else before if kind in MAKES else {}).get((stage, chunk))
        return target is not None and target[0] != stage

    return source, sends


def play(
    schedule: str,
    stages: int,
    batches: int,
    kinds: Sequence[int],
    forward: Any,
    backward: Any,
    weight: Any,
    send: Any,
    *,
    overlap_send: bool,
) -> Any:
    """Seconds of a schedule for each layout.

    kinds: of each chunk, stage after stage, which row of `forward`, `backward` and `weight` has its times; those are
    [kinds, layouts], `backward` the gradient of the input where the schedule splits it, else the whole; send: [layouts]
    """
    import numpy

    known = waits(schedule, stages, batches, len(kinds) // stages if schedule == "interleaved" else None)
    total = numpy.empty(forward.shape[1])
    step = max(1, ELEMENTS // known.rows)
    places = numpy.array([kind * KINDS + each for kind in kinds for each in range(KINDS)])
    for begin in range(0, forward.shape[1], step):
        part = slice(begin, begin + step)
        f, b, w = (each[:, part] for each in (forward, backward, weight))
        costs = numpy.stack([f, b, w, b + w, numpy.zeros_like(f)], axis=1).reshape(-1, f.shape[1])
        way = send[part]
        done = numpy.empty((known.rows, f.shape[1]))
        done[0] = 0.0
        for level in known.levels:
            now, arrival = done[level.before], done[level.source]
            if not overlap_send:
                now += level.held * way
            arrival += level.sent * way
            numpy.maximum(now, arrival, out=now)
            numpy.add(now, costs[places[level.cost]], out=done[level.start : level.stop])
        last = done[known.ends]
        if not overlap_send:
            last += known.held * way
        total[part] = last.max(axis=0)
    return total
