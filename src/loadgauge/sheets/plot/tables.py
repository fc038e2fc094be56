"""Tables of any answer's ledger as bars: a bar for each row, a colour for each column."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from loadgauge.core.answers.answer import Entry, Pivot
from loadgauge.core.answers.figures.colours import PARTS
from loadgauge.core.base.units import GIB
from loadgauge.sheets.plot.sheet import new_figure, write

COLOURS = tuple(PARTS.values())
GIBS = {"byte": ("GiB", GIB)}
"""Units that are drawn in a larger one, and how many they are of it."""


def plot_tables(tables: Sequence[Pivot], ledger: Sequence[Entry], file: Path) -> None:
    """Write tables of a ledger to an .svg, .png or .pdf file. Raises `ConfigError` as `new_figure` does."""
    drawn = [(pivot, pivot.table(ledger), pivot.chosen(ledger)[0].unit) for pivot in tables]
    heights = [0.8 + 0.3 * len(table) for _, table, _ in drawn]
    with new_figure(file, (8, sum(heights))) as figure:
        every = figure.subplots(len(drawn), 1, squeeze=False, height_ratios=heights)
        for axes, (pivot, table, unit) in zip(every.flat, drawn, strict=True):
            name, size = GIBS.get(unit, (unit, 1))
            columns = list(dict.fromkeys(column for cells in table.values() for column in cells))
            for index, cells in enumerate(table.values()):
                left = 0.0
                for column, value in cells.items():
                    colour = COLOURS[columns.index(column) % len(COLOURS)]
                    axes.barh(index, value / size, left=left, color=colour, label=column)
                    left += value / size
                axes.annotate(f" {left:,.4g}", (left, index), va="center")
            axes.set_yticks(range(len(table)), table)
            axes.invert_yaxis()
            axes.set_xlabel(name)
            axes.set_title(pivot.title, loc="left", fontsize=11, fontweight="bold")
            if len(columns) > 1:
                handles, names = axes.get_legend_handles_labels()
                axes.legend([handles[names.index(column)] for column in columns], columns, fontsize=7, frameon=False)
        write(figure, file)
