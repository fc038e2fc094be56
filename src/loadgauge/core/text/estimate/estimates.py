"""A sweep of estimates as text: every cell on a line, and where two fields are swept, memory as a grid of them."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from loadgauge.core.answers.answer import Answer
from loadgauge.core.base import NO, exit_code, in_gib, need, refuse, seconds, sums
from loadgauge.core.plan.space.estimates import CANNOT_TELL, columns as columns_of
from loadgauge.core.plan.space.grid import Row
from loadgauge.core.text.estimate.setup import rate
from loadgauge.core.text.table import Column, Paper, draw, points
from loadgauge.core.text.verdict import WORDS

SHORT = {"fits": "", "unknown": "", "depends": " depends", "tight": " tight", "does not fit": " NO"}
"""What stands behind the memory of a cell in a grid."""


class Swept(Answer, frozen=True, kw_only=True):
    """A sweep of estimates. output: the file that has every column, if any; `command` is without what is swept"""

    form: str = "estimate.sweep"
    writer: str = "loadgauge.core.text.estimate.estimates:write"
    cells: list[Row]
    axes: Mapping[str, Sequence[Any]]
    output: str | None = None

    @classmethod
    def of(cls, cells: list[Row], axes: Mapping[str, Sequence[Any]], *, allow_tight: bool = False, **more: Any) -> Self:
        """Return the answer of a sweep's cells; its code is 0 where one of them fits."""
        outcomes = {row["outcome"] for row in cells} - {CANNOT_TELL}
        code = min((exit_code(word, allow_tight=allow_tight) for word in outcomes), default=NO)
        failed = "" if outcomes else f"no cell of the sweep is a run: {cells[0]['error']}"
        table = [{name: row.get(name) for name in columns_of(list(axes))} for row in cells]
        document = {"axes": axes, "cells": cells}
        return cls(cells=cells, axes=axes, code=code, failed=failed, table=table, document=document, **more)

    def plot(self, file: Path, figure: str) -> None:
        refuse(figure != "all", "works for one estimate; a sweep has one figure", key="figure")
        need("FIGURES").plot_sweep(self.cells, self.axes, file, self.command)


def write(answer: Swept, target: Paper, *, brief: bool = False) -> None:
    """Write the cells of a sweep; brief: how many fit"""
    rows, axes = answer.cells, answer.axes
    target.print(answer.command, style="bold", soft_wrap=True)
    if brief:
        points(target, [summary(rows)], "")
        return
    target.print()
    _cells(target, rows, list(axes))
    if len(axes) == 2 and all(len(values) > 1 for values in axes.values()):
        _grid(target, rows, axes)
    wrong = sums((row["error"], 1) for row in rows if "error" in row)
    target.print()
    if wrong:
        points(
            target,
            [f"cannot tell{f' ({count} cells)' if count > 1 else ''}: {error}" for error, count in wrong.items()],
        )
    points(target, [summary(rows)], "", "dim")
    if answer.output is not None:
        target.print(f"Every column: {answer.output}", soft_wrap=True)


def summary(rows: Sequence[Row]) -> str:
    """Say how many cells fit. What needs memory on no given card counts as neither.

    >>> summary([{"outcome": "fits"}, {"outcome": "does not fit"}])
    '2 cells: 1 fits, 1 does not.'
    """
    counts = {word: sum(row["outcome"] == word for row in rows) for word in (*WORDS, CANNOT_TELL)}
    parts = [
        f"{counts['fits']} {'fits' if counts['fits'] == 1 else 'fit'}" if counts["unknown"] < len(rows) else "",
        *(f"{counts[word]} {word}" for word in ("depends", "tight") if counts[word]),
        f"{counts['does not fit']} {'does' if counts['does not fit'] == 1 else 'do'} not"
        if counts["does not fit"]
        else "",
        f"{counts[CANNOT_TELL]} cannot be told" if counts[CANNOT_TELL] else "",
    ]
    text = ", ".join(part for part in parts if part)
    if counts["unknown"]:
        text = ", ".join(part for part in (text, "no --gpu, so no verdict") if part)
    return f"{len(rows):,} cell{'s' if len(rows) != 1 else ''}: {text}."


