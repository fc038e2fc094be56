"""The pipeline schedule, played through with the times of this layout."""

from functools import lru_cache
from typing import Any

from loadgauge.core.answers.figure import Figure
from loadgauge.core.base.algebra import Size
from loadgauge.core.definitions.layout.layout import Layout
from loadgauge.core.estimate.result import Estimate
from loadgauge.core.estimate.schedule.orders import Order

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
    bytes_of: dict[object, list[tuple[Size, Size]]] = {}
    cells: list[list[Any]] = []
    for index in drawn:
        stage = workings.stages[index]
        key = memory.make_up(stage)
        if key not in bytes_of:
            chunks = [memory.of_chunk(stage, chunk) for chunk in stage.chunks]
            bytes_of[key] = [(each.kept + each.head, each.waiting + each.head_waiting) for each in chunks]
        held, work = flights(played.order, index)
        kept = [live(flight, bytes_of[key]) for flight in held]
        rows = zip(played.spans(index), work, strict=True)
        cells += ([index, *span, kind, number, chunk, kept[finds]] for span, (kind, number, chunk, finds) in rows)
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


@lru_cache(maxsize=64)
def flights(order: Order, stage: int) -> tuple[tuple[Flights, ...], tuple[tuple[str, int, int, int], ...]]:
    """Return what a stage has in flight, each once, and its work: kind, micro-batch, chunk, place in these of what it finds.

    In flight are micro-batches by chunk, those between forward and backward and those waiting for W.

    >>> from loadgauge.core.estimate.schedule.orders import order_of_work
    >>> flights(order_of_work("1f1b", 2, 2), 0)
    ((((1,), (0,)), ((2,), (0,))), (('F', 0, 0, 0), ('F', 1, 0, 1), ('BW', 0, 0, 1), ('BW', 1, 0, 0)))
    """
    whole, waiting = [0] * order.chunks, [0] * order.chunks
    places: dict[Flights, int] = {}
    pieces = []
    for kind, number, chunk, _ in order.work(stage):
        whole[chunk] += kind == "F"
        seen = places.setdefault((tuple(whole), tuple(waiting)), len(places))
        pieces.append((kind, number, chunk, seen))
        whole[chunk] -= kind in ("B", "BW")
        waiting[chunk] += (kind == "B") - (kind == "W")
    return tuple(places), tuple(pieces)


def live(flight: Flights, chunks: list[tuple[Size, Size]]) -> Size:
    """Return the bytes kept for backward. chunks: of each, bytes of a micro-batch in flight, and of one that waits for W"""
    whole, waiting = flight
    total: Size = 0
    for number, (kept, waits) in enumerate(chunks):
        total = total + (whole[number] * kept + waiting[number] * waits)
    return total
