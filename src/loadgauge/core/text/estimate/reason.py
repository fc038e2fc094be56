"""The plain text of a reason: the formulas of FLOPs, time, traffic, money and bandwidth with the run's numbers in them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loadgauge.core.answers.why.reason import Line, Reason
from loadgauge.core.base.units import count, flops, gib, seconds
from loadgauge.core.text.table import Column, console, draw, heading, points

if TYPE_CHECKING:
    from rich.console import Console


def show(reason: Reason) -> None:
    """Print a reason: the value, each formula in letters and in numbers, what it is summed from, notes and sources."""
    from rich.text import Text

    target = console()
    value = "" if reason.value is None else f": {measured(reason.value, reason.unit)}"
    target.print(Text(f"{reason.topic}: {reason.what}{value}", style="bold"), soft_wrap=True)
    points(target, [f"Rule: {reason.rule}. Basis: {reason.basis}."], "")
    for line in reason.lines:
        _line(target, line)
    if reason.rows:
        columns = [Column(reason.columns[0], wrap=True), *(Column(name, "right") for name in reason.columns[1:])]
        rows = [[one if isinstance(one, str) else _short(one) for one in row] for row in reason.rows]
        draw(target, columns, rows, "What it is summed from")
    for title, lines in (("Notes", (*reason.notes, *reason.see)), ("Sources", reason.sources)):
        if lines:
            heading(target, title)
            points(target, lines)


def _line(target: Console, line: Line) -> None:
    heading(target, line.what[:1].upper() + line.what[1:])
    # Formulas are never broken into lines: they are there to be copied.
    if line.letters:
        target.print(f"  {line.letters}", soft_wrap=True, highlight=False)
        target.print(f"  = {line.numbers}", soft_wrap=True, highlight=False)
    target.print(f"  = {measured(line.value, line.unit)}", soft_wrap=True, highlight=False)
    points(target, (f"{name} = {_short(value)}: {meaning}" for name, (meaning, value) in line.legend.items()), "    ")


def _short(value: float) -> str:
    return f"{round(value):,}" if value == round(value) or abs(value) >= 1e6 else f"{value:,.6g}"


def measured(value: float, unit: str) -> str:
    """Format a value with its unit, and in a larger one where that is shorter to read.

    >>> measured(1.5, "s"), measured(2**31, "byte"), measured(0.448, "share"), measured(3.5e11, "byte/s")
    ('1.5 s', '2,147,483,648 byte (2.00 GiB)', '0.448 (44.8 %)', '350,000,000,000 byte/s (350 GB/s, 2,800 Gbit/s)')
    """
    written = f"{_short(value)} {unit}"
    if unit == "share":
        return f"{_short(value)} ({value:.1%})".replace("%", " %")
    if unit == "s":
        short = seconds(value)
        return written if short == written else f"{written} ({short})"
    if unit == "byte":
        return f"{_short(round(value))} {unit} ({gib(value)})" if abs(value) >= 2**20 else written
    if unit == "byte/s":
        return f"{_short(round(value))} {unit} ({value / 1e9:,.4g} GB/s, {8 * value / 1e9:,.4g} Gbit/s)"
    if unit == "FLOP":
        return f"{written} ({flops(value)})" if value >= 1e6 else written
    return f"{written} ({count(value)})" if value >= 1e6 else written
