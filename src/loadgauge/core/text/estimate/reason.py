"""The plain text of a reason: the formulas of FLOPs, time, traffic, money and bandwidth with the run's numbers in them."""

from collections.abc import Sequence

from loadgauge.core.answers.why.reason import Line, Reason, Rows
from loadgauge.core.base.units import count, flops, gib, seconds
from loadgauge.core.text.language import said
from loadgauge.core.text.table import Column, Paper, draw, heading, points, section


def write(reason: Reason, target: Paper, *, brief: bool = False) -> None:
    """Write a reason: the value, each formula in letters and in numbers, what it is summed from, notes and sources."""
    texts = [
        text for text in (reason.what, "" if reason.value is None else measured(reason.value, reason.unit)) if text
    ]
    target.print(f"{reason.topic}: {': '.join(map(said, texts))}", style="bold", soft_wrap=True)
    points(target, [*([reason.where] if reason.where else []), f"Rule: {reason.rule}. Basis: {reason.basis}."], "")
    if brief:
        return
    for line in reason.lines:
        _line(target, line)
    summed = [Rows("What it is summed from", reason.columns, reason.rows)] if reason.rows else []
    for table in (*summed, *reason.tables):
        columns = [_column(name, [row[index] for row in table.rows]) for index, name in enumerate(table.columns)]
        rows = [[cell if isinstance(cell, str) else short_number(cell) for cell in row] for row in table.rows]
        draw(target, columns, rows, table.title, [len(rows) - 1] if table.summed else [])
    for title, lines in (("Notes", (*reason.notes, *reason.see)), ("Sources", reason.sources)):
        section(target, title, lines)


def _column(name: str, cells: Sequence[str | float]) -> Column:
    """A column: of numbers, or of words, which may wrap."""
    words = any(isinstance(cell, str) and cell[:1].isalpha() for cell in cells)
    return Column(name, "left" if words else "right", wrap=words)


def _line(target: Paper, line: Line) -> None:
    heading(target, line.what[:1].upper() + line.what[1:])
    # Formulas are never broken into lines: they are there to be copied.
    for mark, text in (("", line.letters), ("= ", line.numbers)):
        if text:
            target.print(f"  {mark}{text}", soft_wrap=True, highlight=False)
    target.print(f"  = {measured(line.value, line.unit)}", soft_wrap=True, highlight=False)
    points(
        target, (f"{name} = {short_number(value)}: {meaning}" for name, (meaning, value) in line.legend.items()), "    "
    )


def short_number(value: float) -> str:
    """Format a number with thousands separators, to six digits where it is no whole one."""
    return f"{round(value):,}" if value == round(value) or abs(value) >= 1e6 else f"{value:,.6g}"


def measured(value: float, unit: str) -> str:
    """Format a value with its unit, and in a larger one where that is shorter to read.

    >>> measured(1.5, "s"), measured(2**31, "byte"), measured(0.448, "share"), measured(3.5e11, "byte/s")
    ('1.5 s', '2,147,483,648 byte (2.00 GiB)', '0.448 (44.8 %)', '350,000,000,000 byte/s (350 GB/s, 2,800 Gbit/s)')
    """
    written = f"{short_number(value)} {unit}"
    if unit == "share":
        return f"{short_number(value)} ({value:.1%})".replace("%", " %")
    if unit == "s":
        short = seconds(value)
        return written if short == written else f"{written} ({short})"
    if unit == "byte":
        return f"{short_number(round(value))} {unit} ({gib(value)})" if abs(value) >= 2**20 else written
    if unit == "byte/s":
        return f"{short_number(round(value))} {unit} ({value / 1e9:,.4g} GB/s, {8 * value / 1e9:,.4g} Gbit/s)"
    if unit == "FLOP":
        return f"{written} ({flops(value)})" if value >= 1e6 else written
    return f"{written} ({count(value)})" if value >= 1e6 else written