def _cells(target: Paper, rows: Sequence[Row], axes: Sequence[str]) -> None:
    has = {name for row in rows for name, value in row.items() if value}
    judged = bool(has & {"memory_capacity", "error"})
    counted = {row["counted"] for row in rows if row.get("counted")}
    speed = Column(f"{counted.pop()}/s/GPU" if len(counted) == 1 else "per s/GPU", "right")
    beside = BESIDE | {"tokens_per_second_per_gpu": speed}
    columns = {
        **{name: Column(name.replace("_", " "), "right" if _numbers(rows, name) else "left") for name in axes},
        **({"outcome": Column("verdict")} if judged else {}),
        "memory_total": Column("GiB", "right"),
        "range": Column("80 % range", "right", rank=2),
        **{name: column for name, column in beside.items() if LEFT.get(name, name) in has},
    }
    draw(target, list(columns.values()), [[_cell(row, name, axes) for name in columns] for row in rows])


BESIDE = {
    "missing": Column("lacks", "right", rank=1),
    "largest_activations": Column("activations", "right", rank=1),
    "on_host": Column("GiB of a host", "right", rank=1),
    "step": Column("step", "right"),
    "tokens_per_second_per_gpu": Column("tokens/s/GPU", "right"),
    "mfu": Column("MFU", "right", rank=1),
    "days": Column("days", "right"),
    "cost": Column("cost", "right", rank=1),
}
"""Columns that stand where a cell has such a value."""
LEFT = {"missing": "memory_capacity"}
"""Columns that stand where a cell has another one's value."""
FORMATS: Mapping[str, Callable[[Any], str]] = {
    "outcome": lambda word: WORDS[word][0],
    "memory_total": lambda nbytes: in_gib(nbytes, 1),
    "step": seconds,
    "mfu": "{:.1%}".format,
    "on_host": lambda nbytes: in_gib(nbytes, 1),
    "missing": lambda nbytes: in_gib(nbytes, 1) if nbytes else "",
    "largest_activations": lambda nbytes: in_gib(nbytes, 2),
    "tokens_per_second_per_gpu": rate,
    "days": "{:,.1f}".format,
    "cost": "{:,.0f}".format,
}
"""How the columns of a cell are written."""


def _cell(row: Row, name: str, axes: Sequence[str]) -> str:
    if name in axes:
        return _shown(row[name])
    if "error" in row:
        return CANNOT_TELL if name == "outcome" else ""
    if name == "range":
        return f"{in_gib(row['memory_low'], 1)}-{in_gib(row['memory_high'], 1)}"
    return "" if row.get(name) is None else FORMATS[name](row[name])


def _grid(target: Paper, rows: Sequence[Row], axes: Mapping[str, Sequence[Any]]) -> None:
    """Memory by the two swept fields, in GiB."""
    (down, ups), (across, steps) = axes.items()
    cells = {(row[down], row[across]): row for row in rows}
    draw(
        target,
        [
            Column(down.replace("_", " "), "right" if _numbers(rows, down) else "left"),
            *(Column(f"{across.replace('_', ' ')} {_shown(step)}", "right") for step in steps),
        ],
        [[_shown(up), *(_memory(cells[up, step]) for step in steps)] for up in ups],
        "Memory of the fullest rank [GiB]",
    )


def _memory(row: Row) -> str:
    return CANNOT_TELL if "error" in row else f"{in_gib(row['memory_total'], 1)}{SHORT[row['outcome']]}"


def _numbers(rows: Sequence[Row], name: str) -> bool:
    return all(isinstance(row[name], int | float) and not isinstance(row[name], bool) for row in rows)


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else f"{value:g}" if isinstance(value, float) else str(value)
