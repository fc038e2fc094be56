"""A pipeline schedule played through: every piece of work starts once its stage is free and its input has come.

Exact for the order of work it is given, for any times. Letters as in `schedule`.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import msgspec

from loadgauge.core.base import LayoutError, Size
from loadgauge.core.estimate.schedule.orders import BW, KINDS, PAIR_BW, PAIR_END, PAIR_F, PAIR_WAIT, B, F, Order, W

Times: TypeAlias = "float | Sequence[float] | Sequence[Sequence[float]]"
"""Seconds of one micro-batch: the same on every stage, or one number a stage, or one a chunk: `times[stage][chunk]`."""


class Event(NamedTuple):
    """One piece of work with its start and end, in seconds from the start of the step."""

    stage: int
    kind: str
    microbatch: int
    chunk: int
    start: Size
    end: Size


class Simulation(msgspec.Struct, frozen=True, dict=True):
    """A schedule played through. Times in seconds; tuples hold one number a stage.

    total: from the first work to the end of the slowest stage
    busy: working (the fixed time at the end included); idle: the rest of `total`, the bubble
    sending: the part of `idle` in which a stage waits for its own send (only where sends do not overlap)
    first, last: when a stage's first work starts and its last ends (the fixed time at the end included)
    """

    order: Order
    total: Size
    busy: tuple[Size, ...]
    idle: tuple[Size, ...]
    sending: tuple[Size, ...]
    first: tuple[Size, ...]
    last: tuple[Size, ...]
    costs: tuple[tuple[Size, ...], ...]
    starts: tuple[Sequence[Size], ...]

    @property
    def bubble_fraction(self) -> Size:
        """The idle share of all stages' time: (p - 1) / (m + p - 1) for 1F1B with equal stages."""
        return sum(self.idle) / (len(self.idle) * self.total) if self.total else 0

    def events(self, stage: int) -> list[Event]:
        """Return every piece of work of one stage, by start [s].

        Of a pair (DualPipe) the forward is drawn first and the backward after it, though they overlap.
        """
        work = zip(self.order.work(stage), self.spans(stage), strict=True)
        return [Event(stage, kind, number, chunk, *span) for (kind, number, chunk, _), span in work]

    def spans(self, stage: int) -> list[tuple[Size, Size]]:
        """Return start and end of every piece of work of one stage, as `Order.work` has them [s]."""
        chunks, costs = self.order.chunks, self.costs[stage]
        rows = zip(self.order.rows[stage], self.starts[stage], strict=True)
        return [(start, start + costs[row]) for row, start in rows if KINDS[row // chunks]]

    @cached_property
    def timeline(self) -> tuple[Event, ...]:
        """The events of all stages, stage by stage [s]; built on first access."""
        return tuple(event for stage in range(self.order.stages) for event in self.events(stage))


def run(
    order: Order,
    *,
    forward: Times,
    backward: Times,
    weight: Times = 0,
    send: float | Sequence[float] = 0,
    overlap_send: bool = True,
    tail: float | Sequence[float] = 0,
    pair: float = 1,
) -> Simulation:
    """Play any order of work through; arguments as in `simulate`. Raises `LayoutError` where it deadlocks."""
    tails = _row("tail", tail, order.stages)
    costs = _costs(order, forward, backward, weight, _positive("pair", pair))
    links = _row("send", send, order.stages if order.schedule == "interleaved" else order.stages - 1)
    tables, holds = _tables(order, costs, links, overlap_send)

    starts: list[list[Size]] = [[] for _ in range(order.stages)]
    waiting = [
        _stage(zip(map(table.__getitem__, rows), numbers, strict=True), begun)
        for table, rows, numbers, begun in zip(tables, order.rows, order.microbatches, starts, strict=True)
    ]
    done = -1
    while waiting:
        if done == (done := sum(map(len, starts))):
            raise LayoutError(_stuck(order, starts))
        # The other way round each time: forwards travel down the stages, backwards up.
        waiting = [stage for stage in reversed(waiting) if next(stage, None)]

    first, last, busy, sending = [], [], [], []
    for stage, rows in enumerate(order.rows):
        counts = Counter(rows)
        busy.append(sum(count * costs[stage][row] for row, count in counts.items()) + tails[stage])
        sending.append(sum(count * holds[stage][row] for row, count in counts.items()))
        first.append(starts[stage][0])
        last.append(starts[stage][-1] + costs[stage][rows[-1]] + holds[stage][rows[-1]] + tails[stage])
    total = max(last)
    idle = tuple(max(total - each, 0) for each in busy)  # sums of floats may differ in the last bit
    return Simulation(
        order=order,
        total=total,
        busy=tuple(busy),
        idle=idle,
        sending=tuple(sending),
        first=tuple(first),
        last=tuple(last),
        costs=costs,
        starts=tuple(map(tuple, starts)),
    )


_Entry: TypeAlias = "tuple[list[Any], Size, Size, Size, list[Any]]"


def _stage(entries: Iterator[tuple[_Entry, int]], begun: list[Size]) -> Iterator[bool]:
    """One stage: works until an input is missing, hands over, and goes on from there. All of the time goes in here."""
    now: Size = 0
    begin = begun.append
    for (source, lag, cost, hold, output), number in entries:
        arrival = source[number]
        while arrival is None:
            yield True
            arrival = source[number]
        arrival += lag
        if arrival > now:
            now = arrival
        begin(now)
        now += cost
        output[number] = now
        now += hold


def _tables(
    order: Order, costs: tuple[tuple[Size, ...], ...], links: list[Size], overlap_send: bool
) -> tuple[list[list[_Entry]], list[list[Size]]]:
    """Per stage and row: where its input appears, the way from there, its time, its send, where its output appears."""
    batches, size = order.num_microbatches, order.chunks
    at_hand, nowhere = [0] * batches, [0] * batches
    forwards = {part: [None] * batches for route in order.routes for part in route}
    backwards = {part: [None] * batches for route in order.routes for part in route}
    blank: _Entry = (at_hand, 0, 0, 0, nowhere)
    tables = [[blank] * (len(KINDS) * size) for _ in range(order.stages)]
    holds: list[list[Size]] = [[0] * (len(KINDS) * size) for _ in range(order.stages)]

    def way(here: tuple[int, int] | None, there: tuple[int, int]) -> Size:
        if here is None or here[0] == there[0]:
            return 0
        return links[min(here[0], there[0])] if abs(here[0] - there[0]) == 1 else links[order.stages - 1]

    for route in order.routes:
        for hop, part in enumerate(route):
            stage, chunk = part
            before = route[hop - 1] if hop else None
            after = route[hop + 1] if hop + 1 < len(route) else None
            down, up = way(after, part), way(before, part)
            hold_down, hold_up = (0, 0) if overlap_send else (down, up)
            activation = forwards[before] if before else at_hand
            gradient = backwards[after] if after else forwards[part]
            cost = costs[stage]
            for kind, source, lag, hold, output in (
                (F, activation, up, hold_down, forwards[part]),
                (B, gradient, down, hold_up, backwards[part]),
                (W, backwards[part], 0, 0, nowhere),
                (BW, gradient, down, hold_up, backwards[part]),
                (PAIR_WAIT, gradient, down, 0, nowhere),
                (PAIR_F, activation, up, 0, nowhere),
                (PAIR_BW, gradient, down, hold_up, backwards[part]),
                (PAIR_END, at_hand, 0, hold_down, forwards[part]),
            ):
                row = kind * size + chunk
                tables[stage][row] = (source, lag, cost[row], hold, output)
                holds[stage][row] = hold
    return tables, holds


def _costs(order: Order, forward: Times, backward: Times, weight: Times, pair: Size) -> tuple[tuple[Size, ...], ...]:
    """Seconds per stage and row."""
    f, b, w = (
        _grid(name, times, order) for name, times in (("forward", forward), ("backward", backward), ("weight", weight))
    )
    table = []
    for stage in range(order.stages):
        whole = [first + second for first, second in zip(b[stage], w[stage], strict=True)]
        nothing = [0] * order.chunks
        rows = {
            F: f[stage],
            B: b[stage],
            W: w[stage],
            BW: whole,
            PAIR_WAIT: nothing,
            PAIR_END: nothing,
            PAIR_F: [pair * each for each in f[stage]],
            PAIR_BW: [pair * each for each in whole],
        }
        table.append(tuple(each for kind in range(len(KINDS)) for each in rows[kind]))
    return tuple(table)


def _grid(name: str, times: Any, order: Order) -> list[list[Size]]:
    """Seconds per stage and chunk."""
    if hasattr(times, "__len__") and len(times) == order.stages and hasattr(times[0], "__len__"):
        return [_row(f"{name} of stage {stage}", times[stage], order.chunks) for stage in range(order.stages)]
    row = _row(name, times, order.stages)
    if order.split > 1:
        return [[seconds / order.split] * order.chunks for seconds in row]
    grid: list[list[Size]] = [[0] * order.chunks for _ in range(order.stages)]
    for route in order.routes:  # with two directions a stage of the model sits on two stages of the pipeline
        for hop, (stage, chunk) in enumerate(route):
            grid[stage][chunk] = row[hop]
    return grid


def _row(name: str, values: Any, count: int) -> list[Size]:
    """One number for each, from one for all or from a sequence."""
    if not hasattr(values, "__len__"):
        return [_positive(name, values)] * count
    if len(values) != count:
        raise LayoutError(f"{name} needs {count} numbers, one for each, or one for all, got {len(values)}")
    return [_positive(name, value) for value in values]


def _positive(name: str, value: Any) -> Size:
    if not 0 <= value < float("inf"):
        raise LayoutError(f"{name} must be a time of at least 0, got {value}")
    return value


def _stuck(order: Order, starts: list[list[Size]]) -> str:
    """Return which stage waits for what, when no stage can go on."""
    for stage, (rows, begun) in enumerate(zip(order.rows, starts, strict=True)):
        if len(begun) < len(rows):
            kind, chunk = divmod(rows[len(begun)], order.chunks)
            number = order.microbatches[stage][len(begun)]
            name = KINDS[kind] or "BW"
            return (
                f"{order.schedule} deadlocks: stage {stage} waits for the input of {name} of micro-batch {number} "
                f"on chunk {chunk}, which never comes"
            )
    raise AssertionError("no stage is stuck")
