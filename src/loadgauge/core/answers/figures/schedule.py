"""The pipeline schedule, played through with the times of this layout."""

from typing import Any

from loadgauge.core.answers.figure import Figure
from loadgauge.core.base.algebra import Size
from loadgauge.core.definitions.layout.layout import Layout
from loadgauge.core.estimate.result import Estimate
from loadgauge.core.estimate.schedule.simulate import Event

MICROBATCHES, STAGES = 16, 16
"""Micro-batches and pipeline stages that are drawn, where there are more."""
COLUMNS = ("stage", "start", "end", "kind", "microbatch", "chunk", "live")
CELLS, MOST = 2560, 100_000
"""Pieces of work that are drawn, and that a trace has, as far as the schedule lets fewer micro-batches be played."""
Flights = tuple[tuple[int, ...], tuple[int, ...]]


@Figure(title="Pipeline schedule", form="timeline", order=4, plot="schedule", row=3, needs="stages")
def schedule(result: Estimate, *, whole: bool = False) -> dict[str, Any]:
    """Return every piece of work: stage, start, end [s], kind, micro-batch, chunk, and bytes the stage holds for backward.

    whole: all stages, and micro-batches up to `MOST` pieces of work; else as many as can be drawn

    A forward holds its own micro-batch already, a backward still. `seconds` and `bubble` are of the micro-batches shown;
    `step_bubble` is the share of the whole step, by the estimate. Without a known time, a forward takes 1.
    """
    layout, workings = result.layout, result.workings
    memory = workings.memory
    stages = layout.pp if whole else min(layout.pp, STAGES)
    most = (MOST if whole else CELLS) // (2 * layout.chunks * stages)
    batches = playable(layout, max(2, most if whole else min(MICROBATCHES, most)))
    played = workings.play(batches, timed=result.time is not None)
    drawn = list(range(stages)) if whole else drawn_stages(layout.pp, result.memory.rank.stage)
    bytes_of: dict[object, tuple[list[tuple[Size, Size]], dict[Flights, Size]]] = {}
    cells = []
    for index in drawn:
        stage = workings.stages[index]
        key = memory.make_up(stage)
        if key not in bytes_of:
            chunks = [memory.of_chunk(stage, chunk) for chunk in stage.chunks]
            bytes_of[key] = [(each.kept + each.head, each.waiting + each.head_waiting) for each in chunks], {}
        (each, kept), events = bytes_of[key], played.events(index)
        for (_, *work, start, end), flight in zip(events, flights(events, played.order.chunks), strict=True):
            if flight not in kept:
                kept[flight] = live(flight, each)
            cells.append([index, start, end, *work, kept[flight]])
    time = result.time
    return {
        "schedule": layout.schedule,
        "stages": layout.pp,
        "stages_shown": drawn,
        "microbatches": int(layout.num_microbatches),
        "microbatches_shown": batches,
        "chunks": played.order.chunks,
        "columns": COLUMNS,
        "cells": cells,
        "seconds": played.total,
        "bubble": played.bubble_fraction,
        "step_bubble": None if time is None else time.parts["bubble"] / time.step,
        "timed": time is not None,
        "shown": shortened(layout.pp, int(layout.num_microbatches), drawn, batches),
    }


def playable(layout: Layout, wanted: int) -> int:
    """Return about `wanted` micro-batches: a number the schedule can run, at most as many as the job has."""
    if layout.schedule == "interleaved":
        wanted = -(-wanted // layout.pp) * layout.pp
    elif layout.schedule in ("dualpipe", "dualpipev"):
        wanted = max(wanted + wanted % 2, 2 * layout.pp)
    return min(int(layout.num_microbatches), wanted)


def drawn_stages(stages: int, worst: int) -> list[int]:
    """Return the stages to draw: all, or the first ones, the last ones and the one that needs the most memory (`worst`).

    >>> drawn_stages(4, 0), len(drawn_stages(64, 30)), 30 in drawn_stages(64, 30)
    ([0, 1, 2, 3], 16, True)
    """
    if stages <= STAGES:
        return list(range(stages))
    half = STAGES // 2
    chosen = {*range(half), *range(stages - half, stages)}
    if worst not in chosen:
        chosen = (chosen - {half - 1}) | {worst}
    return sorted(chosen)


def shortened(stages: int, batches: int, drawn: list[int], played: int) -> str:
    """Return in one line what was left out of the figure; empty where nothing was.

    >>> shortened(4, 64, [0, 1, 2, 3], 16)
    '16 of 64 micro-batches'
    """
    left_out = [f"{played} of {batches} micro-batches"] if played < batches else []
    return ", ".join(left_out + ([f"{len(drawn)} of {stages} stages"] if len(drawn) < stages else []))


def flights(events: list[Event], chunks: int) -> list[Flights]:
    """Return, for each event of a stage, the micro-batches by chunk between forward and backward, and those waiting for W.

    >>> work = [Event(0, kind, number, 0, 0, 0) for kind, number in (("F", 0), ("F", 1), ("B", 0), ("W", 0))]
    >>> flights(work, 1)
    [((1,), (0,)), ((2,), (0,)), ((2,), (0,)), ((1,), (1,))]
    """
    whole, waiting = [0] * chunks, [0] * chunks
    in_flight, waits = [], tuple(waiting)
    for _, kind, _, chunk, _, _ in events:
        whole[chunk] += kind == "F"
        in_flight.append((tuple(whole), waits))
        whole[chunk] -= kind in ("B", "BW")
        if kind in ("B", "W"):
            waiting[chunk] += 1 if kind == "B" else -1
            waits = tuple(waiting)
    return in_flight


def live(flight: Flights, chunks: list[tuple[Size, Size]]) -> Size:
    """Return the bytes kept for backward. chunks: of each, bytes of a micro-batch in flight, and of one that waits for W"""
    whole, waiting = flight
    total: Size = 0
    for number, (kept, waits) in enumerate(chunks):
        total = total + (whole[number] * kept + waiting[number] * waits)
    return total
