"""Tables of any answer's ledger as bars: a bar for each row, a colour for each column."""

from collections.abc import Sequence
from pathlib import Path

from loadgauge.core.answers.answer import Entry, Pivot
from loadgauge.sheets.plot.forms import bars
from loadgauge.sheets.plot.sheet import new_figure, write


def plot_tables(tables: Sequence[Pivot], ledger: Sequence[Entry], file: Path) -> None:
    """Write tables of a ledger to an .svg, .png or .pdf file. Raises `ConfigError` as `new_figure` does."""
    drawn = [(pivot, pivot.table(ledger), pivot.chosen(ledger)[0].unit) for pivot in tables]
    heights = [0.8 + 0.3 * len(table) for _, table, _ in drawn]
    with new_figure(file, (8, sum(heights))) as figure:
        every = figure.subplots(len(drawn), 1, squeeze=False, height_ratios=heights)
        for axes, (pivot, table, unit) in zip(every.flat, drawn, strict=True):
            bars(axes, {"rows": table, "unit": unit, "limit": None}, named=False)
            axes.set_title(pivot.title, loc="left", fontsize=11, fontweight="bold")
        write(figure, file)
