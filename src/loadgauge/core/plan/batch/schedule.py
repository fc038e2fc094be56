"""A pipeline schedule played through for many layouts at once: `estimate.schedule_timeline` with arrays of times.

The order of work is the same for all of them, so what waits for what is worked out once, as levels of entries that
do not wait for one another; each level is an addition and a maximum over arrays. The sums are those of the simulation
of one layout, in the same order.
"""

import functools
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from loadgauge.core.estimate.schedule.orders import (
    BW,
    PAIR_BW,
    PAIR_END,
    PAIR_F,
    PAIR_WAIT,
    B,
    F,
    Order,
    W,
    order_of_work,
)

ELEMENTS = 200_000
"""Of the tables of times, at most: they stay in the processor's cache."""
MAKES = {F: "F", PAIR_END: "F", B: "B", BW: "B", PAIR_BW: "B"}
"""Direction in which each kind of work hands on: F, activations to the next stage; B, gradients to the one before."""
COSTS = {F: 0, PAIR_F: 0, B: 1, W: 2, BW: 3, PAIR_BW: 3, PAIR_WAIT: 4, PAIR_END: 4}
"""Whose time each kind takes: forward, gradient of the input, of the weights, both, none."""
KINDS = 5


class Level(NamedTuple):
    """Entries that do not wait for one another, as rows of the table of times, which are reused after their last reader.

    before: the entry before on the same stage; source: whose output they read (row 0: nothing to wait for); own: their own
    cost: (stage x chunks + chunk) x `KINDS` + whose time; leaves: whether the output goes to another stage (None: all do)
    """

    before: Any
    source: Any
    own: Any
    cost: Any
    leaves: Any


class Waits(NamedTuple):
    """Dependencies of a schedule. rows: of the table of times; ends: each stage's last entry."""

    levels: tuple[Level, ...]
    rows: int
    ends: Any


@functools.lru_cache(maxsize=128)
def waits(schedule: str, stages: int, batches: int, chunks: int | None, put_off: tuple[int, ...] = ()) -> Waits:
    """Sort the entries of a schedule into levels of entries that do not wait for one another (`order_of_work`)."""
    import numpy

    order = order_of_work(schedule, stages, batches, chunks, put_off)
    source, sends = _ways(order)
    lengths = [len(rows) for rows in order.rows]
    begins = [0, *accumulate(lengths)]
    # Entries of all stages in one line; -1: nothing to wait for.
    work, numbers = (
        numpy.concatenate([numpy.array(column, dtype="int64") for column in columns])
        for columns in (order.rows, order.microbatches)
    )
    output = numpy.full((stages * order.chunks * 2, batches), -1)
    size = (max(COSTS) + 1) * order.chunks
    wanted, makes, costs, leaves = (numpy.full((stages, size), -1) for _ in range(4))
    for stage in range(stages):
        for row in range(size):
            kind, chunk = divmod(row, order.chunks)
            origin = source(kind, stage, chunk)
            # What the same stage has made is there by now: entries follow one another.
            if origin is not None and origin[1] != stage:
                wanted[stage, row] = 2 * (origin[1] * order.chunks + origin[2]) + (origin[0] == "B")
            if kind in MAKES:
                makes[stage, row] = 2 * (stage * order.chunks + chunk) + (MAKES[kind] == "B")
            costs[stage, row] = (stage * order.chunks + chunk) * KINDS + COSTS[kind]
            leaves[stage, row] = sends(kind, stage, chunk)
    of_stage = numpy.repeat(numpy.arange(stages), lengths)
    wanted, makes, costs, leaves = (table[of_stage, work] for table in (wanted, makes, costs, leaves))
    making = numpy.flatnonzero(makes >= 0)
    output[makes[making], numbers[making]] = making
    sources = numpy.where(wanted >= 0, output[wanted, numbers], -1)
    before = numpy.arange(len(work)) - 1
    before[begins[:-1]] = -1
    levels = numpy.array(_levels(sources.tolist(), begins))
    sorted_by_level = numpy.argsort(levels, kind="stable")
    rank = numpy.empty(len(work) + 1, dtype="int64")
    rank[sorted_by_level] = numpy.arange(1, len(work) + 1)
    rank[-1] = 0
    before, sources = rank[before[sorted_by_level]], rank[sources[sorted_by_level]]
    costs, leaves = costs[sorted_by_level], leaves[sorted_by_level].astype("float64")[:, None]
    starts = [*numpy.flatnonzero(numpy.diff(levels[sorted_by_level], prepend=-1)).tolist(), len(work)]
    ends = rank[numpy.array(begins[1:]) - 1]
    # The last level that reads an entry; what a stage ends with is kept.
    last = numpy.zeros(len(work) + 1, dtype="int64")
    for read in (before, sources):
        numpy.maximum.at(last, read, levels[sorted_by_level])
    last[ends] = len(starts)
    slots, size = _slots(last[1:], starts)
    done = []
    for start, stop in pairwise(starts):
        some = None if leaves[start:stop].all() else leaves[start:stop]
        these = slice(start, stop)
        own = slots[start + 1 : stop + 1]
        done.append(Level(slots[before[these]], slots[sources[these]], own, costs[these], some))
    return Waits(tuple(done), size, slots[ends])


