"""A sweep as text: the best cell for each model and size, what fits nowhere, what failed and why."""

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from loadgauge._version import __version__
from loadgauge.core.answers.answer import Answer
from loadgauge.core.answers.plan.progress import clear, progress
from loadgauge.core.base import Error, in_gib, lists, seconds as duration
from loadgauge.core.plan.space.grid import DEATHS, Row, run
from loadgauge.core.text.table import Column, Paper, draw, heading, points
from loadgauge.sheets.sweep.cells import cells, columns, lost, work
from loadgauge.sheets.sweep.results import Results
from loadgauge.sheets.sweep.workers import Interrupt, OnRay, Processes, processors

MOST_ROWS, MOST_REASONS, MOST_CELLS = 40, 12, 200
INPUTS = ("gpu", "nic_bandwidth", "link_bandwidth", "seq_len", "global_batch", "precision", "framework", "optimizer")
"""Inputs with a column in the table where they differ from cell to cell."""


def answer(file: str, output: str | None, workers: int | None, ray: str | None) -> Answer:
    """Plan the cells of a sweep file that have no result yet, and return all results.

    output: the folder of the results; workers: plans at a time; ray: the address of a Ray cluster. Raises `Error` when
    interrupted.
    """
    started = time.perf_counter()
    output = output or f"{Path(file).stem}-results"
    wanted, files = cells(file)
    with Results(output, columns()) as results:
        there = results.rows()
        left = [cell for cell in wanted if cell.key not in there]
        done = {cell.key: there[cell.key] for cell in wanted if cell.key in there}
        resumed = len(done)
        if left:
            count = min(workers or processors(), len(left))
            pool = Processes(work, count) if ray is None else OnRay(work, ray, workers, files)
            failed = sum(row["code"] == 2 for row in done.values())
            with Interrupt() as interrupt:
                try:
                    for row in run(left, pool, results.add, lost, __version__):
                        done[row["cell"]] = row
                        failed += row["code"] == 2
                        ahead = (time.perf_counter() - started) * (len(wanted) - len(done)) / (len(done) - resumed)
                        progress(len(done), len(wanted), f"cells, {failed:,} failed, {ahead:,.0f} s to go")
                        interrupt.check()
                except KeyboardInterrupt:
                    cells_done = f"{len(done):,} of {len(wanted):,} cells are done"
                    raise Error(f"interrupted: {cells_done}; the same command continues from there") from None
                finally:
                    clear()
    rows = [done[cell.key] for cell in wanted]
    others = sum(key not in done for key in there)
    given_up = sum(row["code"] == 2 and row["deaths"] >= DEATHS for row in rows)
    seconds = time.perf_counter() - started
    counts = [sum(row["code"] == code for row in rows) for code in (0, 1, 2)]
    return Answer(
        form="plan.sweep",
        writer="loadgauge.sheets.sweep.text:write",
        shown=(rows, output, counts, resumed, others, given_up, seconds),
        document={
            "output": output,
            "cells": len(rows),
            "resumed": resumed,
            "planned": len(rows) - resumed,
            "others": others,
            **dict(zip(("fits", "nothing_fits", "cannot_tell"), counts, strict=True)),
            "lost": given_up,
            "seconds": seconds,
            "best": [row["cell"] for row in leaders(rows)],
            "results": [{name: value for name, value in row.items() if value is not None} for row in rows],
        },
        table=[{name: row.get(name) for name in columns()} for row in rows],
        code=2 if given_up else min(int(row["code"]) for row in rows),
    )


def write(answer: Answer, target: Paper, *, brief: bool = False) -> None:
    """Write the results of a sweep; brief: without every cell

    resumed: cells that had a result already; others: results of other cells; lost: cells whose workers died
    """
    rows, output, counts, resumed, others, lost, seconds = answer.shown
    best = leaders(rows)
    if best:
        _table(target, rows, best)
    if len(rows) > len(best) and not brief:
        _every(target, rows)
    _reasons(target, [row for row in rows if row["code"] == 1], "Nothing fits", len(rows))
    _reasons(target, [row for row in rows if row["code"] == 2], "Failed", len(rows))
    before = f" ({resumed:,} planned before)" if resumed else ""
    lines = [
        "",
        f"{len(rows):,} cells{before}: {counts[0]:,} fit, {counts[1]:,} do not fit, {counts[2]:,} failed;"
        f" {seconds:,.1f} s. Every result: {output} (Parquet).",
    ]
    if lost:
        lines.append(f"{lost:,} of these lost their workers and are not stored; the same command tries them again.")
    if others:
        lines.append(f"{others:,} more results in that folder are of other cells, or of another version of loadgauge.")
    points(target, lines, "", style="dim")


