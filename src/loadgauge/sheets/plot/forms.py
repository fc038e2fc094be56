"""Figures that are drawn from their data alone, by their form (`core/answers/figure.py`)."""

from collections.abc import Callable
from functools import partial
from typing import Any

from loadgauge.core.answers.figures.colours import EXPOSED, paint
from loadgauge.core.base.units import GIB, amount

GIBS = {"byte": ("GiB", GIB)}
"""Units that are drawn in a larger one, and how many they are of it."""


def bars(axes: Any, data: dict[str, Any], *, named: bool = True) -> None:
    """Draw a bar for each row, a colour for each of its parts (`named`: by its name), and a line at what is usable."""
    name, size = GIBS.get(data["unit"], (data["unit"], 1))
    rows = data["rows"]
    columns = list(dict.fromkeys(column for cells in rows.values() for column in cells))
    colours = paint(columns, named=named)
    for row, cells in enumerate(rows.values()):
        left = 0.0
        for column, value in cells.items():
            axes.barh(row, value / size, left=left, color=colours[column], label=column)
            left += value / size
        axes.annotate(f" {left:,.4g}", (left, row), va="center")
    axes.set_yticks(range(len(rows)), rows)
    axes.invert_yaxis()
    axes.set_xlabel(name)
    if len(columns) > 1:
        handles, names = axes.get_legend_handles_labels()
        axes.legend([handles[names.index(column)] for column in columns], columns, fontsize=7, frameon=False)
    if data["limit"] is not None:
        axes.axvline(data["limit"] / size, color=EXPOSED, linewidth=1, linestyle=(0, (4, 3)))


def curves(axes: Any, data: dict[str, Any], *, stacked: bool = True) -> None:
    """Draw series as areas upon one another or as lines, with a line at what is usable."""
    name, size = GIBS.get(data["unit"], (data["unit"], 1))
    series = {part: [value / size for value in values] for part, values in data["series"].items() if any(values)}
    colours = paint(series)
    if stacked:
        axes.stackplot(data["x"], series.values(), colors=colours.values(), labels=series, linewidth=0)
    else:
        for part, values in series.items():
            axes.plot(data["x"], values, color=colours[part], label=part)
    if data["limit"] is not None:
        axes.axhline(data["limit"] / size, color=EXPOSED, linewidth=1, linestyle=(0, (4, 3)))
        axes.annotate(
            f"{amount(data['limit'], data['unit'], 1)} usable",
            (1, data["limit"] / size),
            (0, 3),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            ha="right",
            fontsize=7.5,
            color=EXPOSED,
        )
    axes.set_ylim(bottom=0)
    axes.set(xlim=(0, data["x"][-1]), ylabel=name, xlabel=data["along"])
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=len(series), frameon=False, fontsize=7)


FORMS: dict[str, Callable[[Any, dict[str, Any]], None]] = {
    "bars": bars,
    "lines": partial(curves, stacked=False),
    "areas": curves,
}