def _slots(last: Any, starts: list[int]) -> tuple[Any, int]:
    """A row of the table for each entry, given back after the last level that reads it; row 0 stays 0. And how many."""
    import numpy

    by_last = numpy.argsort(last, kind="stable")
    given_back = [0, *numpy.searchsorted(last[by_last], range(len(starts) - 1), side="right").tolist()]
    slots, unused, size = numpy.zeros(len(last) + 1, dtype="int64"), [], 1
    for level, (start, stop) in enumerate(pairwise(starts)):
        unused += slots[by_last[given_back[level] : given_back[level + 1]] + 1].tolist()
        more = max(0, stop - start - len(unused))
        unused += range(size, size + more)
        size += more
        slots[start + 1 : stop + 1] = unused[len(unused) - (stop - start) :]
        del unused[len(unused) - (stop - start) :]
    return slots, size


def _levels(sources: list[int], begins: list[int]) -> list[int]:
    """Of each entry, how many wait for one another before it. begins: of each stage, its first entry, and the end."""
    levels = [-1] * len(sources)
    stages = list(pairwise(begins))
    reached = [begin for begin, _ in stages]
    moving = True
    while moving:
        moving = False
        for stage, (begin, end) in enumerate(stages):
            entry = reached[stage]
            last = levels[entry - 1] if entry > begin else -1
            while entry < end:
                source = sources[entry]
                if source >= 0:
                    level = levels[source]
                    if level < 0:
                        break
                    if level > last:
                        last = level
                last += 1
                levels[entry] = last
                entry += 1
            if entry > reached[stage]:
                reached[stage] = entry
                moving = True
    return levels


def _ways(order: Order) -> tuple[Any, Any]:
    """Two functions of (kind, stage, chunk): whose output some work reads, and whether its own goes to another stage."""
    after: dict[tuple[int, int], tuple[int, int]] = {}
    before: dict[tuple[int, int], tuple[int, int]] = {}
    for route in order.routes:
        for here, there in pairwise(route):
            after[here], before[there] = there, here

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
    shapes: Sequence[int],
    forward: Any,
    backward: Any,
    weight: Any,
    send: Any,
    *,
    overlap_send: bool,
    put_off: tuple[int, ...] = (),
) -> Any:
    """Simulate a schedule and return its duration for each layout [s]; raises nothing, the order of work being valid.

    kinds: of each chunk, stage after stage, which row of `forward`, `backward` and `weight` has its times; those are
    [kinds, layouts], `backward` the gradient of the input where the schedule splits it, else the whole; send: [layouts]
    """
    import numpy

    order = waits(schedule, stages, batches, len(shapes) // stages if schedule == "interleaved" else None, put_off)
    total = numpy.empty(forward.shape[1])
    places = numpy.array([kind * KINDS + cost for kind in shapes for cost in range(KINDS)])
    rows = [places[level.cost] for level in order.levels]
    widest = max(len(cost) for cost in rows)
    step = max(1, ELEMENTS // (2 * order.rows + 2 * widest + KINDS * len(forward)))
    columns = min(step, forward.shape[1])
    # When a stage is free again, and when what it sent has arrived; they are one where a stage waits for its send.
    tables = numpy.zeros((2, order.rows, columns))
    buffers = numpy.empty((2, widest, columns))
    for begin in range(0, forward.shape[1], step):
        part = slice(begin, begin + step)
        f, b, w = (seconds[:, part] for seconds in (forward, backward, weight))
        way, width = send[part], f.shape[1]
        times = numpy.zeros((len(f), KINDS, width))
        for kind, seconds in enumerate((f, b, w, b + w)):
            times[:, kind] = seconds
        costs = times.reshape(-1, width)
        free, arrived = tables[0, :, :width], tables[int(overlap_send), :, :width]
        for level, cost in zip(order.levels, rows, strict=True):
            now, other = (buffer[: len(cost), :width] for buffer in buffers)
            numpy.take(free, level.before, axis=0, out=now, mode="clip")
            numpy.take(arrived, level.source, axis=0, out=other, mode="clip")
            numpy.maximum(now, other, out=now)
            now += costs.take(cost, axis=0, out=other, mode="clip")
            if overlap_send:
                free[level.own] = now
            now += way if level.leaves is None else level.leaves * way
            arrived[level.own] = now
        total[part] = free[order.ends].max(axis=0)
    return total


def least(
    schedule: str, stages: int, batches: Any, shapes: Sequence[int], forward: Any, backward: Any, send: Any
) -> Any:
    """Return a lower bound of a schedule's duration for each layout [s], without simulating it.

    A stage is busy for all micro-batches. Before, the first one has passed the stages before it; and where a backward is
    not split, the last one passes them after it. Rounding is allowed for.

    kinds: as in `play`; forward, backward: [kinds, layouts], the gradients of weights among the backward; send, batches:
    [layouts]
    """
    import numpy

    chunks = len(shapes) // stages
    make_ups = [tuple(shapes[stage * chunks : (stage + 1) * chunks]) for stage in range(stages)]
    lasts = {make_up: stage for stage, make_up in enumerate(make_ups)}
    splits, both = schedule not in ("1f1b", "gpipe", "interleaved"), schedule == "dualpipe"
    work = forward + backward
    passed, hop = (forward, send) if splits else (work, 2 * send)
    bound: Any = None
    for make_up, last in lasts.items():
        busy = sum(work[row] for row in make_up)
        # With DualPipe a micro-batch passes one of the two chunks, and the first one comes from either end.
        value = batches * busy / 2 if both else batches * busy + last * hop
        before = [make_up[0] for make_up in make_ups[: 0 if both else last]]
        for row in dict.fromkeys(before):
            value = value + before.count(row) * passed[row]
        bound = value if bound is None else numpy.maximum(bound, value)
    return bound * (1 - 1e-9)