def leaders(rows: Iterable[Row]) -> list[Row]:
    """Return the best cell for each model and number of GPUs, in the order of the sweep.

    Cells planned for money are compared by the cost of a token, for headroom by free memory, all others by throughput, as
    their batches and lengths may differ.

    >>> slow, fast = (dict(model="m", gpus=8, objective="time", code=0, tokens_per_second_per_gpu=n) for n in (1, 2))
    >>> leaders([slow, fast, {**fast, "code": 1}]) == [fast]
    True
    """
    best: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        if row["code"] != 0:
            continue
        group = row["model"], row.get("gpus"), row.get("objective")
        if group not in best or _score(row) < _score(best[group]):
            best[group] = row
    return list(best.values())


def _score(row: Row) -> tuple[float, float]:
    """Return the quantity that is least for the best; a cell without a price comes after all that have one."""
    speed = -float(row["tokens_per_second_per_gpu"])
    if row["objective"] == "money":
        cost = row.get("cost_per_billion_tokens")
        return float("inf") if cost is None else cost, speed
    if row["objective"] == "headroom":
        return row["memory_total"] - row["memory_capacity"], speed
    return speed, 0.0


def _table(target: Paper, rows: Sequence[Row], best: Sequence[Row]) -> None:
    varied = [name for name in INPUTS if len({row.get(name) for row in rows}) > 1]
    prices = any(row.get("cost_per_billion_tokens") is not None for row in best)
    columns = [
        Column("model", wrap=True),
        Column("GPUs", "right"),
        *(Column(name.replace("_", " "), wrap=True) for name in varied),
        Column("step", "right"),
        Column("tokens/s/GPU", "right"),
        Column("MFU", "right"),
        Column("GiB", "right"),
        *([Column("cost of 10^9", "right")] if prices else []),
        Column("layout", wrap=True, wide=True),
    ]
    lines = []
    for row in best[:MOST_ROWS]:
        cost = row.get("cost_per_billion_tokens")
        lines.append(
            [
                row["model"],
                f"{row['gpus'] or 1:,}",
                *(_shown(row.get(name)) for name in varied),
                duration(row["step"]),
                f"{row['tokens_per_second_per_gpu']:,.0f}",
                f"{row['mfu']:.1%}",
                in_gib(row["memory_total"], 1),
                *([("" if cost is None else f"{cost:,.2f}")] if prices else []),
                row["layout"],
            ]
        )
    objectives = list(dict.fromkeys(row["objective"] for row in best))
    word = {("money",): "cheapest", ("headroom",): "roomiest"}.get(tuple(objectives), "fastest")
    draw(target, columns, lines, f"The {word if len(objectives) == 1 else 'best'} cell for each model and size")
    if len(best) > MOST_ROWS:
        points(target, [f"and {len(best) - MOST_ROWS:,} more"], "", style="dim")


def _every(target: Paper, rows: Sequence[Row]) -> None:
    """Every cell on a line: what is varied in it, and its best layout or what became of it."""
    varied = [name for name in INPUTS if len({row.get(name) for row in rows}) > 1]
    columns = [
        *(Column(name.replace("_", " "), wrap=True) for name in varied),
        Column("GiB", "right"),
        Column("step", "right"),
        Column("tokens/s/GPU", "right"),
        Column("MFU", "right", rank=1),
        Column("best layout", wrap=True, wide=True),
    ]
    lines = []
    for row in rows[:MOST_CELLS]:
        cell = [_shown(row.get(name)) for name in varied]
        if row["code"] != 0:
            lines.append([*cell, "", "", "", "", {1: "nothing fits"}.get(row["code"], "failed")])
            continue
        numbers = [in_gib(row["memory_total"], 1), duration(row["step"]), f"{row['tokens_per_second_per_gpu']:,.0f}"]
        lines.append([*cell, *numbers, f"{row['mfu']:.1%}", row["layout"]])
    draw(target, columns, lines, "Every cell")
    if len(rows) > MOST_CELLS:
        points(target, [f"and {len(rows) - MOST_CELLS:,} more, in the file"], "", style="dim")


def _shown(value: Any) -> str:
    return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def _reasons(target: Paper, rows: Sequence[Row], title: str, whole: int) -> None:
    """Cells without a layout, those with the same reason together."""
    if not rows:
        return
    heading(target, f"{title}: {len(rows):,} of {whole:,} cells")
    reasons = lists(((row["model"], row["error"]), row) for row in rows)
    lines = []
    for (model, error), same in list(reasons.items())[:MOST_REASONS]:
        sizes = sorted({row.get("gpus") or 1 for row in same})
        span = f"{sizes[0]:,}" if len(sizes) == 1 else f"{sizes[0]:,} to {sizes[-1]:,}"
        times = f" ({len(same):,} cells)" if len(same) > 1 else ""
        lines.append(f"{model} on {span} {_shown(same[0].get('gpu'))}{times}: {error}")
    points(target, lines)
    if len(reasons) > MOST_REASONS:
        points(target, [f"and {len(reasons) - MOST_REASONS:,} more reasons"], "", style="dim")
